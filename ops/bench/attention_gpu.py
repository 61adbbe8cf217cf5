"""Decode attention over query tables on a GPU, against torch's best full attention on the same tensors in the same run.

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

import json
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import triton
import typer
from gpu_timing import copy_bandwidth, eager_us, full_attention_us, graph_us, kernel_us
from torch import Tensor
from torch.nn.functional import normalize

from decode_engine.kernels.tables.batch import TableContext, TableSequence, records_of
from decode_engine.kernels.tables.plan import LaunchShape, TablePlan, Workspace
from decode_engine.kernels.tables.reference import attend_exactly, kept_mask, table_attention_reference
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.attention.table_steps import TableSteps
from index_store.methods.index_specs import INDEX_SPECS
from index_store.methods.method import METHODS, Method
from index_store.selection.budgets import Ratio
from index_store.store.manifest import ModelIdentity

KV_HEADS, GROUP, HEAD_DIM, DTYPE = 8, 4, 128, torch.bfloat16
SINKS, RECENT, TAIL = 8, 64, 16
COLD_BYTES = 512 * 2**20  # of one turn over all layers, at least: many times the second-level cache
TABLE_ROWS = 512


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured. bars: least ratio to full attention at each kept share; 0 where none is asked for."""

    name: str
    length: int
    batch: int
    subspaces: int
    pooled: bool
    bars: dict[float, float]

    @property
    def centroids(self) -> int:
        return TABLE_ROWS // self.subspaces

    def method(self) -> Method:
        sizes = {"subspaces": self.subspaces, "centroids": self.centroids}
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


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


