"""Decode attention over query tables on a GPU, against torch's best full attention on the same tensors in the same run.

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and tables in
the GPU's memory. Several copies of everything take turns, so that no step finds its data in the second-level cache.
Numbers are random: time depends on how many keys are kept, which is counted and reported, not on what they mean.

`graph_us` is one step inside a CUDA graph of several steps, `eager_us` one by one with the launches; medians after a
warm-up. `full_us` is the fastest of torch's cuDNN, flash and memory-efficient attention (grouped heads), over keys and
values as they are stored and over separate copies, in a CUDA graph likewise. `bytes` is what a step has to read and
write; `fraction` is how much of the bandwidth of a plain copy that makes. Before a time is reported, the keys that were
kept are compared with those of the eager reference, and the output with exact attention over them.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import normalize, scaled_dot_product_attention

from decode_engine.kernels.table_attention import table_attention
from decode_engine.kernels.table_batch import (
    MINI_KEYS,
    LaunchShape,
    TableBatch,
    TableContext,
    TablePlan,
    TableSequence,
    Workspace,
    launch_shape,
)
from decode_engine.kernels.table_reference import attend_exactly, table_attention_reference

KV_HEADS, GROUP, HEAD_DIM, DTYPE = 8, 4, 128, torch.bfloat16
SINKS, RECENT, TAIL = 10, 64, 16
COLD_BYTES = 512 * 2**20  # of one turn over all copies, at least: many times the second-level cache
TURNS = 25
WARM_SECONDS = 0.05  # an idle device takes milliseconds to reach its clocks


@dataclass(frozen=True, slots=True)
class Figure:
    """What is measured. bars: least ratio to full attention at each kept share."""

    name: str
    length: int
    batch: int
    subspaces: int
    centroids: int
    pooled: bool
    bars: dict[float, float]


FIGURES = (
    Figure("pooled-128k-b1", 131072, 1, 8, 64, True, {0.05: 5.5, 0.01: 7.0}),
    Figure("pooled-512k-b1", 524288, 1, 8, 64, True, {0.05: 9.0, 0.01: 13.0}),
    Figure("pooled-128k-b16", 131072, 16, 8, 64, True, {0.05: 11.0, 0.01: 18.0}),
    Figure("per-head-m16-128k-b1", 131072, 1, 16, 32, False, {0.05: 0.0, 0.01: 3.8}),
    Figure("per-head-m16-128k-b16", 131072, 16, 16, 32, False, {0.05: 0.0, 0.01: 5.5}),
    Figure("per-head-m8-128k-b1", 131072, 1, 8, 64, False, {0.05: 4.5, 0.01: 0.0}),
    Figure("per-head-m8-128k-b16", 131072, 16, 8, 64, False, {0.05: 7.0, 0.01: 0.0}),
)


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


class Memory:
    """Keys, values and tables of several copies of a batch, reused by figures of the same length and batch size."""

    def __init__(self, length: int, batch: int) -> None:
        size = batch * KV_HEADS * length * 2 * HEAD_DIM * DTYPE.itemsize
        self.copies = max(1, min(6, -(-COLD_BYTES * 4 // size)))
        shape = (self.copies, batch, KV_HEADS, length, 2, HEAD_DIM)
        self.kv = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        self.q = 3.0 * torch.randn(self.copies, batch, KV_HEADS, GROUP, HEAD_DIM, device="cuda")
        self.q = self.q.to(DTYPE)
        columns = -(-length // MINI_KEYS) * MINI_KEYS
        rows = (self.copies, batch, KV_HEADS, 512, columns)
        self.tables = torch.empty(rows, dtype=torch.int8, device="cuda").random_(-127, 128)
        self.tail = torch.empty(batch, KV_HEADS, 64, 2, HEAD_DIM, dtype=DTYPE, device="cuda").normal_()

    def batches(self, figure: Figure, keep: int) -> list[TableBatch]:
        """One batch per copy."""
        width = HEAD_DIM // figure.subspaces
        shape = (self.kv.shape[1], KV_HEADS, figure.subspaces, figure.centroids, width)
        centroids = normalize(torch.randn(shape, device="cuda"), dim=-1)
        scales = torch.full(shape[:3], 0.06 * HEAD_DIM**0.5 / width**0.5 / figure.subspaces, device="cuda")
        return [
            TableBatch.of(
                [
                    TableSequence(
                        TableContext(self.kv[copy, b], self.tables[copy, b], centroids[b], scales[b]),
                        self.tail[b],
                        SINKS,
                        figure.length - RECENT,
                        TAIL,
                        keep,
                    )
                    for b in range(figure.batch)
                ]
            )
            for copy in range(self.copies)
        ]


def graph_us(steps: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a step; all of them, in turn, make one CUDA graph."""
    turns = max(1, 8 // len(steps))
    for step in steps:
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for step in steps:
                step()
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_SECONDS:
        graph.replay()
        torch.cuda.synchronize()
    event = partial(torch.cuda.Event, enable_timing=True)
    events = [(event(), event()) for _ in range(TURNS)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [float(start.elapsed_time(end)) for start, end in events]
    return statistics.median(times) * 1e3 / turns / len(steps)


def eager_us(steps: Sequence[Callable[[], object]]) -> float:
    """Median microseconds of a step launched from Python."""
    times = []
    for turn in range(TURNS + 5):
        step = steps[turn % len(steps)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[5:])


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a plain copy of 4 GiB: the faster of a memory copy and a kernel."""
    source = torch.empty(2**30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    ways = (partial(target.copy_, source), partial(torch.bitwise_not, source, out=target))
    return 2 * source.nbytes / (min(graph_us([way]) for way in ways) * 1e-6)


def time_full(memory: Memory) -> dict[str, float]:
    """Microseconds of full attention by torch's backends; those that cannot do it are left out."""
    copies, batch = memory.kv.shape[:2]
    q = memory.q.view(copies, batch, KV_HEADS * GROUP, 1, HEAD_DIM)
    found: dict[str, float] = {}
    for layout in ("stored", "separate"):
        keys, values = memory.kv[..., 0, :], memory.kv[..., 1, :]
        if layout == "separate":
            keys, values = keys.contiguous(), values.contiguous()
        for backend in (
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        ):

            def step(copy: int, keys: Tensor = keys, values: Tensor = values) -> Tensor:
                return scaled_dot_product_attention(q[copy], keys[copy], values[copy], enable_gqa=True)

            try:
                with warnings.catch_warnings(action="ignore"), sdpa_kernel(backend):
                    found[f"{backend.name.lower()}, {layout}"] = graph_us(
                        [partial(step, copy) for copy in range(copies)]
                    )
            except RuntimeError:
                torch.cuda.synchronize()
    return found


def check(memory: Memory, plan: TablePlan, batch: TableBatch, work: Workspace) -> None:
    """Compares selection and output of a step over copy 0 with eager ones. Raises CheckFailedError."""
    few = TableBatch.of(batch.sequences[:2])
    reference = Workspace.make(plan, len(few.sequences), DTYPE, "cuda")
    q = memory.q[0]
    work.out.fill_(torch.nan)
    work.counts.fill_(-1)
    table_attention(q, batch, plan, work)
    table_attention_reference(q[: len(few.sequences)], few, plan, reference)
    selections = [buffers.kept(plan.max_keys) for buffers in (work, reference)]
    for b, sequence in enumerate(few.sequences):
        for h in range(KV_HEADS):
            kept = torch.zeros(2, sequence.context.keys, dtype=torch.bool, device="cuda")
            for which, (ids, counts) in enumerate(selections):
                kept[which, ids[b, h, : int(counts[b, h])].long()] = True
            other = int((kept[0] != kept[1]).sum()) / max(1, int(kept[1].sum()))
            if not other <= 0.02:
                raise CheckFailedError(
                    f"the selection differs from the reference's in {other:.1%} of its keys"
                )
            out, lse = attend_exactly(q[b, h].float(), sequence, kept[0], plan.scale, h)
            error = float((work.out[b, h].double() - out).norm() / out.norm())
            lse_error = float((work.lse[b, h].double() - lse).abs().max())
            if not (error <= 1e-2 and lse_error <= 1e-2):
                raise CheckFailedError(f"relative error {error:.1e}, of the lse {lse_error:.1e}")


def bytes_touched(figure: Figure, plan: TablePlan, work: Workspace) -> int:
    """What one step reads and writes, without the partial results."""
    heads = figure.batch * KV_HEADS
    table = heads * plan.queries * plan.subspaces * figure.length
    if plan.pooled:
        table += heads * plan.subspaces * min(figure.length, plan.shape.sample_programs * 1024)
    else:
        table += 2 * heads * plan.queries * figure.length
    rows = int(work.counts.sum()) + heads * (SINKS + RECENT + TAIL)
    return table + rows * 2 * HEAD_DIM * DTYPE.itemsize


def measure(memory: Memory, figure: Figure, share: float, shape: LaunchShape, parts: bool) -> dict[str, Any]:
    """Checks and times one launch shape. Raises CheckFailedError."""
    keep = round(share * figure.length)
    plan = TablePlan(
        KV_HEADS,
        GROUP,
        HEAD_DIM,
        figure.subspaces,
        figure.centroids,
        figure.length,
        figure.pooled,
        shape=shape,
    )
    batches = memory.batches(figure, keep)
    work = Workspace.make(plan, figure.batch, DTYPE, "cuda")
    check(memory, plan, batches[0], work)
    calls = list(zip(memory.q, batches, strict=True))
    kept = int(work.counts.sum()) / (keep * figure.batch * KV_HEADS)
    result: dict[str, Any] = {
        "graph_us": graph_us([partial(table_attention, *c, plan, work) for c in calls]),
        "eager_us": eager_us([partial(table_attention, *c, plan, work) for c in calls]),
        "kept_of_wanted": round(kept, 3),
        "bytes": bytes_touched(figure, plan, work),
        "launch": asdict(shape),
    }
    if parts:

        def turn() -> None:
            for call in calls:
                table_attention(*call, plan, work)

        result["kernels_us"] = kernel_times(turn)
    return result


def shapes_to_try(shape: LaunchShape) -> list[LaunchShape]:
    """Neighbours of a launch shape, for --sweep."""
    tile = shape.tile_keys
    tries = [
        replace(shape, stages=5 - shape.stages),
        replace(shape, rows=96 - shape.rows),
        replace(shape, registers=0),
        *(replace(shape, registers=limit) for limit in (80, 96, 128)),
        replace(shape, exact_programs=3 - shape.exact_programs),
        replace(shape, tile_keys=tile * 2),
        replace(shape, tile_keys=tile // 2),
        replace(shape, dependent_launch=not shape.dependent_launch),
        replace(shape, pick_apart=not shape.pick_apart),
        replace(shape, early_threshold=not shape.early_threshold),
    ]
    return [other for other in tries if other != shape]


def kernel_times(step: Callable[[], object]) -> dict[str, float]:
    """Mean microseconds of every kernel of a step, by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(TURNS):
            step()
        torch.cuda.synchronize()
    return {event.key: round(event.device_time_total / event.count, 2) for event in profile.key_averages()}


def run_figure(
    memory: Memory, figure: Figure, full: dict[str, float], bandwidth: float, sweep: bool
) -> list[dict[str, Any]]:
    """One row per kept share."""
    rows = []
    best_full = min(full, key=lambda name: full[name])
    for share, bar in figure.bars.items():
        shape = launch_shape(figure.length, figure.batch * KV_HEADS, figure.pooled)
        result = measure(memory, figure, share, shape, parts=True)
        if sweep and share == max(figure.bars):
            for other in shapes_to_try(shape):
                tried = measure(memory, figure, share, other, parts=False)
                changed = {k: v for k, v in asdict(other).items() if v != asdict(shape)[k]}
                sys.stderr.write(f"{figure.name} {share} {changed}: {tried['graph_us']:.2f} us\n")
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
