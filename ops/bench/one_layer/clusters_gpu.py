"""Attention to listed keys and to key clusters on a GPU, and how long indexes take to build there.

usage: python ops/bench/one_layer/clusters_gpu.py [--bars] [--cases 131072:1:0.05]
       [--figures listed,multipole] [--build 131072]

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and clusters
in the GPU's memory. Several layers' worth of everything take turns, so that no step finds its data in the second-level
cache. Every sequence of a batch has a context of its own and a tail of 64 tokens. Keys scatter around centres, within
blocks of 8192 tokens, and are clustered by the product's own k-means on the device.

Steps run through the classes that serve requests (`decode_engine.steps.attention`), over records:

- `listed`: attention to random lists of a share of all keys, to sinks, recent window and tail, merged.
- `multipole`: lookup of the centroids, selection up to the budget, attention to the selected keys and to the means of
  the other clusters, merged. `kept` is the share of keys attended exactly, counted.
- `centred`: `listed`, and the centred remainder over clusters.
- `csattention`: query tables per head and the centred remainder.

`graph_us` is one layer inside a CUDA graph of all of them, `eager_us` launched from Python; medians after a warm-up.
`kernels_us` is what every kernel takes by itself, by torch's profiler.
`full_us` is the fastest of torch's cuDNN, flash and memory-efficient attention on the same keys, values and queries in
the same run. `bytes` is what a step has to read; `fraction` is how much of a plain copy's bandwidth that makes. Before
a time is reported the output is compared with eager float32 attention and remainder over the same keys.

`build`: milliseconds to build both kinds of index for one layer from its keys, values and sampled queries.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
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
    ROW,
    SCALE,
    SINKS,
    VECTOR,
    step_plan,
)
from harness.report import CheckFailedError, check_close, reporting
from harness.timing import (
    copy_bandwidth,
    eager_us,
    event_ms,
    fastest,
    full_attention_us,
    graph_us,
    kernel_us,
)
from torch import Tensor

from decode_engine.kernels.attention.sparse_attention import KeyLists, attend_lists_reference
from decode_engine.kernels.clusters.lookup import DeviceClusters
from decode_engine.kernels.clusters.reference import (
    ClusteredSequence,
    remainder_reference,
)
from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables.sizes import TableContext, padded_rows
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.build_triton import build_device_clusters
from index_store.indexes.query_tables.build_triton import build_device_tables
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.store.description.manifest import Manifest

RECENT, TAIL, PER_CLUSTER, BLOCK = 128, 64, 16, 8192
SAMPLE = 1024
"""Sampled positions whose queries are clustered for tables."""
BUILD_BAR_MS = 12.0
SEGMENTS = 32
"""Of a row's random list, as searches by several programs leave them."""
BARS = {
    ("multipole", 1, 0.05): 4.5,
    ("multipole", 16, 0.05): 6.5,
    ("csattention", 1, 0.01): 2.5,
    ("csattention", 16, 0.01): 3.5,
}
BANDWIDTH_BAR = 0.85