class Memory:
    """Keys, values, tables and queries of several layers of a batch, used by all figures of that length and size."""

    def __init__(self, length: int, batch: int) -> None:
        size = batch * KV_HEADS * length * 2 * HEAD_DIM * DTYPE.itemsize
        self.layers = max(1, min(6, -(-COLD_BYTES * 4 // size)))
        shape = (self.layers, batch, KV_HEADS, length, 2, HEAD_DIM)
        self.kv = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        q = 3.0 * torch.randn(self.layers, batch, KV_HEADS, GROUP, HEAD_DIM, device="cuda")
        self.q = q.to(DTYPE)
        rows = (self.layers, batch, KV_HEADS, TABLE_ROWS, length)
        self.tables = torch.empty(rows, dtype=torch.int8, device="cuda").random_(-127, 128)
        self.tail = torch.empty(batch, KV_HEADS, 64, 2, HEAD_DIM, dtype=DTYPE, device="cuda").normal_()

    def sequences(self, figure: Figure, layer: int, keep: int) -> list[TableSequence | None]:
        """The batch's sequences in one layer."""
        width = HEAD_DIM // figure.subspaces
        shape = (figure.batch, KV_HEADS, figure.subspaces, figure.centroids, width)
        generator = torch.Generator("cuda").manual_seed(layer)
        centroids = normalize(torch.randn(shape, generator=generator, device="cuda"), dim=-1)
        scales = torch.full(shape[:3], 0.06 * HEAD_DIM**0.5 / width**0.5 / figure.subspaces, device="cuda")
        tables = self.tables[layer].view(*shape[:4], figure.length)
        return [
            TableSequence(
                TableContext(self.kv[layer, b], tables[b], centroids[b], scales[b]),
                self.tail[b],
                SINKS,
                figure.length - RECENT,
                TAIL,
                keep,
            )
            for b in range(figure.batch)
        ]


class Steps:
    """The decode steps of a figure: every layer's sequences, records and attention."""

    def __init__(self, memory: Memory, figure: Figure, share: float, shape: LaunchShape | None) -> None:
        self.keep = round(share * figure.length)
        heads = KV_HEADS * GROUP
        identity = ModelIdentity(
            "bench", "none", "f", "t", memory.layers, heads, KV_HEADS, HEAD_DIM, 2, 2**21
        )
        device = torch.device("cuda", 0)
        plan = StepPlan(identity, figure.method(), figure.batch, figure.length, DTYPE, device)
        self.attention = TableSteps(plan)
        if shape is not None:
            buffers = self.attention.buffers
            buffers.plan = replace(buffers.plan, shape=shape)
            buffers.work = Workspace.make(buffers.plan, plan.size, device)
            self.attention.counts_LBHP = buffers.work.counts().repeat(memory.layers, 1, 1, 1)
        self.memory = memory
        self.sequences = [memory.sequences(figure, layer, self.keep) for layer in range(memory.layers)]
        self.records = [records_of(of_layer, device) for of_layer in self.sequences]

    @property
    def plan(self) -> TablePlan:
        return self.attention.buffers.plan

    def attend(self, layer: int) -> Tensor:
        return self.attention.attend(layer, self.memory.q[layer], self.records[layer])

    def all_layers(self) -> list[Callable[[], Tensor]]:
        return [partial(self.attend, layer) for layer in range(self.memory.layers)]

    def kept(self) -> int:
        """Keys kept on average by a layer of the last steps, all sequences and KV heads together."""
        return int(self.attention.kept_B().sum()) // self.memory.layers


def check(steps: Steps, layer: int = 0) -> None:
    """Compares selection and output of the first sequences with eager ones. Raises CheckFailedError."""
    plan, work = steps.plan, steps.attention.buffers.work
    few, q = steps.sequences[layer][:2], steps.memory.q[layer]
    reference = Workspace.make(plan, len(few), q.device)
    counts, expected_counts = steps.attention.counts_LBHP[layer].fill_(-1), reference.counts()
    out = steps.attend(layer)
    table_attention_reference(q[: len(few)], few, plan, reference, expected_counts)
    for b, sequence in enumerate(few):
        if sequence is None:
            raise CheckFailedError(f"sequence {b} is idle")
        for h in range(KV_HEADS):
            if not bool((counts[b, h] >= 0).all()):
                raise CheckFailedError("a tile's count was not written")
            kept = kept_mask(work.ids[b, h], counts[b, h], sequence.context.keys)
            expected = kept_mask(reference.ids[b, h], expected_counts[b, h], sequence.context.keys)
            other = int((kept != expected).sum()) / max(1, int(expected.sum()))
            if not other <= 0.02:
                raise CheckFailedError(
                    f"the selection differs from the reference's in {other:.1%} of its keys"
                )
            exact, _ = attend_exactly(q[b, h].float(), sequence, kept, plan.scale, h)
            error = float((out[b, h].double() - exact).norm() / exact.norm())
            if not error <= 1e-2:
                raise CheckFailedError(f"relative error {error:.1e}")


def bytes_floor(figure: Figure, plan: TablePlan, kept: int) -> int:
    """The least that one layer's step has to read."""
    heads = figure.batch * KV_HEADS
    tables = heads * plan.queries * plan.subspaces * figure.length
    rows = kept + heads * (SINKS + RECENT + TAIL)
    return tables + rows * 2 * HEAD_DIM * DTYPE.itemsize


def measure(
    memory: Memory, figure: Figure, share: float, shape: LaunchShape | None, parts: bool
) -> dict[str, Any]:
    """Checks and times one launch shape. Raises CheckFailedError."""
    steps = Steps(memory, figure, share, shape)
    check(steps)
    layers = steps.all_layers()
    result: dict[str, Any] = {"graph_us": graph_us(layers, turns=max(1, 8 // len(layers)))}
    kept = steps.kept()
    result["kept_of_wanted"] = round(kept / (steps.keep * figure.batch * KV_HEADS), 3)
    result["bytes"] = bytes_floor(figure, steps.plan, kept)
    result["launch"] = asdict(steps.plan.shape)
    if parts:
        result["eager_us"] = eager_us(layers)
        result["kernels_us"] = kernel_us(layers)
    return result


def shapes_to_try(shape: LaunchShape) -> list[LaunchShape]:
    """Neighbours of a launch shape, for --sweep."""
    tile = shape.tile_keys
    tries = [
        *(replace(shape, stages=stages) for stages in (2, 3, 4, 5)),
        *(replace(shape, rows=rows) for rows in (16, 32, 64)),
        *(replace(shape, registers=limit) for limit in (64, 80, 96, 128, 0)),
        *(replace(shape, warps=warps) for warps in (4, 8)),
        replace(shape, exact_programs=3 - shape.exact_programs),
        replace(shape, tile_keys=tile * 2),
        replace(shape, tile_keys=tile // 2),
        replace(shape, sample_programs=shape.sample_programs * 2),
        replace(shape, sample_programs=max(1, shape.sample_programs // 2)),
    ]
    return [other for other in dict.fromkeys(tries) if other != shape]


def sweep(memory: Memory, figure: Figure, share: float, chosen: LaunchShape) -> None:
    """Times neighbours of the chosen launch shape, to stderr."""
    for other in shapes_to_try(chosen):
        changed = {k: v for k, v in asdict(other).items() if v != asdict(chosen)[k]}
        tried = measure(memory, figure, share, other, parts=False)
        sys.stderr.write(f"{figure.name} {share} {changed}: {tried['graph_us']:.2f} us\n")


def run_figure(
    memory: Memory, figure: Figure, full: dict[str, float], bandwidth: float, sweeping: bool
) -> list[dict[str, Any]]:
    """One row per kept share."""
    rows = []
    best_full = min(full, key=lambda name: full[name])
    for share, bar in figure.bars.items():
        result = measure(memory, figure, share, None, parts=True)
        if sweeping:
            sweep(memory, figure, share, LaunchShape(**result["launch"]))
        rows.append(
            {
                "figure": figure.name,
                "keep": share,
                "ratio": full[best_full] / result["graph_us"],
                "bar": bar,
                "full_us": full[best_full],
                "full_backend": best_full,
                **result,
                "fraction": result["bytes"] / (result["graph_us"] * 1e-6) / bandwidth,
            }
        )
    return rows


def time_full(memory: Memory) -> dict[str, float]:
    """Microseconds of torch's full attention, by backend and layout."""
    return full_attention_us(memory.q.flatten(2, 3), memory.kv)


def describe() -> dict[str, str]:
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def main(
    figures: Annotated[str, typer.Option(help="Names or prefixes, comma-separated; empty: all.")] = "",
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a figure misses its bar.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also time other launch shapes, to stderr.")] = False,
) -> None:
    """Times one layer's decode attention over query tables on a GPU; one JSON line per figure."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)
    prefixes = tuple(figures.split(",")) if figures else ("",)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    chosen = sorted((f for f in FIGURES if f.name.startswith(prefixes)), key=lambda f: (f.batch, f.length))
    missed: list[str] = []
    memory, held, full = None, None, {}
    try:
        for figure in chosen:
            if memory is None or held != (figure.length, figure.batch):
                memory, held = None, (figure.length, figure.batch)
                torch.cuda.empty_cache()
                memory = Memory(*held)
                full = time_full(memory)
            for row in run_figure(memory, figure, full, bandwidth, sweep):
                rounded = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
                line = {"bench": "attention_gpu", **rounded, "full_backends_us": full}
                line |= {"copy_tb_per_s": round(bandwidth / 1e12, 3), "machine": describe()}
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
                if row["ratio"] < row["bar"]:
                    missed.append(f"{row['figure']} at {row['keep']}: {row['ratio']:.2f}x, bar {row['bar']}x")
    except CheckFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if bars and missed:
        typer.echo("\n".join(f"missed: {line}" for line in missed), err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
