"""Attention over query tables by the kernels equals its eager reference, and both the search of the CPU.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.merge_states import merge_into, merge_into_reference
from decode_engine.kernels.table_attention import table_attention
from decode_engine.kernels.table_batch import (
    LaunchShape,
    TableBatch,
    TableContext,
    TablePlan,
    TableSequence,
    Workspace,
    launch_shape,
)
from decode_engine.kernels.table_reference import attend_exactly, table_attention_reference
from decode_engine.kernels.table_search import pick, unpacked_weights
from index_store.errors import InvalidArgumentError
from index_store.kernels.table_search import TableReads, softmax_sum_rows_reference, sum_rows_reference
from tests.decode_engine.table_problems import (
    DEVICE,
    SMALL,
    kept_mask,
    make_context,
    make_plan,
    make_queries,
    make_sequence,
    poisoned,
)

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)]
# keys, first, end, tail, keep
SHORT, LONG, ALL_KEPT, NONE_SEARCHED = (
    (259, 3, 250, 0, 9),
    (1500, 4, 1437, 21, 150),
    (300, 0, 300, 1, 400),
    (70, 10, 10, 3, 5),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "head_dim", "subspaces", "centroids", "pooled", "strided", "sequences"),
    [
        (1, 64, 8, 5, True, True, [SHORT, LONG]),
        (4, 128, 8, 3, True, False, [LONG]),
        (8, 64, 4, 5, True, True, [ALL_KEPT, NONE_SEARCHED]),
        (1, 64, 4, 6, False, True, [SHORT]),
        (3, 64, 16, 2, False, False, [SHORT, NONE_SEARCHED]),
        (4, 128, 8, 4, False, True, [LONG, ALL_KEPT]),
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
    sequences: list[tuple[int, int, int, int, int]],
) -> None:
    torch.manual_seed(group + head_dim)
    plan = make_plan(group, head_dim, subspaces, centroids, pooled, strided)
    batch = TableBatch.of([make_sequence(plan, dtype, *sizes) for sizes in sequences])
    plan.check(batch)
    q = make_queries(plan, dtype, len(sequences))
    work, reference = (poisoned(plan, dtype, len(sequences)) for _ in range(2))
    table_attention(q, batch, plan, work)
    table_attention_reference(q, batch, plan, reference)
    assert torch.equal(work.rows, reference.rows)
    assert torch.equal(work.weights, reference.weights)
    for b, sequence in enumerate(batch.sequences):
        for h in range(plan.kv_heads):
            kept, expected = (kept_mask(batch, buffers, b, h) for buffers in (work, reference))
            assert int((kept != expected).sum()) <= 1 + 0.02 * int(expected.sum())
            assert not kept[: sequence.first].any()
            assert not kept[sequence.end :].any()
            out, lse = attend_exactly(q[b, h].float(), sequence, kept, plan.scale, h)
            assert float((work.out[b, h] - out).norm() / out.norm()) < TOLERANCE[dtype]
            torch.testing.assert_close(work.lse[b, h].double(), lse.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("pooled", [True, False])
def test_launch_shapes_make_no_difference(pooled: bool) -> None:
    torch.manual_seed(6)
    plan = make_plan(2, 64, 4, 3, pooled, True)
    other = replace(SMALL, rows=32, exact_programs=1, pick_apart=True, early_threshold=True)
    batch, q = (
        TableBatch.of([make_sequence(plan, torch.float16, *LONG)]),
        make_queries(plan, torch.float16, 1),
    )
    results = []
    for shape in (SMALL, other):
        shaped = replace(plan, shape=shape)
        work = poisoned(shaped, torch.float16, 1)
        table_attention(q, batch, shaped, work)
        assert not work.arrivals.any()
        results.append((work.counts, work.out.float(), work.lse))
    torch.testing.assert_close(results[0], results[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("pooled", [True, False])
def test_the_best_keys_of_the_cpu_search_are_kept(pooled: bool) -> None:
    torch.manual_seed(2)
    plan = make_plan(3, 64, 8, 5, pooled, True)
    sequence = make_sequence(plan, torch.float16, *LONG)
    batch, q = TableBatch.of([sequence]), make_queries(plan, torch.float16, 1)
    work = poisoned(plan, torch.float16, 1)
    table_attention(q, batch, plan, work)
    weights = unpacked_weights(work)[0].cpu()
    tables = sequence.context.tables_HSA[:, :, : sequence.context.keys].cpu()
    reads = TableReads(
        tables, tables[:, :, :0], work.rows[0, :, None].cpu(), weights[:, None], sequence.first, sequence.end
    )
    rule = sum_rows_reference if pooled else softmax_sum_rows_reference
    scores_HM = rule(reads).reshape(plan.kv_heads, -1, sequence.end - sequence.first)[:, -1]
    for h in range(plan.kv_heads):
        kept = kept_mask(batch, work, 0, h)[sequence.first : sequence.end].cpu()
        count = int(kept.sum())
        assert 0.5 * sequence.keep < count < 2 * sequence.keep
        best = scores_HM[h].topk(count).indices
        assert int(kept[best].sum()) > 0.9 * count
        assert kept[best[: count // 2]].all()


def test_a_selection_is_cut_to_its_room() -> None:
    plan = make_plan(1, 64, 4, 3, True, True)
    work = poisoned(plan, torch.float16, 1)
    work.counts.zero_()
    work.ids[0, 1, 0, :2] = torch.tensor([7, 300])
    work.ids[0, 1, 2, :1] = 5
    work.counts[0, 1] = torch.tensor([2, 0, 1])
    ids, counts = work.kept(2)
    assert (ids.dtype, counts.dtype) == (torch.int32, torch.int32)
    assert ids.tolist() == [[[0, 0], [5, 7]]]
    assert counts.tolist() == [[0, 2]]
    assert work.kept(4)[0].tolist() == [[[0, 0, 0, 0], [5, 7, 300, 0]]]


def test_weights_equal_the_projections() -> None:
    torch.manual_seed(3)
    plan = make_plan(2, 128, 16, 7, False, True)
    sequence = make_sequence(plan, torch.float16, *SHORT)
    q = make_queries(plan, torch.float16, 1)
    work = poisoned(plan, torch.float16, 1)
    pick(q, TableBatch.of([sequence]), plan, work)
    slices = q[0].float().view(2, 2, 8, 16).transpose(2, 3) * plan.scale
    best = torch.einsum("hgmw,hmcw->hgmc", slices, sequence.context.centroids_HMCW).max(-1)
    offsets = torch.arange(16, device=DEVICE) * 7
    assert torch.equal(work.rows[0].long(), best.indices + offsets)
    expected = best.values.clamp(min=0) * sequence.context.scales_HM[:, None]
    largest = expected.amax(-1, keepdim=True)
    assert float(((unpacked_weights(work)[0] - expected).abs() / largest).max()) <= 0.51 / 255


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    torch.manual_seed(4)
    plan = make_plan(2, 64, 4, 3, False, True)
    sequences = [make_sequence(plan, torch.float16, *sizes) for sizes in (SHORT, LONG)]
    q = make_queries(plan, torch.float16, 2)
    together = poisoned(plan, torch.float16, 2)
    table_attention(q, TableBatch.of(sequences), plan, together)
    for b, sequence in enumerate(sequences):
        alone = poisoned(plan, torch.float16, 1)
        table_attention(q[b : b + 1].contiguous(), TableBatch.of([sequence]), plan, alone)
        assert torch.equal(alone.out[0], together.out[b])
        assert torch.equal(alone.lse[0], together.lse[b])


@pytest.mark.parametrize("size", [1, 3, 130])
def test_states_merge(size: int) -> None:
    torch.manual_seed(size)
    outs = torch.randn(2, 1, size, 3, 64, device=DEVICE)
    lses = torch.randn(2, 1, size, 3, device=DEVICE) * 5
    lses[0, 0, : size // 2] = -torch.inf
    lses[1, 0, :, 2] = -torch.inf
    outs.masked_fill_(torch.isneginf(lses)[..., None], torch.nan)
    results = []
    for merge in (merge_into, merge_into_reference):
        out = torch.full((2, 1, 3, 64), torch.nan, device=DEVICE)
        lse = torch.full((2, 1, 3), torch.nan, device=DEVICE)
        merge(outs, lses, out, lse)
        results.append((out, lse))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    assert torch.isneginf(results[0][1][1, 0, 2])
    assert not results[0][0][1, 0, 2].any()


@pytest.mark.parametrize("count", [1, 20, 500])
def test_launch_shapes_are_valid(count: int) -> None:
    for rows in (8, 128):
        shape = launch_shape(count * 4096, rows, True)
        TablePlan(8, 4, 128, 8, 64, count * 4096, True, shape=shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 9}, "groups of 1 to 8"),
        ({"head_dim": 96}, "dimensions 64 and 128"),
        ({"max_keys": 2**21 + 1}, "up to 2\\^21 keys"),
        ({"subspaces": 3}, "3 subspaces"),
        ({"shape": LaunchShape(tile_keys=768)}, "power of two"),
    ],
)
def test_sizes_that_kernels_cannot_do_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(make_plan(2, 64, 8, 4, True, True), **changes)  # type: ignore[arg-type]


def test_wrong_tensors_are_refused() -> None:
    plan = make_plan(2, 64, 8, 4, True, True)
    context = make_context(plan, 300, torch.float16)
    with pytest.raises(InvalidArgumentError, match="tables of a table context"):
        TableContext(context.kv_HN2D, context.tables_HSA[:, 1:], context.centroids_HMCW, context.scales_HM)
    with pytest.raises(InvalidArgumentError, match="rows of a multiple of 256"):
        TableContext(
            context.kv_HN2D,
            context.tables_HSA[:, :, :300].contiguous(),
            context.centroids_HMCW,
            context.scales_HM,
        )
    tail = torch.zeros(2, 4, 2, 64, dtype=torch.float16, device=DEVICE)
    for first, end, tokens, wrong in (
        (5, 4, 0, "first <= end"),
        (0, 301, 0, "<= keys"),
        (0, 1, 5, "tail tokens"),
    ):
        with pytest.raises(InvalidArgumentError, match=wrong):
            TableSequence(context, tail, first, end, tokens, 1)
    with pytest.raises(InvalidArgumentError, match="dtype"):
        TableSequence(context, tail.float(), 0, 1, 0, 1)
    other = make_context(make_plan(2, 64, 8, 5, True, True), 300, torch.float16)
    with pytest.raises(InvalidArgumentError, match="the plan is for"):
        plan.check(TableBatch.of([TableSequence(other, tail, 0, 1, 0, 1)]))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("dependent", [True, False])
def test_graph_replay_equals_eager_and_follows_its_records(pooled: bool, dependent: bool) -> None:
    torch.manual_seed(5)
    shape = replace(SMALL, dependent_launch=dependent)
    plan = replace(make_plan(4, 128, 8, 16, pooled, True), shape=shape)
    sequences = [make_sequence(plan, torch.bfloat16, *sizes) for sizes in (SHORT, LONG, ALL_KEPT)]
    batch, q = TableBatch.of(sequences), make_queries(plan, torch.bfloat16, 3)
    work, eager = (poisoned(plan, torch.bfloat16, 3) for _ in range(2))
    table_attention(q, batch, plan, work)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table_attention(q, batch, plan, work)
    for turned in (sequences, sequences[1:] + sequences[:1]):
        batch.records_BF.copy_(TableBatch.of(turned).records_BF)
        q.copy_(make_queries(plan, torch.bfloat16, 3))
        work.out.fill_(torch.nan)
        graph.replay()
        table_attention(q, TableBatch.of(turned), plan, eager)
        assert torch.equal(work.out, eager.out)
        assert torch.equal(work.lse, eager.lse)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("pooled", [True, False])
def test_two_million_keys_are_addressed(pooled: bool) -> None:
    """Tables and rows of the last head begin beyond 2^31 bytes and elements."""
    keys, heads, subspaces, centroids = 2**21, 5, 8, 64
    plan = TablePlan(
        heads, 2, 128, subspaces, centroids, keys, pooled, shape=launch_shape(keys, heads, pooled)
    )
    kv = torch.empty(heads, keys, 2, 128, dtype=torch.bfloat16, device="cuda").normal_()
    tables = torch.empty(heads, subspaces * centroids, keys, dtype=torch.int8, device="cuda").random_(
        -127, 128
    )
    centroids_HMCW = torch.nn.functional.normalize(torch.randn(heads, subspaces, centroids, 16), dim=-1)
    context = TableContext(kv, tables, centroids_HMCW.cuda(), torch.full((heads, subspaces), 0.01).cuda())
    tail = torch.randn(heads, 8, 2, 128).to(kv)
    sequence = TableSequence(context, tail, 10, keys - 64, 8, 20_000)
    batch, q = TableBatch.of([sequence]), make_queries(plan, torch.bfloat16, 1)
    work, reference = (Workspace.make(plan, 1, torch.bfloat16, "cuda") for _ in range(2))
    table_attention(q, batch, plan, work)
    table_attention_reference(q, batch, plan, reference)
    for h in range(heads):
        kept, expected = (kept_mask(batch, buffers, 0, h) for buffers in (work, reference))
        assert int((kept != expected).sum()) <= 1 + 0.02 * int(expected.sum())
        assert 0.8 * sequence.keep < int(kept.sum()) < 1.2 * sequence.keep
        out, _ = attend_exactly(q[0, h].float(), sequence, kept, plan.scale, h)
        assert float((work.out[0, h].float() - out).norm() / out.norm()) < 1e-2