class Bench:
    """All layers of a batch."""

    def __init__(self, length: int, batch: int, keep: float, clusters: bool) -> None:
        self.length, self.batch = length, batch
        self.budget = round(keep * length)
        self.rows = batch * KV_HEADS
        touched = self.rows * (self.budget + (length // PER_CLUSTER if clusters else 0)) * ROW
        self.layers = max(2, min(12, -(-COLD_BYTES // touched)))
        self.kv = torch.empty(self.layers, batch, KV_HEADS, length, 2, HEAD_DIM, dtype=DTYPE, device=DEVICE)
        self.kv.normal_()
        self.q = 2.0 * torch.randn(self.layers, batch, KV_HEADS, GROUP, HEAD_DIM, device=DEVICE).to(DTYPE)
        self.tail = torch.randn(batch, KV_HEADS, TAIL, 2, HEAD_DIM, device=DEVICE).to(DTYPE)
        self.sequences = [
            [self._sequence(layer, b, clusters) for b in range(batch)] for layer in range(self.layers)
        ]
        self.records = [records_of(sequences, DEVICE) for sequences in self.sequences]
        self.lists = [self._random_list() for _ in range(self.layers)]

    def _sequence(self, layer: int, b: int, clusters: bool) -> ClusteredSequence:
        kv = self.kv[layer, b]
        made = None
        if clusters:
            gather_around_centres(kv)
            blocks = divide_keys(self.length, PER_CLUSTER, BLOCK, SINKS)
            arrays = build_device_clusters(
                kv, blocks, metric="cosine", iterations=10, moments="diagonal", seed=0
            )
            made = DeviceClusters.of(arrays, SINKS, DTYPE, DEVICE)
        return ClusteredSequence(kv, self.tail[b], TAIL, SINKS, self.length - RECENT, self.budget, made)

    def _random_list(self) -> KeyLists:
        """`budget` different keys of each row, ascending and in segments as searches leave them."""
        searched = self.length - RECENT - SINKS
        width = -(-self.budget // SEGMENTS)
        lists = KeyLists.allocate(self.rows, SEGMENTS, width, DEVICE)
        for row in range(self.rows):
            ids = torch.randperm(searched, device=DEVICE)[: self.budget].sort().values + SINKS
            ids = torch.nn.functional.pad(ids, (0, SEGMENTS * width - self.budget), value=-1)
            lists.ids_RPW[row] = ids.view(SEGMENTS, width)
        lists.counts_RP.fill_(width)
        return lists

    def plan(self, method: Method) -> StepPlan:
        return step_plan(method, self.layers, self.batch, self.length)

    def times(self, steps: StepAttention) -> dict[str, Any]:
        each = [
            partial(steps.attend, layer, self.q[layer], self.records[layer]) for layer in range(self.layers)
        ]
        return {"graph_us": graph_us(each), "eager_us": eager_us(each), "kernels_us": kernel_us(each)}

    def error(self, what: str, found: Tensor, lists: KeyLists, kind: str) -> float:
        """Relative error of the first layer's output; raises CheckFailedError where it is off."""
        q_RGD = self.q[0].flatten(0, 1)
        expected = attend_lists_reference(q_RGD, self.sequences[0], lists, SCALE)
        if kind != "dropped":
            expected = expected.merge(remainder_reference(q_RGD, self.sequences[0], lists, SCALE, kind))
        return check_close(what, found, expected.out, 1e-2)


class RandomLists(KeySelection):
    """Lists that were there before."""

    of_layers: ClassVar[list[KeyLists]]

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan)
        self.lists = self.of_layers[0]

    @classmethod
    def refusal(cls, method: Method, manifest: Manifest) -> str | None:
        return None

    @classmethod
    def fields(cls, context: ResidentContext, method: Method, layer: int) -> dict[int, int]:
        return {}

    def select(self, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        return self.of_layers[layer]


class RandomSteps(ListedSteps):
    """Attends to lists that were there before."""

    selection_types = {**ListedSteps.selection_types, "query_tables": RandomLists}  # noqa: RUF012


def random_figure(bench: Bench, name: str) -> dict[str, Any]:
    """Attention to random lists; `centred` with its remainder."""
    method = get_method("csattention+dropped" if name == "listed" else "csattention")
    RandomLists.of_layers = bench.lists
    steps = RandomSteps(bench.plan(method))
    out = steps.attend(0, bench.q[0], bench.records[0])
    error = bench.error(name, out, bench.lists[0], "dropped" if name == "listed" else "centred")
    read = bench.rows * (bench.budget * (ROW + 4) + (SINKS + RECENT + TAIL) * ROW)
    if name == "centred":
        read = centred_bytes(bench, bench.budget)
    return {"figure": name, "error": error, "bytes": read, **bench.times(steps)}


def multipole_figure(bench: Bench, name: str) -> dict[str, Any]:
    steps = ListedSteps(bench.plan(get_method("multipole")))
    out = steps.attend(0, bench.q[0], bench.records[0])
    error = bench.error(name, out, steps.selection.lists, "monopole")
    kept = int(steps.kept_B().sum()) / bench.rows / bench.length
    clusters = bench.length // PER_CLUSTER
    # Means of keys and values, sizes, logits written and read, and keys and values of what is attended exactly.
    read = bench.rows * clusters * (ROW + 4 + 8 * GROUP)
    read += round(bench.rows * (kept * bench.length + SINKS + RECENT + TAIL) * ROW)
    return {"figure": name, "error": error, "bytes": read, "kept": round(kept, 5), **bench.times(steps)}


def csattention_figure(bench: Bench, name: str) -> dict[str, Any]:
    """`csattention`, with tables built from random queries."""
    method = get_method("csattention")
    assert method.index is not None
    subspaces, centroids = (
        int(method.index.parameters["subspaces"]),
        int(method.index.parameters["centroids"]),
    )
    dims = torch.arange(HEAD_DIM).view(-1, subspaces).t().contiguous()
    made = []
    for layer, records in enumerate(bench.records):
        for b, kv in enumerate(bench.kv[layer]):
            sample = torch.randn(KV_HEADS, SAMPLE, HEAD_DIM, device=DEVICE)
            arrays = build_device_tables(kv[:, :, 0], sample, dims, centroids=centroids, iterations=3, seed=0)
            made.append(
                TableContext(kv, padded_rows(arrays["scores"]), arrays["centroids"], arrays["scales"])
            )
            for field, value in made[-1].fields().items():
                records[b, field] = value
    steps = ListedSteps(bench.plan(method))
    out = steps.attend(0, bench.q[0], bench.records[0]).clone()
    kept = int(steps.kept_B().sum()) / bench.rows / bench.length
    error = bench.error(name, out, steps.selection.select(0, bench.q[0], bench.records[0]), "centred")
    # A row of each subspace's table for every head of the group, then as with any list.
    read = bench.rows * bench.length * subspaces * GROUP + centred_bytes(bench, kept * bench.length)
    return {"figure": name, "error": error, "bytes": read, "kept": round(kept, 5), **bench.times(steps)}


def centred_bytes(bench: Bench, listed: float) -> int:
    """Read and written by attention to lists of that many keys and by the centred remainder."""
    clusters = bench.length // PER_CLUSTER
    of_cluster = ROW + HEAD_DIM + 2 * 4 + 3 * 4 * GROUP + 4
    of_key = 3 * VECTOR + 2 * 4
    always = (SINKS + RECENT + TAIL) * ROW
    return round(bench.rows * (clusters * of_cluster + listed * of_key + always))


def run_case(
    length: int, batch: int, keep: float, copy: float, figures: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """The figures of one context, batch and share."""
    bench = Bench(length, batch, keep, figures != ["listed"])
    full = fastest(full_attention_us(bench.q.flatten(2, 3), bench.kv))
    full_us = float(full["full_us"])
    makers = {"multipole": multipole_figure, "csattention": csattention_figure}
    for name in figures:
        row = makers.get(name, random_figure)(bench, name)
        yield {
            "context": length,
            "batch": batch,
            "keep": keep,
            **row,
            "fraction": row["bytes"] / (row["graph_us"] * 1e-6) / copy,
            "copy_gb_per_s": copy / 1e9,
            **full,
            "speedup": full_us / row["graph_us"],
            "speedup_eager": full_us / row["eager_us"],
        }


def missed(row: dict[str, Any]) -> list[str]:
    """What a figure at 128K falls short of."""
    if row["context"] != 131072:
        return []
    if "keep" not in row:
        late = row["both_ms"] > BUILD_BAR_MS
        return [f"{row['figure']}: {row['both_ms']:.2f} ms, expected {BUILD_BAR_MS}"] if late else []
    case = row["figure"], row["batch"], row["keep"]
    found, bar = [], BARS.get(case, 0.0)
    if row["speedup"] < bar:
        found.append(f"{case[0]}, batch {case[1]}: {row['speedup']:.2f}x, expected {bar}x")
    if case == ("listed", 16, 0.05) and row["fraction"] < BANDWIDTH_BAR:
        found.append(f"listed: {row['fraction']:.1%} of the bandwidth, expected {BANDWIDTH_BAR:.0%}")
    return found


def gather_around_centres(kv_HN2D: Tensor) -> None:
    """Moves keys, within blocks."""
    heads, length = kv_HN2D.shape[:2]
    for first in range(0, length, BLOCK):
        block = kv_HN2D[:, first : first + BLOCK, 0]
        centres = torch.randn(heads, BLOCK // PER_CLUSTER, HEAD_DIM, device=DEVICE)
        chosen = torch.randint(0, centres.shape[1], block.shape[:2], device=DEVICE)
        moved = centres.gather(1, chosen[..., None].expand(-1, -1, HEAD_DIM))
        block.copy_(0.8 * moved + 0.6 * block.float())


def build_figures(length: int) -> Iterator[dict[str, Any]]:
    """Milliseconds to build both kinds of index for one layer from its keys, values and sampled queries."""
    kv = torch.empty(KV_HEADS, length, 2, HEAD_DIM, dtype=DTYPE, device=DEVICE).normal_()
    gather_around_centres(kv)
    sample = torch.randn(KV_HEADS, SAMPLE * GROUP, HEAD_DIM, device=DEVICE)
    blocks = divide_keys(length, PER_CLUSTER, BLOCK, SINKS)

    def clusters() -> dict[str, Tensor]:
        return build_device_clusters(kv, blocks, metric="cosine", iterations=10, moments="diagonal", seed=0)

    def tables(subspaces: int, centroids: int) -> dict[str, Tensor]:
        dims = torch.arange(HEAD_DIM).view(-1, subspaces).t().contiguous()
        return build_device_tables(kv[:, :, 0], sample, dims, centroids=centroids, iterations=10, seed=0)

    def both(subspaces: int, centroids: int) -> None:
        clusters()
        tables(subspaces, centroids)

    check_clusters(kv, clusters())
    check_tables(kv, tables(16, 32))
    clusters_ms = median_ms(clusters)
    for subspaces, centroids in ((8, 64), (16, 32)):
        yield {
            "figure": f"build, tables {subspaces}x{centroids} and clusters",
            "context": length,
            "queries": SAMPLE * GROUP,
            "clusters_ms": clusters_ms,
            "tables_ms": median_ms(partial(tables, subspaces, centroids)),
            "both_ms": median_ms(partial(both, subspaces, centroids)),
        }


def median_ms(work: Callable[[], object]) -> float:
    """Of a whole build, launches from Python included."""
    for _ in range(2):
        work()
    return statistics.median(event_ms(work) for _ in range(7))


def check_clusters(kv: Tensor, arrays: dict[str, Tensor]) -> None:
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
    sums = torch.zeros(arrays["means"].shape[1], HEAD_DIM, dtype=torch.float64, device=DEVICE)
    sums.index_add_(0, arrays["assignment"][0][named].long(), kv[0, named, 1].double())
    error = float((sums - arrays["value_sums"][0]).norm() / sums.norm())
    if not error < 1e-5:
        raise CheckFailedError(f"sums of values are off by {error:.1e}")


def check_tables(kv: Tensor, arrays: dict[str, Tensor]) -> None:
    subspaces = arrays["centroids"].shape[1]
    slices = kv[0, :4096, 0].double().view(-1, HEAD_DIM // subspaces, subspaces)
    products = torch.einsum("nbm,mcb->mcn", slices, arrays["centroids"][0].double())
    units = products / arrays["scales"][0, :, None, None]
    error = float((units - arrays["scores"][0, ..., :4096]).abs().max())
    if not error < 0.51:
        raise CheckFailedError(f"scores are off by {error:.3f} units, expected 0.5 at most")


def main(
    cases: Annotated[str, typer.Option(help="context:batch:keep, comma-separated.")] = (
        "131072:1:0.01,131072:16:0.01,131072:1:0.05,131072:16:0.05"
    ),
    figures: Annotated[str, typer.Option(help="Of listed, multipole, centred, csattention.")] = (
        "listed,multipole,centred,csattention"
    ),
    build: Annotated[int, typer.Option(help="Context whose indexes are built; 0 for none.")] = 131072,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a bar is missed.")] = False,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Times the kernels over lists and clusters; one JSON line per figure."""
    with reporting("clusters_gpu", bars) as report:
        torch.manual_seed(seed)
        copy = copy_bandwidth()
        for row in build_figures(build) if build else ():
            report.add(row, *missed(row))
        for case in [case for case in cases.split(",") if case]:
            length, batch, keep = case.split(":")
            for row in run_case(int(length), int(batch), float(keep), copy, figures.split(",")):
                report.add(row, *missed(row))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
