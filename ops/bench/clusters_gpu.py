"""Attention to listed keys and to key clusters on a GPU, and how long indexes take to build there.

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and clusters
in the GPU's memory. Several layers' worth of everything take turns, so that no step finds its data in the second-level
cache. Every sequence of a batch has a context of its own. Keys scatter around centres, within blocks of 8192 tokens,
and are clustered by the product's own k-means on the device.

- `listed`: sparse flash-decoding alone, over random lists of a share of all keys.
- `multipole`: lookup of the centroids, selection up to the budget, attention to the selected keys and to the means of
  the other clusters, merged. `kept` is the share of keys attended exactly, counted.
- `centred`: attention to listed keys (any index may have found them) and the centred remainder over clusters.

`graph_us` is one layer inside a CUDA graph of all of them, `eager_us` launched from Python; medians after a warm-up.
`full_us` is the fastest of torch's cuDNN, flash and memory-efficient attention on the same keys, values and queries in
the same run. `bytes` is what a step has to read; `fraction` is how much of a plain copy's bandwidth that makes. Before
a time is reported the output is compared with eager float32 attention and remainder over the same keys.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import triton
import typer
from gpu_timing import copy_bandwidth, eager_us, event_ms, full_attention_us, graph_us
from torch import Tensor

from decode_engine.kernels.cluster_attention import attend_clusters
from decode_engine.kernels.cluster_lookup import score_clusters
from decode_engine.kernels.cluster_remainder import attend_with_centred, remainder_reference
from decode_engine.kernels.cluster_selection import select_clusters
from decode_engine.kernels.cluster_tables import ClusterTables, DeviceClusters, Scores
from decode_engine.kernels.key_values import KeyValues
from decode_engine.kernels.partials import merge_partials
from decode_engine.kernels.sparse_attention import attend_listed, attend_listed_reference
from index_store.attention_state import AttentionState
from index_store.kernels.device_clusters import build_device_clusters, divide_keys
from index_store.kernels.device_tables import build_device_tables

KV_HEADS, GROUP, HEAD_DIM, DTYPE = 8, 4, 128, torch.bfloat16
SINKS, RECENT, PER_CLUSTER, BLOCK = 8, 128, 16, 8192
SCALE = HEAD_DIM**-0.5
SAMPLE = 1024
"""Sampled positions whose queries are clustered for tables."""
BUILD_BAR_MS = 12.0
COLD_BYTES = 512 * 2**20
"""Bytes of selected keys and clusters in one turn over all layers: many times the second-level cache."""
BARS = {("multipole", 1): 4.5, ("multipole", 16): 6.5}
BANDWIDTH_BAR = 0.85


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


class Bench:
    """All layers of a batch."""

    def __init__(self, length: int, batch: int, keep: float) -> None:
        self.length, self.batch = length, batch
        self.budget = round(keep * length)
        rows = batch * KV_HEADS
        self.layers = max(1, min(12, -(-COLD_BYTES // (rows * self.budget * 4 * HEAD_DIM))))
        self.kv = torch.empty(self.layers, batch, KV_HEADS, length, 2, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.kv.normal_()
        self.q = 2.0 * torch.randn(self.layers, rows, GROUP, HEAD_DIM, device="cuda").to(DTYPE)
        self.stored = [KeyValues.of(list(layer)) for layer in self.kv]
        self.capacity = self.budget + SINKS + RECENT
        self.budgets = torch.full((rows,), self.budget, dtype=torch.int32, device="cuda")
        self.tables: list[ClusterTables] = []

    def cluster(self) -> None:
        """Moves keys to centres of their block and clusters them."""
        blocks = divide_keys(self.length, PER_CLUSTER, BLOCK, SINKS)
        ranges = [(SINKS, self.length - RECENT)] * self.batch
        for layer in self.kv:
            contexts = []
            for sequence in layer:
                _gather_around_centres(sequence)
                arrays = build_device_clusters(
                    sequence, blocks, metric="cosine", iterations=10, moments="diagonal", seed=0
                )
                contexts.append(DeviceClusters.of(arrays, DTYPE, "cuda"))
            self.tables.append(ClusterTables.of(contexts, ranges))

    def random_lists(self) -> list[tuple[Tensor, Tensor]]:
        """For every layer, `budget` different keys of each row, ascending as searches list them."""
        rows = self.batch * KV_HEADS
        lists = []
        for _ in range(self.layers):
            ids = torch.rand(rows, self.length, device="cuda").topk(self.budget, dim=1, sorted=False).indices
            ids = ids.sort(1).values.to(torch.int32)
            lists.append((ids.contiguous(), torch.full_like(self.budgets, self.budget)))
        return lists


def _gather_around_centres(kv_HN2D: Tensor) -> None:
    heads, length = kv_HN2D.shape[:2]
    for first in range(0, length, BLOCK):
        block = kv_HN2D[:, first : first + BLOCK, 0]
        centres = torch.randn(heads, BLOCK // PER_CLUSTER, HEAD_DIM, device="cuda")
        chosen = torch.randint(0, centres.shape[1], block.shape[:2], device="cuda")
        moved = centres.gather(1, chosen[..., None].expand(-1, -1, HEAD_DIM))
        block.copy_(0.8 * moved + 0.6 * block.float())


def check(what: str, found: tuple[Tensor, Tensor], expected: AttentionState) -> float:
    """Relative error of the output; raises CheckFailedError where that or an lse is off."""
    error = float((found[0].double() - expected.out).norm() / expected.out.double().norm())
    lse_error = float((found[1].double() - expected.lse).abs().max())
    if not (error < 1e-2 and lse_error < 1e-2):
        raise CheckFailedError(f"{what}: relative error {error:.2e}, lse off by {lse_error:.2e}")
    return error


def listed_figure(bench: Bench) -> dict[str, Any]:
    lists = bench.random_lists()

    def step(layer: int) -> tuple[Tensor, Tensor]:
        ids, counts = lists[layer]
        return attend_listed(bench.q[layer], bench.stored[layer], ids, counts, SCALE)

    reference = attend_listed_reference(bench.q[0], bench.stored[0], *lists[0], SCALE)
    error = check("listed", step(0), AttentionState(*reference))
    steps = [partial(step, layer) for layer in range(bench.layers)]
    read = bench.batch * KV_HEADS * bench.budget * (2 * HEAD_DIM * DTYPE.itemsize + 4)
    return {"figure": "listed", "error": error, "bytes": read, **_times(steps)}


def multipole_figure(bench: Bench) -> dict[str, Any]:
    def step(layer: int) -> tuple[Tensor, Tensor, Tensor]:
        q = bench.q[layer]
        return attend_clusters(
            q, q, bench.stored[layer], bench.tables[layer], bench.budgets, bench.capacity, SCALE
        )

    # The same selection, as lists, for the reference.
    scores = score_clusters(bench.q[0], bench.tables[0], SCALE)
    ids, counts = select_clusters(scores, bench.tables[0], bench.budgets, bench.capacity)
    out, lse, used = step(0)
    error = check("multipole", (out, lse), _reference(bench, ids, counts, scores, "monopole"))
    kept = float((used - SINKS - RECENT).double().mean()) / bench.length
    clusters = bench.batch * KV_HEADS * bench.tables[0].width
    vector = HEAD_DIM * DTYPE.itemsize
    # Means of keys and values, sizes, logits written and read, and keys and values of what is attended exactly.
    read = clusters * (2 * vector + 4 + 8 * GROUP) + int(used.sum()) * 2 * vector
    steps = [partial(step, layer) for layer in range(bench.layers)]
    return {"figure": "multipole", "error": error, "bytes": read, "kept": round(kept, 5), **_times(steps)}


def centred_figure(bench: Bench) -> dict[str, Any]:
    lists = bench.random_lists()

    def step(layer: int) -> tuple[tuple[Tensor, Tensor], Scores]:
        q, tables = bench.q[layer], bench.tables[layer]
        scores = score_clusters(q, tables, SCALE, rank=False)
        return merge_partials(
            attend_with_centred(q, bench.stored[layer], *lists[layer], scores, tables, SCALE)
        ), scores

    found, scores = step(0)
    error = check("centred", found, _reference(bench, *lists[0], scores, "centred"))
    clusters = bench.batch * KV_HEADS * bench.tables[0].width
    read = clusters * (3 * HEAD_DIM * DTYPE.itemsize + 4 * 2 + 16 * GROUP)
    read += bench.batch * KV_HEADS * bench.budget * 3 * HEAD_DIM * DTYPE.itemsize
    steps = [partial(step, layer) for layer in range(bench.layers)]
    return {"figure": "centred", "error": error, "bytes": read, **_times(steps)}


def build_figures(length: int) -> list[dict[str, Any]]:
    """Milliseconds to build both kinds of index for one layer from its keys, values and sampled queries."""
    kv = torch.empty(KV_HEADS, length, 2, HEAD_DIM, dtype=DTYPE, device="cuda").normal_()
    _gather_around_centres(kv)
    sample = torch.randn(KV_HEADS, SAMPLE * GROUP, HEAD_DIM, device="cuda")
    blocks = divide_keys(length, PER_CLUSTER, BLOCK, SINKS)

    def clusters() -> dict[str, Tensor]:
        return build_device_clusters(kv, blocks, metric="cosine", iterations=10, moments="diagonal", seed=0)

    def tables(subspaces: int, centroids: int) -> dict[str, Tensor]:
        dims = torch.arange(HEAD_DIM).view(-1, subspaces).t().contiguous()
        return build_device_tables(kv[:, :, 0], sample, dims, centroids=centroids, iterations=10, seed=0)

    def both(subspaces: int, centroids: int) -> None:
        clusters()
        tables(subspaces, centroids)

    _check_clusters(kv, clusters())
    _check_tables(kv, tables(16, 32))
    clusters_ms = _median_ms(clusters)
    return [
        {
            "bench": "clusters_gpu",
            "figure": f"build, tables {subspaces}x{centroids} and clusters",
            "context": length,
            "queries": SAMPLE * GROUP,
            "clusters_ms": round(clusters_ms, 2),
            "tables_ms": round(_median_ms(partial(tables, subspaces, centroids)), 2),
            "both_ms": round(_median_ms(partial(both, subspaces, centroids)), 2),
        }
        for subspaces, centroids in ((8, 64), (16, 32))
    ]


def _median_ms(work: Callable[[], object]) -> float:
    """Of a whole build, launches from Python included."""
    for _ in range(2):
        work()
    return statistics.median(event_ms(work) for _ in range(7))


def _check_clusters(kv: Tensor, arrays: dict[str, Tensor]) -> None:
    """Keys are in clusters about as near as any, and sums are those of the members."""
    keys = kv[0, SINKS : SINKS + BLOCK, 0].double()
    own = arrays["assignment"][0, SINKS : SINKS + BLOCK].long()
    means = arrays["means"][0, : BLOCK // PER_CLUSTER].double()
    products = keys @ torch.nn.functional.normalize(means, dim=-1).t()
    # Means are not quite the centroids of the last comparison, which are means of directions.
    gap = float(((products.amax(1) - products.gather(1, own[:, None])[:, 0]) / keys.norm(dim=-1)).mean())
    if not gap < 0.02:
        raise CheckFailedError(f"keys are {gap:.3f} farther from their cluster than from the nearest")
    named = arrays["assignment"][0] >= 0
    sums = torch.zeros(arrays["means"].shape[1], HEAD_DIM, dtype=torch.float64, device="cuda")
    sums.index_add_(0, arrays["assignment"][0][named].long(), kv[0, named, 1].double())
    error = float((sums - arrays["value_sums"][0]).norm() / sums.norm())
    if not error < 1e-5:
        raise CheckFailedError(f"sums of values are off by {error:.1e}")


def _check_tables(kv: Tensor, arrays: dict[str, Tensor]) -> None:
    subspaces = arrays["centroids"].shape[1]
    slices = kv[0, :4096, 0].double().view(-1, HEAD_DIM // subspaces, subspaces)
    products = torch.einsum("nbm,mcb->mcn", slices, arrays["centroids"][0].double())
    units = products / arrays["scales"][0, :, None, None]
    error = float((units - arrays["scores"][0, ..., :4096]).abs().max())
    if not error < 0.51:
        raise CheckFailedError(f"scores are off by {error:.3f} units, expected 0.5 at most")


def _reference(bench: Bench, ids: Tensor, counts: Tensor, scores: Scores, kind: str) -> AttentionState:
    attended = attend_listed_reference(bench.q[0], bench.stored[0], ids, counts, SCALE)
    left = remainder_reference(bench.stored[0], ids, counts, scores, bench.tables[0], kind)
    return AttentionState(*attended).merge(AttentionState(*left))


def _times(steps: Sequence[Callable[[], object]]) -> dict[str, float]:
    return {"graph_us": graph_us(steps), "eager_us": eager_us(steps)}


def run_case(length: int, batch: int, keep: float, copy: float, figures: list[str]) -> list[dict[str, Any]]:
    bench = Bench(length, batch, keep)
    if figures != ["listed"]:
        bench.cluster()
    q = bench.q.view(bench.layers, batch, KV_HEADS * GROUP, HEAD_DIM)
    full = full_attention_us(q, bench.kv)
    backend = min(full, key=lambda name: full[name])
    makers = {"listed": listed_figure, "multipole": multipole_figure, "centred": centred_figure}
    rows = []
    for name in figures:
        row = makers[name](bench)
        fraction = row["bytes"] / (row["graph_us"] * 1e-6) / copy
        rows.append(
            {
                "bench": "clusters_gpu",
                "context": length,
                "batch": batch,
                "keep": keep,
                **{key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()},
                "fraction": round(fraction, 3),
                "copy_gb_per_s": round(copy / 1e9),
                "full_us": round(full[backend], 1),
                "full_backend": backend,
                "speedup": round(full[backend] / row["graph_us"], 2),
                "speedup_eager": round(full[backend] / row["eager_us"], 2),
            }
        )
    return rows


def missed_bars(rows: list[dict[str, Any]]) -> list[str]:
    """Figures at 128K and 5 % that are slower than they should be."""
    missed = []
    for row in rows:
        if row.get("both_ms", 0.0) > BUILD_BAR_MS and row["context"] == 131072:
            missed.append(f"{row['figure']}: {row['both_ms']} ms, expected {BUILD_BAR_MS}")
        if row.get("context") != 131072 or row.get("keep") != 0.05:
            continue
        bar = BARS.get((row["figure"], row["batch"]), 0.0)
        if row["speedup"] < bar:
            missed.append(f"{row['figure']}, batch {row['batch']}: {row['speedup']}x, expected {bar}x")
        if row["figure"] == "listed" and row["batch"] == 16 and row["fraction"] < BANDWIDTH_BAR:
            missed.append(f"listed: {row['fraction']:.1%} of the bandwidth, expected {BANDWIDTH_BAR:.0%}")
    return missed


def main(
    cases: Annotated[str, typer.Option(help="context:batch:keep, comma-separated.")] = (
        "131072:1:0.05,131072:16:0.05"
    ),
    figures: Annotated[str, typer.Option(help="Of listed, multipole, centred.")] = "listed,multipole,centred",
    build: Annotated[int, typer.Option(help="Context whose indexes are built; 0 for none.")] = 131072,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Times the kernels over lists and clusters; one JSON line per figure."""
    torch.manual_seed(seed)
    copy = copy_bandwidth()
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    rows: list[dict[str, Any]] = []
    try:
        for row in build_figures(build) if build else []:
            rows.append(row)
            sys.stdout.write(json.dumps({**row, "machine": machine}) + "\n")
            sys.stdout.flush()
        for case in [case for case in cases.split(",") if case]:
            length, batch, keep = case.split(":")
            for row in run_case(int(length), int(batch), float(keep), copy, figures.split(",")):
                rows.append(row)
                sys.stdout.write(json.dumps({**row, "machine": machine}) + "\n")
                sys.stdout.flush()
            torch.cuda.empty_cache()
    except CheckFailedError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    missed = missed_bars(rows) if bars else []
    for line in missed:
        typer.echo(f"missed: {line}", err=True)
    if missed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
