"""Decode attention of `refined` with exact rows in host memory, against torch's best full attention in GPU memory.

usage: python ops/bench/one_layer/refined_host_gpu.py [--bars] [--trained] [--keeps 0.0025,0.005,0.01] [--bits 4]
       python ops/bench/one_layer/refined_host_gpu.py --rows int8 [--bars]

Regime: one layer of a decode step, batch 1, 32 query heads, 8 KV heads, head dimension 128, bfloat16; coarse copies in
the GPU's memory, keys and values in host memory as the arena makes it, 512 bytes a row. With `--rows int8` the low
plane of rows in 8 bits is there instead, 128 bytes a row, and what is in the GPU's memory are the decoded rows. Several
layers take turns, so that no step finds its data in the second-level cache. Slots are emptied before every step: each
row that is attended exactly is fetched. `step_us` is that step without the time of emptying, which is `empty_us`;
`reused_us` the same step where all of its rows are in slots; `device_us` the step with keys and values in the GPU's
memory. `read_mb` are read from host memory in a step.

Times are medians inside a CUDA graph of all layers. `full_us` is the fastest of torch's backends on the same keys,
values and queries in the GPU's memory in the same run; `ratio` is the step's to it: below 1, the step is faster. Before
a time is reported, the output is compared with that of the step in the GPU's memory: they differ by the order of sums.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.checks import CheckFailedError, check_close
from harness.layer import DEVICE, KV_HEADS, RECENT, SINKS, step_plan
from harness.made_up.coarse_layers import LENGTH, CoarseMemory
from harness.made_up.trained_rows import TrainedRows, record_rows
from harness.report import reporting
from harness.timing import fastest, full_attention_us, graph_us
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.steps.attention.listed_steps import HybridSteps, ListedSteps
from index_store.indexes.coarse_rows.scalars.coding_numba import code_rows
from index_store.indexes.row_planes.two_planes import TwoPlanes, find_low_plane
from index_store.memory.host_memory import HostBlock, default_page_locker
from index_store.memory.placement import slots_per_head
from index_store.methods.index_specs import INDEX_SPECS
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Ratio
from index_store.store.description.dtypes import AS_DTYPE, INT8, ROW_CODINGS

BARS = {AS_DTYPE: {0.0025: 0.55, 0.005: 0.78}, INT8: {0.01: 0.55}}
"""Most ratios by how rows are stored and by what is kept."""


class HostMemory(CoarseMemory):
    """With a copy of all keys and values in host memory; of rows in 8 bits the low plane.

    These are decoded in the device's memory: what `planes` hold, and the coarse copies are those of the high planes.
    """

    def __init__(
        self, length: int, *, clustered: bool, trained: TrainedRows | None, rows: str = AS_DTYPE
    ) -> None:
        super().__init__(length, 1, clustered=clustered, trained=trained)
        self.planes = [split_rows(kv[0]) for kv in self.kv] if rows == INT8 else []
        for kv, own in zip(self.kv, self.planes, strict=False):
            kv[0] = own.decode(0, length)
        stored = [own.low_HN2C for own in self.planes] or [kv[0] for kv in self.kv]
        locker, mapped = default_page_locker(), DEVICE.type == "cuda"
        self.blocks = [
            HostBlock(each.nbytes, locker, gathered=mapped, huge_pages=not mapped) for each in stored
        ]
        self.host_rows = []
        for block, each in zip(self.blocks, stored, strict=True):
            self.host_rows.append(block.take(each.shape, each.dtype).copy_(each))
            block.lock()

    def code(self, bits: int, keep: int) -> None:
        """Of rows in 8 bits nothing is coded again: decoded numbers have other ranges."""
        super().code(bits, keep)
        for own, sequences in zip(self.planes, self.sequences, strict=False):
            sequences[0] = replace(sequences[0], rows=own.coarse)

    def host_records(self, layer: int, cache: SlotCache) -> Tensor:
        """[1, RECORD_FIELDS] on the device."""
        rows = self.records(layer).cpu()
        stored = self.host_rows[layer]
        rows[0, records.KV] = stored.data_ptr()
        rows[0, records.KV_HEAD] = stored.stride(0) * stored.element_size()
        for field, value in cache.fields(layer).items():
            rows[0, field] = value
        return rows.to(DEVICE)


def split_rows(kv_HN2D: Tensor) -> TwoPlanes:
    """Both planes of rows."""
    coarse = code_rows(kv_HN2D, 0, 4, 4, 1)
    return TwoPlanes(coarse, find_low_plane(kv_HN2D, coarse), kv_HN2D.dtype)


class Bench:
    """Steps that keep one share of the keys."""

    def __init__(self, memory: HostMemory, bits: int, keep: float) -> None:
        self.memory, self.budget = memory, round(keep * memory.kv.shape[3])
        memory.code(bits, self.budget)
        length = memory.kv.shape[3]
        spec = INDEX_SPECS["coarse_rows"].with_parameters(key_bits=bits, value_bits=bits)
        method = replace(METHODS["refined"], index=spec, budget=Ratio(keep))
        plan = step_plan(method, memory.layers, 1, length)
        stored, on_host = memory.host_rows[0], replace(plan, planes=bool(memory.planes))
        self.row_bytes = on_host.row_bytes
        self.layers = range(memory.layers)
        slots = slots_per_head(length)
        self.cache = SlotCache.make(
            self.layers, KV_HEADS, length, slots, stored.shape[3], stored.dtype, DEVICE
        )
        self.hybrid, self.device = HybridSteps(on_host), ListedSteps(plan)
        self.on_host = [memory.host_records(layer, self.cache) for layer in self.layers]
        self.on_device = [memory.records(layer) for layer in self.layers]

    def empty(self, layer: int) -> None:
        self.cache.tags_LHS[layer].zero_()

    def step(self, layer: int, *, empty: bool) -> Tensor:
        if empty:
            self.empty(layer)
        return self.hybrid.attend(layer, self.memory.q[layer], self.on_host[layer])

    def step_on_device(self, layer: int) -> Tensor:
        return self.device.attend(layer, self.memory.q[layer], self.on_device[layer])

    def check(self) -> float:
        """Relative error of steps; raises CheckFailedError where it is too large."""
        return max(
            check_close(
                f"layer {layer}", self.step(layer, empty=True), self.step_on_device(layer).float(), 1e-2
            )
            for layer in {0, self.memory.layers - 1}
        )

    def read(self) -> float:
        """Rows that a layer's step reads from host memory."""
        self.cache.clear()
        for layer in self.layers:
            self.step(layer, empty=True)
        counts, wanted = self.cache.counts(), (self.budget + SINKS + RECENT) * KV_HEADS * self.memory.layers
        if not 0.6 < (found := counts.fetched + counts.bypassed) / wanted < 1.6:
            raise CheckFailedError(f"{found} rows were read from host memory, expected about {wanted}")
        return found / self.memory.layers

    def times(self) -> dict[str, float]:
        turns = 8
        empty_us = graph_us([partial(self.empty, layer) for layer in self.layers], turns)
        step_us = graph_us([partial(self.step, layer, empty=True) for layer in self.layers], turns)
        return {
            "step_us": step_us - empty_us,
            "empty_us": empty_us,
            "reused_us": graph_us([partial(self.step, layer, empty=False) for layer in self.layers], turns),
            "device_us": graph_us([partial(self.step_on_device, layer) for layer in self.layers], turns),
        }


