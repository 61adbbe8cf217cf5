"""Attention to listed keys and to key clusters on a GPU, and how long indexes take to build there.

Regime: one layer of a decode step, 32 query heads, 8 KV heads, head dimension 128, bfloat16; keys, values and clusters
in the GPU's memory. Several layers' worth of everything take turns, so that no step finds its data in the second-level
cache. Every sequence of a batch has a context of its own and a tail of 64 tokens. Keys scatter around centres, within
blocks of 8192 tokens, and are clustered by the product's own k-means on the device.

Steps run through the classes that serve requests (`decode_engine.device`), over records:

- `listed`: attention to random lists of a share of all keys, to sinks, recent window and tail, merged.
- `multipole`: lookup of the centroids, selection up to the budget, attention to the selected keys and to the means of
  the other clusters, merged. `kept` is the share of keys attended exactly, counted.
- `centred`: `listed`, and the centred remainder over clusters.
- `csattention`: the default method, query tables per head and the centred remainder.

`graph_us` is one layer inside a CUDA graph of all of them, `eager_us` launched from Python; medians after a warm-up.
`kernels_us` is what every kernel takes by itself, by torch's profiler.
`full_us` is the fastest of torch's cuDNN, flash and memory-efficient attention on the same keys, values and queries in
the same run. `bytes` is what a step has to read; `fraction` is how much of a plain copy's bandwidth that makes. Before
a time is reported the output is compared with eager float32 attention and remainder over the same keys.

One JSON line per figure; the exit code is 1 when a check fails, or when --bars is given and a figure misses its bar.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import index_store  # noqa: F401 - sets up OpenMP, which has to happen before torch is imported

# isort: split
import torch
import triton
import typer
from gpu_timing import copy_bandwidth, eager_us, full_attention_us, graph_us, kernel_us
from index_builds import (
    BLOCK,
    DTYPE,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    PER_CLUSTER,
    RECENT,
    SAMPLE,
    SINKS,
    CheckFailedError,
    build_figures,
    gather_around_centres,
)
from torch import Tensor

from decode_engine.kernels.attention.key_lists import KeyLists
from decode_engine.kernels.clusters.cluster_tables import DeviceClusters
from decode_engine.kernels.clusters.reference import (
    ListedSequence,
    attend_lists_reference,
    records_of,
    remainder_reference,
)
from decode_engine.kernels.tables.batch import TableContext, padded_rows
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_attention import KeySelection, StepAttention, StepPlan
from index_store.indexes.key_clusters.build_triton import build_device_clusters, divide_keys
from index_store.indexes.query_tables.build_triton import build_device_tables
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method, get_method
from index_store.store.manifest import Manifest, ModelIdentity

TAIL = 64
SCALE = HEAD_DIM**-0.5
VECTOR = HEAD_DIM * DTYPE.itemsize
BUILD_BAR_MS = 12.0
COLD_BYTES = 512 * 2**20
"""Bytes that one turn over all layers reads: many times the second-level cache."""
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
        touched = self.rows * (self.budget + (length // PER_CLUSTER if clusters else 0)) * 2 * VECTOR
        self.layers = max(2, min(12, -(-COLD_BYTES // touched)))
        self.kv = torch.empty(self.layers, batch, KV_HEADS, length, 2, HEAD_DIM, dtype=DTYPE, device="cuda")
        self.kv.normal_()
        self.q = 2.0 * torch.randn(self.layers, batch, KV_HEADS, GROUP, HEAD_DIM, device="cuda").to(DTYPE)
        self.tail = torch.randn(batch, KV_HEADS, TAIL, 2, HEAD_DIM, device="cuda").to(DTYPE)
        self.sequences = [
            [self._sequence(layer, b, clusters) for b in range(batch)] for layer in range(self.layers)
        ]
        self.records = [records_of(sequences, "cuda") for sequences in self.sequences]
        self.lists = [self._random_list() for _ in range(self.layers)]

    def _sequence(self, layer: int, b: int, clusters: bool) -> ListedSequence:
        kv = self.kv[layer, b]
        made = None
        if clusters:
            gather_around_centres(kv)
            blocks = divide_keys(self.length, PER_CLUSTER, BLOCK, SINKS)
            arrays = build_device_clusters(
                kv, blocks, metric="cosine", iterations=10, moments="diagonal", seed=0
            )
            made = DeviceClusters.of(arrays, SINKS, DTYPE, "cuda")
        return ListedSequence(kv, self.tail[b], TAIL, SINKS, self.length - RECENT, self.budget, made)

    def _random_list(self) -> KeyLists:
        """`budget` different keys of each row, ascending and in segments as searches leave them."""
        searched = self.length - RECENT - SINKS
        width = -(-self.budget // SEGMENTS)
        lists = KeyLists.allocate(self.rows, SEGMENTS, width, "cuda")
        for row in range(self.rows):
            ids = torch.randperm(searched, device="cuda")[: self.budget].sort().values + SINKS
            ids = torch.nn.functional.pad(ids, (0, SEGMENTS * width - self.budget), value=-1)
            lists.ids_RPW[row] = ids.view(SEGMENTS, width)
        lists.counts_RP.fill_(width)
        return lists

    def plan(self, method: Method) -> StepPlan:
        model = ModelIdentity(
            name="bench",
            architecture="bench",
            fingerprint="0" * 16,
            tokenizer_fingerprint="0" * 16,
            layers=self.layers,
            query_heads=KV_HEADS * GROUP,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=2,
            max_positions=2 * self.length,
        )
        max_keys = int(triton.next_power_of_2(self.length))
        return StepPlan(model, method, self.batch, max_keys, DTYPE, torch.device("cuda"))

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
        difference = found.view(expected.out.shape).double() - expected.out.double()
        error = float(difference.norm() / expected.out.double().norm())
        if not error < 1e-2:
            raise CheckFailedError(f"{what}: relative error {error:.2e}")
        return error


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
    read = bench.rows * (bench.budget * (2 * VECTOR + 4) + (SINKS + RECENT + TAIL) * 2 * VECTOR)
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
    read = bench.rows * clusters * (2 * VECTOR + 4 + 8 * GROUP)
    read += round(bench.rows * (kept * bench.length + SINKS + RECENT + TAIL) * 2 * VECTOR)
    return {"figure": name, "error": error, "bytes": read, "kept": round(kept, 5), **bench.times(steps)}


def csattention_figure(bench: Bench, name: str) -> dict[str, Any]:
    """The default method, with tables built from random queries."""
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
            sample = torch.randn(KV_HEADS, SAMPLE, HEAD_DIM, device="cuda")
            arrays = build_device_tables(kv[:, :, 0], sample, dims, centroids=centroids, iterations=3, seed=0)
            made.append(
                TableContext(kv, padded_rows(arrays["scores"]), arrays["centroids"], arrays["scales"])
            )
            for field, value in made[-1].record().items():
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
    of_cluster = 2 * VECTOR + HEAD_DIM + 2 * 4 + 3 * 4 * GROUP + 4
    of_key = 3 * VECTOR + 2 * 4
    always = (SINKS + RECENT + TAIL) * 2 * VECTOR
    return round(bench.rows * (clusters * of_cluster + listed * of_key + always))


def run_case(length: int, batch: int, keep: float, copy: float, figures: list[str]) -> list[dict[str, Any]]:
    bench = Bench(length, batch, keep, figures != ["listed"])
    q = bench.q.flatten(2, 3)
    full = full_attention_us(q, bench.kv)
    backend = min(full, key=lambda name: full[name])
    makers = {
        "listed": random_figure,
        "multipole": multipole_figure,
        "centred": random_figure,
        "csattention": csattention_figure,
    }
    rows = []
    for name in figures:
        row = makers[name](bench, name)
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
        if row.get("context") != 131072 or "keep" not in row:
            continue
        bar = BARS.get((row["figure"], row["batch"], row["keep"]), 0.0)
        if row["speedup"] < bar:
            missed.append(f"{row['figure']}, batch {row['batch']}: {row['speedup']}x, expected {bar}x")
        if (row["figure"], row["batch"], row["keep"]) == ("listed", 16, 0.05) and row[
            "fraction"
        ] < BANDWIDTH_BAR:
            missed.append(f"listed: {row['fraction']:.1%} of the bandwidth, expected {BANDWIDTH_BAR:.0%}")
    return missed


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
