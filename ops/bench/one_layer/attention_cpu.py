"""Attention of one layer in one decode step on the CPU: full attention against query tables and coarse rows.

usage: python ops/bench/one_layer/attention_cpu.py [--bars] [--trained] [--lengths 8k,32k,128k] [--keep 0.01,0.02,0.05]

Regime: one session, one new token, one layer; the keys and values of the context are in memory in bfloat16, as an
engine holds them. Keys, values and queries are random: for lists, random scores scatter as widely as they can, and of
random keys `refined` leaves nothing unread. With --trained they are those of the packaged reader after up to 31K tokens
of text, again and again. Every step takes another query out of several, so that neither the table rows nor the gathered
keys of the step before are in the processor's caches. Times are medians after a warm-up.

`full` is the fastest of torch's scaled_dot_product_attention on the same tensors in the same run: grouped or not, in
bfloat16 or over a float32 copy of all keys and values, which takes twice the memory that the engine holds.
`full-products` is the fastest of two batched products with a softmax between them; in bfloat16 they round every logit.
`full-engine` is the engine's own full attention, which method `full` runs: it keeps one copy in bfloat16. `read` only
adds up the bytes of all keys and values: no full attention can take less.

The sparse methods run the product's own code: `layers.sparse_layer.SparseLayer` over `QueryTables`, in two layouts
without a remainder, and dense with one (`csattention-remainder`); and over `CoarseRows` of 4 bits, which are search and
remainder (`refined`), with the time of building them and the 99th percentile of the time of those steps that make a
block of tokens searchable. `full-engine-int8` and `refined-int8` are the same over rows in 8 bits. Before any time is
reported the search is compared with an eager one, its attention with exact attention over the same keys or with an
eager remainder, and every variant of full attention with float64. Each result is one JSON line; the exit code is 1
when a check fails, or when --bars is given and at 1 % dense tables are less than 3x (32K) or 6x (128K) as fast as full
attention, `refined` less than 2.5x or 4x, or an append takes more than 2 ms. `load` is how many processes wanted a core
in the minute before: figures count where it is about that of one job.

Shape legend: H KV heads, G query heads per KV head, N keys, K kept keys, d head dim, m subspaces, C centroids,
Q queries that take turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness  # noqa: F401 - before torch: sets up OpenMP

# isort: split
import torch
import typer
from harness.made_up.trained_rows import TrainedRows, record_rows
from harness.report import CheckFailedError, check_close, reporting
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from decode_engine.evaluation.tasks.documents import parse_length
from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes, find_low_plane
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.query_tables.index import QueryTables
from index_store.methods.method import INDEX_SPECS, Method
from index_store.methods.presets import get_method
from index_store.store.stored_context import QuerySample

BARS = {
    "csattention-dense": {32768: 3.0, 131072: 6.0},
    "refined": {32768: 2.5, 131072: 4.0},
}
"""Times as fast as full attention at least, by method and context; of `refined` at 1 %."""

APPEND_BAR_US = 2000.0
APPENDS = 200
WARM_UP = 3
_QUERIES = 16


def exact_attention(q_HGD: Tensor, kv_HK2D: Tensor) -> Tensor:
    """The truth, in float64."""
    weights = torch.softmax(q_HGD.double() @ kv_HK2D[:, :, 0].double().transpose(1, 2), dim=-1)
    return weights @ kv_HK2D[:, :, 1].double()


def reference_ranking(index: QueryTables | CoarseRows, q_HGD: Tensor, count: int) -> Tensor:
    """Scores [H, N] as documented, softmaxed and summed over the group: of weighted table rows, or of coarse keys."""
    if isinstance(index, CoarseRows):
        return (q_HGD @ index.rows.decode_keys(0, count).transpose(1, 2)).softmax(-1).sum(1)
    arrays = index.arrays()
    centroids = arrays["centroids"]
    heads, subspaces, _, width = centroids.shape
    scores = torch.zeros(heads, count)
    slices = q_HGD.reshape(heads, -1, width, subspaces).transpose(
        -1, -2
    )  # strided: dimension i is in i mod m
    products = torch.einsum("hgmb,hmcb->hgmc", slices, centroids)
    for head in range(heads):
        for query in products[head]:
            logits = torch.zeros(count)
            for subspace in range(subspaces):
                nearest = int(query[subspace].argmax())
                row = arrays["scores"][head, subspace, nearest].float()
                if "ids" in arrays:
                    listed = torch.full((count,), float(row.min()))
                    listed[arrays["ids"][head, subspace, nearest].long()] = row
                    row = listed
                weight = query[subspace, nearest].clamp(min=0) * arrays["scales"][head, subspace]
                logits += weight * row
            scores[head] += torch.softmax(logits, dim=-1)
    return scores


def reference_weights(
    q_HGD: Tensor, kv_HN2D: Tensor, kept_HN: Tensor, partition: KeyClusters | None
) -> Tensor:
    """Unnormalised weights [H, G, N] in float64: exact where kept, of the key's cluster or 0 elsewhere."""
    keys = kv_HN2D[:, :, 0].double()
    logits = q_HGD.double() @ keys.transpose(1, 2)
    weights = logits.exp() * kept_HN[:, None]
    if partition is None:
        return weights
    assignment = partition.arrays()["assignment"].long()
    for head, clusters in enumerate(assignment):
        members = (clusters >= 0).nonzero()[:, 0]
        owner, count = clusters[members], int(clusters.max()) + 1
        left = ~kept_HN[head, members]
        sizes, left_sizes = (
            torch.bincount(ids, minlength=count).clamp(min=1) for ids in (owner, owner[left])
        )
        means = torch.zeros(count, keys.shape[2]).double().index_add_(0, owner, keys[head, members])
        means /= sizes[:, None]
        spread = (keys[head, members] - means[owner]).square()
        variances = torch.zeros_like(means).index_add_(0, owner, spread) / sizes[:, None]
        summed = torch.zeros(len(q_HGD[head]), count).double()
        summed.index_add_(1, owner[left], logits[head][:, members[left]])
        weight_GC = (summed / left_sizes).exp() * (1 + 0.5 * q_HGD[head].double().square() @ variances.T)
        weights[head][:, members[left]] = weight_GC[:, owner[left]]
    return weights