def figure(memory: HostMemory, bits: int, keep: float, full: dict[str, float]) -> dict[str, Any]:
    """One share's figures. Raises CheckFailedError when its output is wrong."""
    bench, best = Bench(memory, bits, keep), fastest(full)
    row: dict[str, Any] = {"keep": keep, "bits": bits, "error": bench.check()}
    row |= {"read_mb": bench.read() * bench.row_bytes * 1e-6, **bench.times(), **best}
    bars = BARS[INT8 if memory.planes else AS_DTYPE]
    return row | {"ratio": row["step_us"] / float(best["full_us"]), "bar": bars.get(keep)}


def main(
    keeps: Annotated[str, typer.Option(help="Shares of the keys that are kept, comma-separated.")] = (
        "0.0025,0.005,0.01"
    ),
    bits: Annotated[int, typer.Option(help="Of codes.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of the context.")] = LENGTH,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a figure misses its bar.")] = False,
    trained: Annotated[bool, typer.Option("--trained", help="Also take a trained model's keys.")] = False,
    rows: Annotated[str, typer.Option(help="In host memory: dtype or int8.")] = AS_DTYPE,
) -> None:
    """Times one layer's decode attention of `refined` to a context in host memory; one JSON line per figure."""
    if rows not in ROW_CODINGS or (rows == INT8 and bits != 4):
        raise typer.BadParameter(f"--rows {rows} with --bits {bits}, expected dtype, or int8 with 4 bits")
    with reporting("refined_host_gpu", bars) as report:
        torch.manual_seed(0)
        recorded = record_rows(length, DEVICE.type) if trained else None
        for keys in ("random", "clustered", *(["trained"] if recorded is not None else [])):
            memory = HostMemory(
                length,
                clustered=keys == "clustered",
                trained=recorded if keys == "trained" else None,
                rows=rows,
            )
            full = full_attention_us(memory.q.flatten(2, 3), memory.kv)
            for keep in (float(part) for part in keeps.split(",")):
                row = figure(memory, bits, keep, full)
                missed = row["bar"] is not None and row["ratio"] > row["bar"]
                report.add(
                    row | {"keys": keys, "context": length, "rows": rows},
                    *(
                        [f"keep {keep}, {keys} keys: {row['ratio']:.2f}x, bar {row['bar']}x"]
                        if missed
                        else []
                    ),
                )
            del memory


if __name__ == "__main__":
    typer.run(main)
