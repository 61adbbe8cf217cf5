"""The query-table kernels as they are compiled: in bfloat16, in captured graphs, and over the longest contexts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables.reference import (
    TableSequence,
    attend_exactly,
    kept_mask,
    table_attention_reference,
)
from decode_engine.kernels.tables.selection import table_attention
from decode_engine.kernels.tables.sizes import TableContext, TableShape, TableSizes, TableWork, table_shape
from tests.decode_engine.kernels.problems.table_problems import (
    DEVICE,
    SMALL,
    assert_equals_reference,
    make_plan,
    make_queries,
    make_sequence,
    poisoned,
)

pytestmark = pytest.mark.gpu
# keys, first, end, tail, keep
SIZES = [
    (259, 3, 250, 0, 9),
    (1500, 4, 1437, 21, 150),
    None,
    (300, 0, 300, 1, 400),
    (70, 10, 10, 3, 5),
    (1300, 2, 1290, 900, 0),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("group", "head_dim", "subspaces", "centroids", "pooled", "strided"),
    [
        (1, 64, 2, 200, True, True),
        (4, 128, 8, 64, True, False),
        (8, 64, 32, 3, False, True),
        (4, 128, 16, 32, False, True),
        (3, 128, 4, 100, False, False),
    ],
)
def test_kernels_equal_the_reference(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    subspaces: int,
    centroids: int,
    pooled: bool,
    strided: bool,
) -> None:
    torch.manual_seed(group + head_dim)
    plan = make_plan(group, head_dim, subspaces, centroids, pooled, strided)
    batch = [None if sizes is None else make_sequence(plan, dtype, *sizes) for sizes in SIZES]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 2e-3
    assert_equals_reference(plan, dtype, batch, tolerance)
    other = replace(SMALL, rows=32, exact_programs=1, stages=4, pick_apart=True, early_threshold=True)
    assert_equals_reference(replace(plan, shape=other), dtype, batch, tolerance)


@pytest.mark.parametrize("pooled", [True, False])
def test_graph_replay_equals_eager_and_follows_its_records(pooled: bool) -> None:
    torch.manual_seed(5)
    plan = make_plan(4, 128, 8, 16, pooled, True)
    sequences = [
        None if sizes is None else make_sequence(plan, torch.bfloat16, *sizes) for sizes in SIZES[:4]
    ]
    records, q = records_of(sequences, DEVICE), make_queries(plan, torch.bfloat16, 4)
    work, counts = poisoned(plan, 4)
    table_attention(q, records, plan, work, counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = table_attention(q, records, plan, work, counts)
    for turned in (sequences, sequences[1:] + sequences[:1], sequences[2:] + sequences[:2]):
        records.copy_(records_of(turned, DEVICE))
        q.copy_(make_queries(plan, torch.bfloat16, 4))
        out.fill_(torch.nan)
        counts.fill_(-1)
        graph.replay()
        eager, eager_counts = poisoned(plan, 4)
        expected = table_attention(q, records_of(turned, DEVICE), plan, eager, eager_counts)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        assert torch.equal(counts, eager_counts)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    "shape",
    [TableShape(), TableShape(early_threshold=True), TableShape(early_threshold=True, pick_apart=True)],
)
def test_layers_in_one_graph_do_not_mix(shape: TableShape, pooled: bool) -> None:
    """Launches overlap: many steps on other data, without a pause, equal each step alone."""
    torch.manual_seed(8)
    plan = TableSizes(8, 4, 128, 8, 64, 65536, pooled, shape=shape)
    layers = [
        make_sequence(plan, torch.bfloat16, 65536 - 300 * i, 8, 65000 - 300 * i, 9, 3000) for i in range(4)
    ]
    records = [records_of([layer], DEVICE) for layer in layers]
    queries = [make_queries(plan, torch.bfloat16, 1) for _ in layers]
    work, _ = poisoned(plan, 1)
    alone = []
    for q, record in zip(queries, records, strict=True):
        counts = work.counts()
        out, _ = table_attention(q, record, plan, work, counts)
        torch.cuda.synchronize()
        alone.append((out, counts))
    graph = torch.cuda.CUDAGraph()
    layer_counts = [work.counts() for _ in layers]
    with torch.cuda.graph(graph):
        outs = [
            [
                table_attention(q, record, plan, work, count)[0]
                for q, record, count in zip(queries, records, layer_counts, strict=True)
            ]
            for _ in range(8)
        ]
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    for layer, (out, count) in enumerate(alone):
        assert torch.equal(layer_counts[layer], count)
        assert all(torch.equal(of_layers[layer], out) for of_layers in outs)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("keys", [2**20, 2**21])
def test_a_million_keys_are_addressed(keys: int, pooled: bool) -> None:
    """Tables and rows of the last head begin beyond 2^31 bytes and elements."""
    heads, subspaces, centroids = 5, 8, 64
    shape = table_shape(keys, heads)
    plan = TableSizes(heads, 2, 128, subspaces, centroids, keys, pooled, shape=shape)
    kv = torch.empty(heads, keys, 2, 128, dtype=torch.bfloat16, device="cuda").normal_()
    tables = torch.empty(heads, subspaces, centroids, keys, dtype=torch.int8, device="cuda")
    tables.random_(-127, 128)
    centroids_HMCW = torch.nn.functional.normalize(torch.randn(heads, subspaces, centroids, 16), dim=-1)
    context = TableContext(kv, tables, centroids_HMCW.cuda(), torch.full((heads, subspaces), 0.01).cuda())
    tail = torch.randn(heads, 8, 2, 128).to(kv)
    sequence = TableSequence(context, tail, 10, keys - 64, 8, 20_000)
    q = make_queries(plan, torch.bfloat16, 1)
    work, counts = poisoned(plan, 1)
    reference = TableWork.make(plan, 1, DEVICE)
    expected_counts = reference.counts()
    out, _ = table_attention(q, records_of([sequence], DEVICE), plan, work, counts)
    table_attention_reference(q, [sequence], plan, reference, expected_counts)
    for h in range(heads):
        kept = kept_mask(work.ids[0, h], counts[0, h], keys)
        expected = kept_mask(reference.ids[0, h], expected_counts[0, h], keys)
        assert int((kept != expected).sum()) <= 1 + 0.02 * int(expected.sum())
        assert 0.8 * sequence.keep < int(kept.sum()) < 1.2 * sequence.keep
        exact, _ = attend_exactly(q[0, h].float(), sequence, kept, plan.scale, h)
        assert float((out[0, h].float() - exact).norm() / exact.norm()) < 1e-2
