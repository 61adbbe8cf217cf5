"""Decode attention of `refined` on a GPU, against torch's best full attention on the same tensors in one run.

usage: python ops/bench/one_layer/refined_gpu.py [--bars] [--trained] [--figures 4-bits-128k-b1,2-bits] [--head-dim 64]
    [--group 16] [--flashinfer]

Regime: one layer of a decode step, 8 KV heads with 4 query heads each or as many as --group says, head dimension 128
or, with --head-dim, 64 or 256, bfloat16; keys, values and their coarse copies in the GPU's memory, every sequence of a
batch on a context of its own. Several layers' worth of everything take turns, so that no step finds its data in the
second-level cache. Figures come twice: `random` keys and values are normal numbers; `clustered` ones are as a trained
model's are: runs of tokens gather around centres, channels lie apart and have spreads of their own, and queries are
near some centres, so that a few blocks hold most of what is kept.

`graph_us` is one layer inside a CUDA graph of all of them: sample and cut, one pass over the coarse copy, attention to
the listed keys, sinks, recent window and tail, and the merge; `eager_us` the same launched from Python; medians after a
warm-up. `select_us` is sample, cut and lists without attention. `full_us` is the fastest of torch's cuDNN, flash and
memory-efficient attention (grouped heads), over keys and values as they are stored and over separate copies. `bytes` is
the least that a step has to read: the coarse copy, and the keys and values attended to exactly; `fraction` is how much
of a plain copy's bandwidth that makes. Before a time is reported, the output is compared with attention to the listed
keys as they are and to all others as they are coded, and the number of listed keys with the budget.

--flashinfer also times FlashInfer's full attention (`pip install flashinfer-python`) in all ways of
`flashinfer_baseline`, without a tail: over pages of the same keys and values, of which the fastest may become
`full_us`, and over float8 copies of them: `float8_us` is the fastest, and `float8_ratio` how much longer that takes
than `refined`. Ways that FlashInfer refuses on the device, or whose outputs are wrong, are told in
`flashinfer_left_out`.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
Bars are for head dimension 128 and groups of 4.
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
    DEVICE,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    TAIL,
    FlashInfer,
    Steps,
    figure_rows,
    step_plan,
)
from harness.made_up.coarse_layers import LENGTH, CoarseMemory
from harness.made_up.trained_rows import record_rows
from harness.report import CheckFailedError, check_close, reporting
from harness.timing import copy_bandwidth, full_attention_us, graph_us

from decode_engine.kernels.coarse.reference import attend_others_reference
from decode_engine.kernels.coarse.sizes import CoarseShape
from decode_engine.kernels.families import COARSE_ROWS, coarse_refusal
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.selections import CoarseSelection
from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Ratio


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured. bars: least ratio to full attention at each kept share; 0 where none is asked for."""

    name: str
    batch: int
    bits: int
    bars: Mapping[float, float]

    def without_bars(self) -> Figure:
        return replace(self, bars=dict.fromkeys(self.bars, 0.0))

    def takes(self, group: int, head_dim: int) -> bool:
        """Whether there are kernels for it."""
        return coarse_refusal(group, head_dim, (self.bits, self.bits), 1, LENGTH) is None

    def method(self) -> Method:
        spec = INDEX_SPECS["coarse_rows"].with_parameters(key_bits=self.bits, value_bits=self.bits)
        return replace(METHODS["refined"], index=spec, budget=Ratio(max(self.bars)))


FIGURES = (
    Figure("4-bits-128k-b1", 1, 4, {0.01: 2.7, 0.0025: 2.7}),
    Figure("3-bits-128k-b1", 1, 3, {0.01: 0.0}),
    Figure("2-bits-128k-b1", 1, 2, {0.01: 4.0}),
    Figure("4-bits-128k-b16", 16, 4, {0.01: 2.9, 0.0025: 2.9}),
    Figure("3-bits-128k-b16", 16, 3, {0.01: 0.0}),
    Figure("2-bits-128k-b16", 16, 2, {0.01: 4.8}),
)