def coarse_attention(q_HGD: Tensor, kv_HN2D: Tensor, kept_HN: Tensor, index: CoarseRows) -> Tensor:
    """Attention [H, G, d] in float64: to the rows that are kept, and to the coarse copies of the others."""
    coarse = torch.stack(
        [index.rows.decode_keys(0, index.key_count), index.rows.decode_values(0, index.key_count)], 2
    )
    mixed = kv_HN2D.float()
    mixed[:, : index.key_count] = torch.where(
        kept_HN[:, : index.key_count, None, None], mixed[:, : index.key_count], coarse
    )
    return exact_attention(q_HGD, mixed)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention layer."""

    kv_heads: int
    group: int
    head_dim: int


_TRAINED = 31 * 1024  # tokens that the reader takes before prompts
SHAPES = {"llama-3.1-8b": Shape(8, 4, 128), "reader": Shape(2, 2, 64)}


@dataclass(frozen=True, slots=True)
class Problem:
    """Keys and values [H, N, 2, d] bfloat16; queries [Q, H, 1, G, d] float32, scaled by 1/sqrt(d).

    least_share: of the best keys' score that selections hold: rounding changes more where logits spread far.
    """

    kv_HN2D: Tensor
    queries: Tensor
    least_share: float = 0.998

    @property
    def length(self) -> int:
        return self.kv_HN2D.shape[1]


def make_problem(
    shape: Shape, length: int, queries: int, seed: int, trained: TrainedRows | None = None
) -> Problem:
    if trained is not None:
        rows = trained.q(0, shape.kv_heads, queries * shape.group, shape.head_dim)
        q = rows.view(shape.kv_heads, queries, 1, shape.group, shape.head_dim).transpose(0, 1).contiguous()
        kv = trained.kv(0, shape.kv_heads, length, shape.head_dim)
        return Problem(kv.bfloat16(), q * shape.head_dim**-0.5, 0.9)
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(shape.kv_heads, length, 2, shape.head_dim, generator=generator).bfloat16()
    q = torch.randn(queries, shape.kv_heads, 1, shape.group, shape.head_dim, generator=generator)
    return Problem(kv, 2.0 * q * shape.head_dim**-0.5)


def record_problems(longest: int, queries: int) -> TrainedRows:
    """What `make_problem` takes for contexts of up to so many tokens."""
    sessions = queries * max(shape.group for shape in SHAPES.values()) // 2  # of two query heads each
    return record_rows(min(_TRAINED, longest), "cpu", sessions)


def with_new_row(problem: Problem) -> Tensor:
    """The context's rows and the new token's own, which is zero."""
    return torch.cat([problem.kv_HN2D, torch.zeros_like(problem.kv_HN2D[:, :1])], dim=1)


def full_variants(problem: Problem) -> dict[str, Callable[[Tensor], Tensor]]:
    """Ways to compute full attention with torch: name -> function of a query [H, 1, G, d] giving [H, G, d]."""
    variants: dict[str, Callable[[Tensor], Tensor]] = {}
    heads, _, _, head_dim = problem.kv_HN2D.shape
    for dtype in (torch.bfloat16, torch.float32):
        keys = problem.kv_HN2D[:, :, 0].to(dtype).contiguous()
        values = problem.kv_HN2D[:, :, 1].to(dtype).contiguous()
        name = str(dtype).removeprefix("torch.")

        def sdpa_gqa(q: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            heads_first = q[:, 0].reshape(1, -1, 1, head_dim).to(keys.dtype)
            out = scaled_dot_product_attention(
                heads_first, keys[None], values[None], scale=1.0, enable_gqa=True
            )
            return out.view(heads, -1, head_dim)

        def sdpa_grouped(q: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            return scaled_dot_product_attention(
                q[:, 0][None].to(keys.dtype), keys[None], values[None], scale=1.0
            )[0]

        def bmm(q: Tensor, keys: Tensor = keys, values: Tensor = values) -> Tensor:
            logits = torch.bmm(q[:, 0].to(keys.dtype), keys.transpose(1, 2))
            return torch.bmm(torch.softmax(logits.float(), dim=-1).to(values.dtype), values)

        variants |= {f"sdpa-gqa-{name}": sdpa_gqa, f"sdpa-grouped-{name}": sdpa_grouped, f"bmm-{name}": bmm}
    return variants


def median_seconds(step: Callable[[Tensor], object], queries: Tensor, repeats: int) -> float:
    """Median time of a step over rotating queries, after a warm-up."""
    seconds = []
    for turn in range(WARM_UP + repeats):
        query = queries[turn % len(queries)]
        start = time.perf_counter()
        step(query)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


def time_full(problem: Problem, repeats: int) -> dict[str, float]:
    """Seconds per variant, slower ones measured with fewer repeats. Raises CheckFailedError."""
    truth = exact_attention(problem.queries[0][:, 0], problem.kv_HN2D)
    seconds: dict[str, float] = {}
    for name, variant in full_variants(problem).items():
        check_close(f"full attention, {name}", variant(problem.queries[0]), truth, 2e-2)
        few = median_seconds(variant, problem.queries, 3)
        slow = few > 3 * min((few, *seconds.values()))
        seconds[name] = few if slow else median_seconds(variant, problem.queries, repeats)
    return seconds


def time_engine(problem: Problem, rows: ContextRows, repeats: int) -> float:
    """Seconds of the engine's own full attention, which a session with method `full` runs. Raises CheckFailedError.

    rows: the problem's, or the same in 8 bits.
    """
    layer = DenseLayer(rows, Figures())
    new = torch.zeros_like(problem.kv_HN2D[:, :1, 0], dtype=torch.float32)

    def step(query: Tensor) -> Tensor:
        return layer.attend(query, new, new, problem.length)

    truth = exact_attention(problem.queries[0][:, 0], with_new_row(problem))
    near = 1e-2 if isinstance(rows, Tensor) else 2e-2
    check_close("the engine's full attention", step(problem.queries[0])[:, 0], truth, near)
    return median_seconds(step, problem.queries, repeats)


class SparseBench:
    """The product's sparse layer over one index, checked and timed."""

    def __init__(
        self,
        problem: Problem,
        index: QueryTables | CoarseRows,
        method: Method,
        partition: KeyClusters | None = None,
        rows: ContextRows | None = None,
    ) -> None:
        """rows: the problem's in 8 bits; as they are by default."""
        self._problem, self._index, self._method, self._partition = problem, index, method, partition
        self._figures, self._in_full = Figures(), rows is None
        searched = LayerSearch(index, partition)
        self._layer = SparseLayer(problem.kv_HN2D if rows is None else rows, searched, method, self._figures)
        self._new = torch.zeros_like(problem.kv_HN2D[:, :1, 0], dtype=torch.float32)

    def step(self, query: Tensor) -> Tensor:
        """One decode step at the first position after the context."""
        return self._layer.attend(query, self._new, self._new, self._problem.length)

    def check(self) -> None:
        """Compares search and attention with eager ones. Raises CheckFailedError."""
        query, count = self._problem.queries[0], self._problem.length
        seen: list[Observation] = []
        self._layer.observer = seen.append
        out = self.step(query)[:, 0]
        self._layer.observer = None
        first, end, ids_HK = seen[0].sinks, seen[0].search_end, seen[0].selection.ids_HTK[:, 0].long()
        truth_HM = reference_ranking(self._index, query[:, 0], count)[:, first:end]
        best_H = truth_HM.topk(ids_HK.shape[1], dim=-1).values.sum(-1)
        share = float((truth_HM.gather(1, ids_HK - first).sum(-1) / best_H).min())
        if not share > self._problem.least_share:
            raise CheckFailedError(
                f"the selection holds {share:.4f} of the best keys' score, which is too little"
            )
        positions_N = torch.arange(count + 1).expand(len(ids_HK), -1)
        kept_HN = ((positions_N < first) | (positions_N >= end)).scatter(1, ids_HK, True)
        kv = with_new_row(self._problem)
        if isinstance(self._index, CoarseRows):
            # Queries and weights are rounded to 8 bits there, which is less than what coding does; rows, if they are
            # kept in 8 bits, besides.
            limit = 2e-2 if self._in_full else 4e-2
            check_close(
                "coarse attention", out, coarse_attention(query[:, 0], kv, kept_HN, self._index), limit
            )
            return
        weights_HGN = reference_weights(query[:, 0], kv, kept_HN, self._partition)
        truth = weights_HGN @ kv[:, :, 1].double() / weights_HGN.sum(-1, keepdim=True)
        check_close("sparse attention", out, truth, 1e-3)

    def time(self, repeats: int) -> dict[str, float]:
        """Median microseconds of a step, and the mean of its parts."""
        median_seconds(self.step, self._problem.queries, WARM_UP)
        before = replace(self._figures)
        seconds = median_seconds(self.step, self._problem.queries, repeats)
        steps = repeats + WARM_UP
        parts = {
            f"{name}_us": (getattr(self._figures, f"{name}_ns") - getattr(before, f"{name}_ns")) / steps / 1e3
            for name in ("search", "gather", "attend")
        }
        return {"step_us": seconds * 1e6, **parts}


