"""Attention over query tables by the kernels equals its eager reference, and both the search of the CPU.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables.reference import sampled_keys, spread_sample
from decode_engine.kernels.tables.search import pick
from decode_engine.kernels.tables.selection import select, table_attention
from decode_engine.kernels.tables.sizes import (
    TableContext,
    TableShape,
    TableSizes,
    has_padded_rows,
    padded_rows,
    table_shape,
)
from index_store.errors import InvalidArgumentError
from index_store.indexes.query_tables.search_numba import (
    TableReads,
    softmax_sum_rows_reference,
    sum_rows_reference,
)
from tests.decode_engine.kernels.problems.table_problems import (
    DEVICE,
    SMALL,
    assert_equals_reference,
    checked_mask,
    make_context,
    make_plan,
    make_queries,
    make_sequence,
    poisoned,
    unpacked_weights,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
# keys, first, end, tail, keep
SHORT, LONG, ALL_KEPT, NONE_KEPT, NONE_SEARCHED, LONG_TAIL, IDLE = (
    (259, 3, 250, 0, 9),
    (1500, 4, 1437, 21, 150),
    (300, 0, 300, 1, 400),
    (300, 2, 290, 3, 0),
    (70, 10, 10, 3, 5),
    (520, 1, 520, 1000, 40),
    None,
)


@pytest.mark.parametrize(
    ("group", "head_dim", "subspaces", "centroids", "pooled", "strided", "sequences"),
    [
        (1, 64, 8, 5, True, True, [SHORT, LONG]),
        (4, 128, 8, 3, True, False, [LONG, IDLE]),
        (8, 64, 2, 5, True, True, [ALL_KEPT, NONE_SEARCHED]),
        (5, 64, 32, 1, True, True, [NONE_KEPT, LONG_TAIL]),
        (1, 64, 4, 6, False, True, [SHORT, NONE_KEPT]),
        (3, 64, 16, 2, False, False, [SHORT, NONE_SEARCHED]),
        (4, 128, 8, 4, False, True, [IDLE, LONG, ALL_KEPT]),
        (8, 128, 2, 256, False, True, [LONG_TAIL]),
        (2, 64, 32, 3, False, False, [SHORT]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16])
def test_kernels_equal_the_reference(
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    subspaces: int,
    centroids: int,
    pooled: bool,
    strided: bool,
    sequences: list[tuple[int, int, int, int, int] | None],
) -> None:
    torch.manual_seed(group + head_dim)
    plan = make_plan(group, head_dim, subspaces, centroids, pooled, strided)
    batch = [None if sizes is None else make_sequence(plan, dtype, *sizes) for sizes in sequences]
    assert_equals_reference(plan, dtype, batch, TOLERANCE[dtype])


@pytest.mark.parametrize("pooled", [True, False])
def test_launch_shapes_make_no_difference(pooled: bool) -> None:
    torch.manual_seed(6)
    plan = make_plan(2, 64, 4, 3, pooled, True)
    batch, q = [make_sequence(plan, torch.float16, *LONG)], make_queries(plan, torch.float16, 1)
    results = []
    other = replace(SMALL, rows=32, exact_programs=1, pick_apart=True, early_threshold=True)
    for shape in (SMALL, other):
        shaped = replace(plan, shape=shape)
        work, counts = poisoned(shaped, 1)
        out, lse = table_attention(q, records_of(batch, DEVICE), shaped, work, counts)
        assert not work.arrivals.any()
        results.append((counts.sum(-1), out.float(), lse))
    torch.testing.assert_close(results[0], results[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("pooled", [True, False])
def test_the_best_keys_of_the_cpu_search_are_kept(pooled: bool) -> None:
    torch.manual_seed(2)
    plan = make_plan(3, 64, 8, 5, pooled, True)
    sequence = make_sequence(plan, torch.float16, *LONG)
    q = make_queries(plan, torch.float16, 1)
    work, counts = poisoned(plan, 1)
    table_attention(q, records_of([sequence], DEVICE), plan, work, counts)
    context = sequence.context
    heads, subspaces, centroids, keys = context.tables_HMCN.shape
    tables = context.tables_HMCN.reshape(heads, -1, keys)
    rows = work.rows[0] // (context.tables_HMCN.stride(2) // 256)
    rows = rows - torch.arange(heads, device=DEVICE)[:, None, None] * (subspaces * centroids)
    reads = TableReads(
        tables.cpu(),
        tables[:, :, :0].cpu(),
        rows[:, None].to(torch.int32).cpu(),
        unpacked_weights(work)[0, :, None].cpu(),
        sequence.first,
        sequence.end,
    )
    rule = sum_rows_reference if pooled else softmax_sum_rows_reference
    scores_HM = rule(reads).reshape(heads, -1, sequence.end - sequence.first)[:, -1]
    for h in range(heads):
        kept = checked_mask(work.ids[0, h], counts[0, h], keys)[sequence.first : sequence.end].cpu()
        count = int(kept.sum())
        assert 0.5 * sequence.keep < count < 2 * sequence.keep
        best = scores_HM[h].topk(count).indices
        assert int(kept[best].sum()) > 0.9 * count
        assert kept[best[: count // 2]].all()


@pytest.mark.parametrize(
    ("sample", "keys", "spread"),
    [
        (spread_sample, 2**15, 0.2),
        (spread_sample, 2**17, 0.5),
        (sampled_keys, 2**15, 0.4),
        (sampled_keys, 2**17, 0.6),
    ],
)
def test_a_sample_counts_keys_that_lie_together(
    sample: Callable[[torch.Tensor, TableSizes], torch.Tensor], keys: int, spread: float
) -> None:
    """Text attends to stretches of text, here of 80 tokens and 1 % of them all: their count is estimated."""
    plan = TableSizes(2, 2, 64, 8, 4, keys, pooled=sample is sampled_keys, shape=table_shape(keys, 8))
    taken = sample(torch.arange(keys), plan)
    estimates = torch.empty(400)
    for seed in range(400):
        begins = torch.randint(0, keys - 80, (keys // 8000,), generator=torch.Generator().manual_seed(seed))
        wanted = torch.zeros(keys, dtype=torch.bool)
        wanted[begins[:, None] + torch.arange(80)] = True
        estimates[seed] = (wanted & taken).sum() / taken.sum() * keys / wanted.sum()
    assert 0.9 < float(estimates.mean()) < 1.15
    assert float(estimates.std()) < spread


def test_weights_equal_the_projections() -> None:
    torch.manual_seed(3)
    plan = make_plan(2, 128, 16, 7, False, True)
    sequence = make_sequence(plan, torch.float16, *SHORT)
    q = make_queries(plan, torch.float16, 1)
    work, _ = poisoned(plan, 1)
    pick(q, records_of([sequence], DEVICE), plan, work)
    slices = q[0].float().view(2, 2, 8, 16).transpose(2, 3) * plan.scale
    best = torch.einsum("hgmw,hmcw->hgmc", slices, sequence.context.centroids_HMCW).max(-1)
    heads = torch.arange(2, device=DEVICE)[:, None, None]
    rows = (heads * 16 + torch.arange(16, device=DEVICE)) * 7 + best.indices
    row_blocks = sequence.context.tables_HMCN.stride(2) // 256
    assert torch.equal(work.rows[0], (rows * row_blocks).to(torch.int32))
    expected = best.values.clamp(min=0) * sequence.context.scales_HM[:, None]
    largest = expected.amax(-1, keepdim=True)
    assert float(((unpacked_weights(work)[0] - expected).abs() / largest).max()) <= 0.51 / 255


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    torch.manual_seed(4)
    plan = make_plan(2, 64, 4, 3, False, True)
    sequences = [make_sequence(plan, torch.float16, *sizes) for sizes in (SHORT, LONG_TAIL)]
    q = make_queries(plan, torch.float16, 2)
    work, counts = poisoned(plan, 2)
    out, lse = table_attention(q, records_of(sequences, DEVICE), plan, work, counts)
    for b, sequence in enumerate(sequences):
        work, counts = poisoned(plan, 1)
        alone = table_attention(q[b : b + 1].contiguous(), records_of([sequence], DEVICE), plan, work, counts)
        assert torch.equal(alone[0][0], out[b])
        assert torch.equal(alone[1][0], lse[b])


def test_a_selection_alone_equals_the_attended_one() -> None:
    torch.manual_seed(7)
    plan = make_plan(2, 64, 4, 3, False, True)
    batch = [make_sequence(plan, torch.float16, *SHORT), None]
    records = records_of(batch, DEVICE)
    q = make_queries(plan, torch.float16, 2)
    work, counts = poisoned(plan, 2)
    attended, attended_counts = poisoned(plan, 2)
    select(q, records, plan, work, counts)
    table_attention(q, records, plan, attended, attended_counts)
    assert torch.equal(counts, attended_counts)
    for h in range(2):
        masks = [checked_mask(buffers.ids[0, h], counts[0, h], SHORT[0]) for buffers in (work, attended)]
        assert masks[0].any()
        assert torch.equal(*masks)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("count", [1, 20, 500])
def test_launch_shapes_are_valid(count: int, pooled: bool) -> None:
    for rows in (8, 128):
        TableSizes(8, 4, 128, 8, 64, count * 4096, pooled, shape=table_shape(count * 4096, rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 9}, "groups of 1 to 8"),
        ({"head_dim": 96}, "dimensions 64 and 128"),
        ({"max_keys": 2**21 + 1}, "up to 2097152 keys"),
        ({"subspaces": 3}, "3 subspaces"),
        ({"subspaces": 64}, "64 subspaces"),
        ({"centroids": 257}, "257 centroids"),
        ({"shape": TableShape(tile_keys=768)}, "tile_keys is 768"),
        ({"shape": TableShape(sample_programs=3)}, "sample_programs is 3"),
        ({"shape": TableShape(sample_programs=64)}, "from 1 to 32"),
    ],
)
def test_sizes_that_kernels_cannot_do_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        replace(make_plan(2, 64, 8, 4, True, True), **changes)  # type: ignore[arg-type]


def test_rows_are_padded_to_blocks() -> None:
    scores = torch.randint(-127, 128, (2, 4, 3, 300), dtype=torch.int8)
    assert not has_padded_rows(scores)
    padded = padded_rows(scores)
    assert has_padded_rows(padded)
    assert torch.equal(padded, scores)
    assert padded.stride() == (4 * 3 * 512, 3 * 512, 512, 1)
    assert has_padded_rows(scores[..., :256].contiguous())
    wide = torch.zeros(2, 4, 3, 1024, dtype=torch.int8)
    assert has_padded_rows(wide[..., :300])
    assert not has_padded_rows(wide[..., 1:300])
    assert not has_padded_rows(wide[:, ::2, :, :300])
    cut = torch.zeros(2 * 4 * 3 * 512 - 1, dtype=torch.int8)
    assert not has_padded_rows(cut.as_strided((2, 4, 3, 300), padded.stride()))


def test_wrong_tensors_are_refused() -> None:
    plan = make_plan(2, 64, 8, 4, True, True)
    context = make_context(plan, 300, torch.float16)
    kv, tables, centroids, scales = (
        context.kv_HN2D,
        context.tables_HMCN,
        context.centroids_HMCW,
        context.scales_HM,
    )
    for tensors, message in (
        ((kv, tables[:, 1:], centroids, scales), "tables of a table context"),
        ((kv, tables.contiguous(), centroids, scales), "a multiple of 256 bytes apart"),
        ((kv, tables, centroids.double(), scales), "centroids of a table context"),
        ((kv.transpose(0, 1), tables, centroids, scales), "of a table context"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            TableContext(*tensors)
