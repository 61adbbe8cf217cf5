"""Decode attention over product codes on a GPU, against torch's best full attention on the same tensors in one run.

usage: python ops/bench/one_layer/codes_gpu.py [--figures 128k-b1,quality] [--sweep]

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and codes (8
subspaces of 256 codewords) in the GPU's memory. Several layers' worth of everything take turns, so that no step finds
its data in the second-level cache. Keys, codes and codewords are random: time depends on how many keys are kept, which
is counted and reported, not on what they mean.

`select_us` is the search alone, which leaves lists of keys; `graph_us` is search, attention to the listed keys, to
sinks, recent window and tail, and the merge, the rest being dropped: one layer inside a CUDA graph of all of them;
`eager_us` the same launched from Python; medians after a warm-up. `full_us` is the fastest of torch's cuDNN, flash and
memory-efficient attention (grouped heads), over keys and values as they are stored and over separate copies. `bytes` is
the least that a step has to read: codes, codebooks, and the keys and values attended to; `fraction` is how much of a
plain copy's bandwidth that makes. `lookups` counts table entries looked up per nanosecond of the search and
multiprocessor. Before a time is reported, the keys that were kept are compared with those of the eager reference, and
the output with exact attention over them.

Figure `quality`: keys around centres, their codes by the product's own k-means. How many of the keys that the search
keeps are among as many best ones of the general path's ranking by the same codes (`overlap`), and how much attention
they hold, `mass`, against those, `mass_general`, and against the truly best ones, `mass_best`.

One JSON line per figure; the exit code is 1 when a check fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.layer import (
    COLD_BYTES,
    DEVICE,
    DTYPE,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    RECENT,
    SCALE,
    SINKS,
    TAIL,
    Memory,
    Steps,
    check_selection,
    figure_rows,
    step_plan,
)
from harness.report import CheckFailedError, check_close, reporting
from harness.timing import copy_bandwidth, full_attention_us, graph_us
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.codes.reference import CodeSequence, kept_keys
from decode_engine.kernels.codes.search import CodeShape, CodeWork
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.selections import CodeSelection
from decode_engine.steps.attention.step_attention import KeySelection
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.product_codes.index import ProductCodes
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Ratio
from index_store.selection.ranking import Items, Ranking
from index_store.store.stored_context import QuerySample

SUBSPACES, CODEWORDS = 8, 256
SHARES = {0.05: 0.0, 0.01: 0.0}
"""That are kept; no figure has a bar."""
CENTRES, QUALITY_HEADS = 1024, 2
FIGURES = {"128k-b1": (131072, 1), "512k-b1": (524288, 1), "128k-b16": (131072, 16)}
"""Tokens and sequences of a batch."""


class CodeMemory(Memory):
    """With codes and codebooks."""

    spread = 2.0

    def __init__(self, length: int, batch: int) -> None:
        searched = batch * KV_HEADS * length * (SUBSPACES + round(0.01 * 4 * HEAD_DIM))
        self.layers = max(2, min(16, -(-COLD_BYTES // 2 // searched)))
        super().__init__(length, batch)
        rows = (self.layers, batch, KV_HEADS, length, SUBSPACES)
        self.codes = torch.empty(rows, dtype=torch.uint8, device=DEVICE).random_(0, CODEWORDS)
        books = (self.layers, batch, KV_HEADS, SUBSPACES, CODEWORDS, HEAD_DIM // SUBSPACES)
        self.codebooks = torch.randn(books, device=DEVICE)

    def sequence(self, layer: int, b: int, keep: int) -> CodeSequence:
        end = self.kv.shape[3] - RECENT
        return CodeSequence(self.codes[layer, b], self.codebooks[layer, b], SINKS, end, keep)

    def records(self, layer: int, keep: int) -> Tensor:
        """[B, RECORD_FIELDS] on the device."""
        batch = self.kv.shape[1]
        rows = torch.zeros(batch, records.RECORD_FIELDS, dtype=torch.int64)
        for b in range(batch):
            fields = self.sequence(layer, b, keep).fields() | {
                records.KV: self.kv[layer, b].data_ptr(),
                records.KV_HEAD: self.kv.stride(2) * self.kv.element_size(),
                records.TAIL: self.tail[b].data_ptr(),
                records.TAIL_HEAD: self.tail.stride(1) * self.tail.element_size(),
                records.TAIL_KEYS: TAIL,
            }
            for field, value in fields.items():
                rows[b, field] = value
        return rows.to(DEVICE)


class CodeSteps(ListedSteps):
    """Attends to what product codes select."""

    selection_types: ClassVar[Mapping[str, type[KeySelection]]] = {ProductCodes.kind: CodeSelection}


class Bench(Steps):
    """A search over product codes, and attention to what it lists."""

    memory: CodeMemory
    attention: CodeSteps

    def __init__(self, memory: CodeMemory, share: float, shape: CodeShape | None = None) -> None:
        super().__init__(memory, share)
        plan = step_plan(method_of(share), memory.layers, self.batch, self.length)
        self.attention, self.selection = CodeSteps(plan), CodeSelection(plan)
        if shape is not None:
            self.selection.code_plan = replace(self.selection.code_plan, shape=shape)
            self.selection.work = CodeWork.make(self.selection.code_plan, plan.size, DEVICE)
        self.attention.selection = self.selection
        self.records = [memory.records(layer, self.keep) for layer in range(memory.layers)]

    @property
    def shape(self) -> CodeShape:
        return self.selection.code_plan.shape

    def neighbours(self) -> list[CodeShape]:
        shape = self.shape
        tries = [
            *(replace(shape, tile_keys=keys, warps=8) for keys in (shape.tile_keys, shape.tile_keys * 2)),
            replace(shape, sample_keys=shape.sample_keys // 2),
            replace(shape, sample_warps=4),
        ]
        return [other for other in dict.fromkeys(tries) if other != shape]

    def select(self, layer: int) -> KeyLists:
        return self.selection.select(layer, self.memory.q[layer], self.records[layer])

    def check(self, layer: int = 0) -> None:
        """Of the first and the last sequence."""
        memory, q = self.memory, self.memory.q[layer]
        lists = self.select(layer)
        lists.counts_RP.fill_(-1)
        out = self.attend(layer)
        if not bool((lists.counts_RP >= 0).all()):
            raise CheckFailedError("a count was not written")
        for b in {0, len(q) - 1}:
            sequence = memory.sequence(layer, b, self.keep)
            for h in range(KV_HEADS):
                kept = torch.zeros(memory.kv.shape[3], dtype=torch.bool, device=DEVICE)
                kept[lists.of_row(b * KV_HEADS + h)] = True
                check_selection(kept, kept_keys(q[b, h], sequence, h, self.selection.code_plan), 0.03)
                kept[: sequence.first] = True
                kept[sequence.end :] = True
                rows = torch.cat([memory.kv[layer, b, h][kept], memory.tail[b, h, :TAIL]]).double()
                weights = (q[b, h].double() @ rows[:, 0].t() * SCALE).softmax(-1)
                check_close("attention over codes", out[b, h], weights @ rows[:, 1], 1e-2)

    def index_bytes(self) -> int:
        return self.rows * (SUBSPACES * self.length + 4 * CODEWORDS * HEAD_DIM)

    def search_times(self, turns: int) -> dict[str, float]:
        us = graph_us(self.all_layers(self.select), turns)
        lookups = self.rows * self.length * SUBSPACES / (us * 1e3)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        return {"select_us": us, "lookups": lookups / processors}


def method_of(share: float) -> Method:
    """Which drops the remainder."""
    return replace(METHODS["pq"].without_remainder(), budget=Ratio(share))


def quality(length: int, sharpness: float) -> Iterator[dict[str, Any]]:
    """What the search keeps against the general path's ranking by the same codes, and against the best keys."""
    heads = QUALITY_HEADS
    centres = torch.randn(heads, CENTRES, HEAD_DIM, device=DEVICE)
    own = torch.randint(0, CENTRES, (heads, length, 1), device=DEVICE).expand(-1, -1, HEAD_DIM)
    kv = torch.randn(heads, length, 2, HEAD_DIM, device=DEVICE).to(DTYPE)
    kv[:, :, 0] = 0.8 * centres.gather(1, own) + 0.6 * kv[:, :, 0]
    sample = QuerySample(torch.zeros(heads, 1, GROUP, HEAD_DIM, device=DEVICE), torch.zeros(1).long())
    spec = INDEX_SPECS["product_codes"]
    index = ProductCodes.build(spec.parameters, LayerSource(kv, sample, torch.ones(HEAD_DIM // 2)), 0)
    q_HGD = (sharpness * torch.randn(heads, GROUP, HEAD_DIM, device=DEVICE)).to(DTYPE)
    first, end = SINKS, length - RECENT
    scaled = q_HGD.float()[:, None] * SCALE
    general = index.rank(scaled, first, end, None, {}).scores()[:, 0]
    logits = torch.einsum("htgd,hnd->htgn", scaled, kv[:, first:end, 0].float())
    shares = Ranking(logits, Items(first, end)).weights()[:, 0]
    arrays = index.arrays()
    for share in SHARES:
        plan = step_plan(method_of(share), 1, 1, length, heads)
        sequence = CodeSequence(arrays["codes"], arrays["codebooks"], first, end, round(share * length))
        record = torch.zeros(1, records.RECORD_FIELDS, dtype=torch.int64)
        for field, value in sequence.fields().items():
            record[0, field] = value
        lists = CodeSelection(plan).select(0, q_HGD[None], record.to(DEVICE))
        figures = torch.zeros(5)
        for h in range(heads):
            kept = lists.of_row(h).to(DEVICE) - first
            likely, best = (scores[h].topk(len(kept)).indices for scores in (general, shares))
            masses = [float(shares[h, keys].sum()) for keys in (kept, likely, best)]
            overlap = float(torch.isin(kept, likely).float().mean())
            figures += torch.tensor([len(kept) / sequence.keep, overlap, *masses]) / heads
        names = ("kept_of_wanted", "overlap", "mass", "mass_general", "mass_best")
        values = dict(zip(names, figures.tolist(), strict=True))
        yield {"figure": "quality", "keep": share, "sharpness": sharpness, **values}


def main(
    figures: Annotated[str, typer.Option(help="Names or prefixes, comma-separated; empty: all.")] = "",
    sweep: Annotated[bool, typer.Option("--sweep", help="Also time other launch shapes, to stderr.")] = False,
) -> None:
    """Times one layer's decode attention over product codes on a GPU; one JSON line per figure."""
    prefixes = tuple(figures.split(",")) if figures else ("",)
    with reporting("codes_gpu") as report:
        torch.manual_seed(0)
        bandwidth = copy_bandwidth()
        for name in (name for name in FIGURES if name.startswith(prefixes)):
            memory = CodeMemory(*FIGURES[name])
            full = full_attention_us(memory.q.flatten(2, 3), memory.kv)
            for row, _ in figure_rows(name, SHARES, partial(Bench, memory), full, bandwidth, sweep):
                report.add(row)
            del memory
            torch.cuda.empty_cache()
        for sharpness in (1.0, 3.0) if "quality".startswith(prefixes) else ():
            for row in quality(131072, sharpness):
                report.add(row)


if __name__ == "__main__":
    typer.run(main)