def append_us(index: CoarseRows, problem: Problem, block: int) -> float:
    """99th percentile of the time that a step takes which makes a block of so many tokens searchable."""
    appended, microseconds = index.start_appending(), []
    for number in range(APPENDS):
        first = number * block % max(1, problem.length - block)
        start = time.perf_counter()
        appended.append(problem.kv_HN2D[:, first : first + block])
        microseconds.append((time.perf_counter() - start) * 1e6)
    return statistics.quantiles(microseconds, n=100)[98]


def layer_source(problem: Problem, seed: int) -> LayerSource:
    heads, _, _, head_dim = problem.kv_HN2D.shape
    sample = torch.randn(heads, 1024, 1, head_dim, generator=torch.Generator().manual_seed(seed))
    return LayerSource(problem.kv_HN2D, QuerySample(sample, torch.arange(1024)))


def build_index(problem: Problem, layout: str, seed: int) -> QueryTables:
    spec = INDEX_SPECS["query_tables"].with_parameters(layout=layout)
    return QueryTables.build(spec.parameters, layer_source(problem, seed), seed)


def build_partition(problem: Problem, seed: int) -> KeyClusters:
    """Two iterations: random keys have no clusters worth finding, and time does not depend on them."""
    spec = INDEX_SPECS["remainder_clusters"].with_parameters(iterations=2)
    return KeyClusters.build(spec.parameters, layer_source(problem, seed), seed)


