"""Decode attention over query tables on a GPU, against torch's best full attention on the same tensors in the same run.

usage: python ops/bench/one_layer/attention_gpu.py [--bars] [--figures pooled,per-head-m16] [--flashinfer]

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and tables in
the GPU's memory. Several layers' worth of everything take turns, so that no step finds its data in the second-level
cache. Numbers are random: time depends on how many keys are kept, which is counted and reported, not on what they mean.

`graph_us` is one layer inside a CUDA graph of all of them, `eager_us` launched from Python; medians after a warm-up.
`full_us` is the fastest of torch's cuDNN, flash and memory-efficient attention (grouped heads), over keys and values as
they are stored and over separate copies. `bytes` is the least that a step has to read: one table row per subspace and
searched query, and the keys and values attended to; `fraction` is how much of a plain copy's bandwidth that makes.
Before a time is reported, the keys that were kept are compared with those of the eager reference, and the output with
exact attention over them.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.flashinfer_baseline import load_flashinfer
from harness.layer import (
    COLD_BYTES,
    DEVICE,
    HEAD_DIM,
    KV_HEADS,
    RECENT,
    ROW,
    SINKS,
    TAIL,
    FlashInfer,
    Memory,
    Steps,
    check_selection,
    figure_rows,
    step_plan,
)
from harness.report import CheckFailedError, check_close, reporting
from harness.timing import copy_bandwidth, full_attention_us
from torch.nn.functional import normalize

from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables.reference import (
    TableSequence,
    attend_exactly,
    kept_mask,
    table_attention_reference,
)
from decode_engine.kernels.tables.sizes import TableContext, TableShape, TableSizes, TableWork
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.selections import TableSelection
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Ratio

TABLE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured. bars: least ratio to full attention at each kept share; 0 where none is asked for."""

    name: str
    length: int
    batch: int
    subspaces: int
    pooled: bool
    bars: Mapping[float, float]

    def method(self) -> Method:
        """Which drops the remainder."""
        sizes = {"subspaces": self.subspaces, "centroids": TABLE_ROWS // self.subspaces}
        search = {"group": "pooled" if self.pooled else "per_head", "weights": "projection"}
        return replace(
            METHODS["csattention"].without_remainder(),
            index=INDEX_SPECS["query_tables"].with_parameters(**sizes),
            search=search,
            budget=Ratio(max(self.bars)),
        )


FIGURES = (
    Figure("pooled-128k-b1", 131072, 1, 8, True, {0.05: 5.5, 0.01: 7.0}),
    Figure("pooled-512k-b1", 524288, 1, 8, True, {0.05: 9.0, 0.01: 13.0}),
    Figure("pooled-128k-b16", 131072, 16, 8, True, {0.05: 11.0, 0.01: 18.0}),
    Figure("per-head-m16-128k-b1", 131072, 1, 16, False, {0.05: 0.0, 0.01: 3.8}),
    Figure("per-head-m16-128k-b16", 131072, 16, 16, False, {0.05: 0.0, 0.01: 5.5}),
    Figure("per-head-m8-128k-b1", 131072, 1, 8, False, {0.05: 4.5, 0.01: 0.0}),
    Figure("per-head-m8-128k-b16", 131072, 16, 8, False, {0.05: 7.0, 0.01: 0.0}),
)


class TableMemory(Memory):
    """With tables, used by all figures of that length and size."""

    spread = 3.0

    def __init__(self, length: int, batch: int) -> None:
        self.layers = max(1, min(6, -(-COLD_BYTES * 4 // (batch * KV_HEADS * length * ROW))))
        super().__init__(length, batch)
        rows = (self.layers, batch, KV_HEADS, TABLE_ROWS, length)
        self.tables = torch.empty(rows, dtype=torch.int8, device=DEVICE).random_(-127, 128)

    def sequences(self, subspaces: int, layer: int, keep: int) -> list[TableSequence | None]:
        """The batch's sequences in one layer."""
        batch, length, width = self.kv.shape[1], self.kv.shape[3], HEAD_DIM // subspaces
        shape = (batch, KV_HEADS, subspaces, TABLE_ROWS // subspaces, width)
        generator = torch.Generator(DEVICE).manual_seed(layer)
        centroids = normalize(torch.randn(shape, generator=generator, device=DEVICE), dim=-1)
        scales = torch.full(shape[:3], 0.06 * HEAD_DIM**0.5 / width**0.5 / subspaces, device=DEVICE)
        tables = self.tables[layer].view(*shape[:4], length)
        return [
            TableSequence(
                TableContext(self.kv[layer, b], tables[b], centroids[b], scales[b]),
                self.tail[b], SINKS, length - RECENT, TAIL, keep,
            )
            for b in range(batch)
        ]  # fmt: skip


class Bench(Steps):
    """The steps of a figure."""

    attention: ListedSteps

    def __init__(self, memory: TableMemory, figure: Figure, share: float) -> None:
        super().__init__(memory, share)
        plan = step_plan(figure.method(), memory.layers, figure.batch, figure.length)
        self.attention = ListedSteps(plan)
        layers = range(memory.layers)
        self.sequences = [memory.sequences(figure.subspaces, layer, self.keep) for layer in layers]
        self.records = [records_of(of_layer, DEVICE) for of_layer in self.sequences]

    @property
    def selection(self) -> TableSelection:
        found = self.attention.selection
        if not isinstance(found, TableSelection):
            raise CheckFailedError(f"steps search by {type(found).__name__}")
        return found

    @property
    def plan(self) -> TableSizes:
        return self.selection.sizes

    @property
    def shape(self) -> TableShape:
        return self.plan.shape

    def check(self, layer: int = 0) -> None:
        """Of the first sequences."""
        plan, work = self.plan, self.selection.work
        few, q = self.sequences[layer][:2], self.memory.q[layer]
        reference = TableWork.make(plan, len(few), q.device)
        counts = self.attention.kept_LRX[layer].fill_(-1).view(work.ids.shape[:3])
        expected_counts = reference.counts()
        out = self.attend(layer)
        table_attention_reference(q[: len(few)], few, plan, reference, expected_counts)
        for b, sequence in enumerate(few):
            if sequence is None:
                raise CheckFailedError(f"sequence {b} is idle")
            for h in range(KV_HEADS):
                if not bool((counts[b, h] >= 0).all()):
                    raise CheckFailedError("a tile's count was not written")
                kept = kept_mask(work.ids[b, h], counts[b, h], sequence.context.keys)
                expected = kept_mask(reference.ids[b, h], expected_counts[b, h], sequence.context.keys)
                check_selection(kept, expected, 0.02)
                exact, _ = attend_exactly(q[b, h].float(), sequence, kept, plan.scale, h)
                check_close("attention over tables", out[b, h], exact, 1e-2)

    def index_bytes(self) -> int:
        return self.rows * self.plan.queries * self.plan.subspaces * self.length


def main(
    figures: Annotated[str, typer.Option(help="Names or prefixes, comma-separated; empty: all.")] = "",
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a figure misses its bar.")] = False,
    flashinfer: Annotated[bool, typer.Option("--flashinfer", help="As in refined_gpu.py.")] = False,
) -> None:
    """Times one layer's decode attention over query tables on a GPU; one JSON line per figure."""
    prefixes = tuple(figures.split(",")) if figures else ("",)
    if flashinfer:
        load_flashinfer()  # refused before any work where it is missing
    chosen = sorted((f for f in FIGURES if f.name.startswith(prefixes)), key=lambda f: (f.batch, f.length))
    with reporting("attention_gpu", bars) as report:
        torch.manual_seed(0)
        bandwidth = copy_bandwidth()
        for length, batch in dict.fromkeys((figure.length, figure.batch) for figure in chosen):
            memory = TableMemory(length, batch)
            full = full_attention_us(memory.q.flatten(2, 3), memory.kv)
            beside = FlashInfer.of(memory) if flashinfer else None
            for figure in (f for f in chosen if (f.length, f.batch) == (length, batch)):
                make = partial(Bench, memory, figure)
                for row, missed in figure_rows(figure.name, figure.bars, make, full, bandwidth, beside):
                    report.add(row, *missed)
            del memory, make
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