class Bench(Steps):
    """The steps of a figure."""

    memory: CoarseMemory
    attention: ListedSteps

    def __init__(self, memory: CoarseMemory, figure: Figure, share: float) -> None:
        super().__init__(memory, share)
        self.figure = figure
        memory.code(figure.bits, self.keep)
        plan = step_plan(
            figure.method(), memory.layers, self.batch, self.length, head_dim=self.head_dim, group=self.group
        )
        self.attention, self.lists_only = ListedSteps(plan), CoarseSelection(plan)
        self.records = [memory.records(layer) for layer in range(memory.layers)]

    @property
    def selection(self) -> CoarseSelection:
        found = self.attention.selection
        if not isinstance(found, CoarseSelection):
            raise CheckFailedError(f"{type(found).__name__} searches")
        return found

    @property
    def shape(self) -> CoarseShape:
        return self.selection.sizes.shape

    def check(self, layer: int = 0) -> None:
        """Of the first and the last sequence."""
        memory = self.memory
        self.selection.lists.counts_RP.fill_(-1)
        out_BHGD = self.attend(layer)
        lists = self.selection.lists
        if not bool((lists.counts_RP >= 0).all()):
            raise CheckFailedError("a count was not written")
        listed = int(lists.counts_RP.sum()) / (self.keep * self.rows)
        # Few of a sample decide, and keys of one cluster are alike.
        if not 0.4 < listed < 3.0:
            raise CheckFailedError(f"{listed:.2f} of the wanted keys are listed")
        q_BHGD, sequences = memory.q[layer], memory.sequences[layer]
        some = {0, self.batch - 1}
        others = attend_others_reference(
            q_BHGD, [each if b in some else None for b, each in enumerate(sequences)], lists
        )
        for b in some:
            for h in range(KV_HEADS):
                row = b * KV_HEADS + h
                chosen = torch.zeros(self.length, dtype=torch.bool, device=DEVICE)
                chosen[lists.of_row(row)] = True
                chosen[: sequences[b].first] = True
                chosen[sequences[b].end :] = True
                rows = torch.cat([memory.kv[layer, b, h][chosen], memory.tail[b, h, :TAIL]]).double()
                logits = q_BHGD[b, h].double() @ rows[:, 0].t() * self.head_dim**-0.5
                exact = AttentionState(logits.softmax(-1) @ rows[:, 1], logits.logsumexp(-1))
                rest = AttentionState(others.out[row].double(), others.lse[row].double())
                check_close("refined attention", out_BHGD[b, h], exact.merge(rest).out, 2e-2)

    def index_bytes(self) -> int:
        codes, steps = 2 * self.head_dim * self.figure.bits // 8, 4 * self.head_dim
        levels = 4 * self.selection.sizes.value_groups
        return self.rows * (self.length * (codes + levels) + self.length // BLOCK * steps)

    def search_times(self, turns: int) -> dict[str, float]:
        def select(layer: int) -> object:
            return self.lists_only.select(layer, self.memory.q[layer], self.records[layer])

        return {"select_us": graph_us(self.all_layers(select), turns)}


def main(
    figures: Annotated[str, typer.Option(help="Names or prefixes, comma-separated; empty: all.")] = "",
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a figure misses its bar.")] = False,
    head_dim: Annotated[int, typer.Option(help="Channels of a head: 64, 128 or 256.")] = HEAD_DIM,
    group: Annotated[int, typer.Option(help="Query heads of a KV head: 1 to 16.")] = GROUP,
    trained: Annotated[bool, typer.Option("--trained", help="Also take a trained model's keys.")] = False,
    flashinfer: Annotated[
        bool, typer.Option("--flashinfer", help="Also time FlashInfer's full attention, and over 8 bits.")
    ] = False,
) -> None:
    """Times one layer's decode attention of `refined` on a GPU; one JSON line per figure."""
    prefixes = tuple(figures.split(",")) if figures else ("",)
    refusal = COARSE_ROWS.refusal(group, head_dim)
    if refusal is not None:
        raise typer.BadParameter(refusal)
    if flashinfer:
        load_flashinfer()  # refused before any work where it is missing
    chosen = [each for each in FIGURES if each.name.startswith(prefixes) and each.takes(group, head_dim)]
    if (head_dim, group) != (HEAD_DIM, GROUP):
        chosen = [figure.without_bars() for figure in chosen]
    with reporting("refined_gpu", bars) as report:
        torch.manual_seed(0)
        bandwidth = copy_bandwidth()
        rows = record_rows(LENGTH, DEVICE.type) if trained else None
        kinds = ("random", "clustered", *(["trained"] if rows is not None else []))
        for batch in dict.fromkeys(figure.batch for figure in chosen):
            for keys in kinds:
                memory = CoarseMemory(
                    LENGTH,
                    batch,
                    head_dim,
                    group=group,
                    clustered=keys == "clustered",
                    trained=rows if keys == "trained" else None,
                )
                full = full_attention_us(memory.q.flatten(2, 3), memory.kv)
                beside = FlashInfer.of(memory) if flashinfer else None
                for figure in (figure for figure in chosen if figure.batch == batch):
                    make = partial(Bench, memory, figure)
                    for row, missed in figure_rows(figure.name, figure.bars, make, full, bandwidth, beside):
                        report.add(row | {"head_dim": head_dim, "group": group, "keys": keys}, *missed)
                del memory, make
                torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