def run_case(
    shape: str, length: int, keeps: Sequence[float], repeats: int, seed: int, trained: TrainedRows | None
) -> list[dict[str, Any]]:
    """All methods on one shape and length."""
    problem = make_problem(SHAPES[shape], length, _QUERIES, seed, trained)
    variants = time_full(problem, repeats)
    full_us, products_us = (
        min((seconds * 1e6, variant) for variant, seconds in variants.items() if variant.startswith(kind))
        for kind in ("sdpa", "bmm")
    )
    words = problem.kv_HN2D.view(-1).view(torch.int64)
    read_us = median_seconds(lambda _: words.sum(), problem.queries, repeats) * 1e6
    all_us = {variant: seconds * 1e6 for variant, seconds in variants.items()}
    rows: list[dict[str, Any]] = [
        {"method": "full", "variant": full_us[1], "step_us": full_us[0], "variants_us": all_us},
        {"method": "full-products", "variant": products_us[1], "step_us": products_us[0]},
        {"method": "full-engine", "step_us": time_engine(problem, problem.kv_HN2D, repeats) * 1e6},
        {"method": "read", "step_us": read_us},
    ]
    partition = build_partition(problem, seed)
    for name, layout, expression, clusters in (
        ("csattention-dense", "dense", "csattention+dropped", None),
        ("csattention-lists", "lists", "csattention+dropped", None),
        ("csattention-remainder", "dense", "csattention", partition),
    ):
        index = build_index(problem, layout, seed)
        nbytes = index.nbytes + (0 if clusters is None else clusters.nbytes)
        for keep in keeps:
            bench = SparseBench(problem, index, get_method(expression, keep), clusters)
            bench.check()
            size = {"index_bytes_per_token_and_head": round(nbytes / length / SHAPES[shape].kv_heads)}
            rows.append({"method": name, "keep": keep, **bench.time(repeats), **size})
    rows += refined_rows(problem, keeps, repeats, seed)
    return [
        {
            "shape": shape,
            "context": length,
            "trained": trained is not None,
            **row,
            "load": os.getloadavg()[0],
            "speedup": round(full_us[0] / row["step_us"], 2),
            "speedup_products": round(products_us[0] / row["step_us"], 2),
        }
        for row in rows
    ]


def refined_rows(
    problem: Problem, keeps: Sequence[float], repeats: int, seed: int
) -> Iterator[dict[str, Any]]:
    """`refined` at every budget: its index is search and remainder at once."""
    start = time.perf_counter()
    index = CoarseRows.build(INDEX_SPECS["coarse_rows"].parameters, layer_source(problem, seed), seed)
    heads, length, _, head_dim = problem.kv_HN2D.shape
    built = {
        "build_ms": (time.perf_counter() - start) * 1e3,
        "index_bytes_per_token_and_head": round(index.nbytes / length / heads),
        "index_share": round(index.nbytes / (length * heads * 4 * head_dim), 4),
    }
    for keep in keeps:
        method = get_method("refined", keep)
        bench = SparseBench(problem, index, method)
        bench.check()
        appending = {"append_p99_us": append_us(index, problem, method.append_block)}
        yield {"method": "refined", "keep": keep, **bench.time(repeats), **built, **appending}
    planes = TwoPlanes(index.rows, find_low_plane(problem.kv_HN2D, index.rows), torch.bfloat16)
    yield {"method": "full-engine-int8", "step_us": time_engine(problem, planes, repeats) * 1e6}
    for keep in keeps:
        bench = SparseBench(problem, index, get_method("refined", keep), rows=planes)
        bench.check()
        yield {"method": "refined-int8", "keep": keep, **bench.time(repeats)}


def missed(row: dict[str, Any]) -> list[str]:
    """Where a method on the large shape is not as much faster than full attention as it should be."""
    bar = BARS.get(row["method"], {}).get(row["context"], 0.0)
    if row["shape"] != "llama-3.1-8b" or (row["method"] == "refined" and row["keep"] > 0.01):
        return []
    where = f"{row['method']} at {row['context']} tokens, keep {row.get('keep')}"
    found = [] if row["speedup"] >= bar else [f"{where}: {row['speedup']}x, expected {bar}x"]
    if row.get("append_p99_us", 0.0) > APPEND_BAR_US:
        found.append(f"{where}: an append takes {row['append_p99_us']:.0f} us, expected {APPEND_BAR_US:.0f}")
    return found


def main(
    lengths: Annotated[str, typer.Option(help="Context lengths, comma-separated.")] = "8k,32k,128k",
    shapes: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = ",".join(SHAPES),
    keep: Annotated[str, typer.Option(help="Fractions of the keys to keep.")] = "0.01,0.02,0.05",
    repeats: Annotated[int, typer.Option(help="Timed steps per figure.")] = 30,
    seed: Annotated[int, typer.Option()] = 0,
    bars: Annotated[bool, typer.Option("--bars", help="Fail when a method is too slow.")] = False,
    trained: Annotated[bool, typer.Option(help="Keys, values and queries of the packaged reader.")] = False,
) -> None:
    """Times one layer's attention per decode step on the CPU; one JSON line per result."""
    keeps = [float(part) for part in keep.split(",")]
    with reporting("attention_cpu", bars, gpu=False) as report:
        counts = [parse_length(part) for part in lengths.split(",")]
        recorded = record_problems(max(counts), _QUERIES) if trained else None
        for length in counts:
            for shape in shapes.split(","):
                for row in run_case(shape, length, keeps, repeats, seed, recorded):
                    report.add(row, *missed(row))


if __name__ == "__main__":
    typer.run(main)
