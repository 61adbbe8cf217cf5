"""Small batches for the query-table kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from decode_engine.kernels.records import records_of
from decode_engine.kernels.tables.reference import (
    TableSequence,
    attend_exactly,
    kept_mask,
    table_attention_reference,
)
from decode_engine.kernels.tables.selection import table_attention
from decode_engine.kernels.tables.sizes import TableContext, TableShape, TableSizes, TableWork

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = TableShape(tile_keys=512, rows=16, exact_programs=2, sample_programs=1)


def make_plan(
    group: int, head_dim: int, subspaces: int, centroids: int, pooled: bool, strided: bool
) -> TableSizes:
    """Two KV heads, contexts of up to 1500 keys."""
    return TableSizes(2, group, head_dim, subspaces, centroids, 1500, pooled, strided, shape=SMALL)


def make_context(plan: TableSizes, keys: int, dtype: torch.dtype) -> TableContext:
    """Random keys and tables, the columns after the last key poisoned with the largest score."""
    heads, width = plan.kv_heads, plan.head_dim // plan.subspaces
    rows = torch.randint(
        -127, 128, (heads, plan.subspaces, plan.centroids, -(-keys // 256) * 256), dtype=torch.int8
    )
    rows[..., keys:] = 127
    centroids = torch.randn(heads, plan.subspaces, plan.centroids, width)
    return TableContext(
        torch.randn(heads, keys, 2, plan.head_dim).to(dtype).to(DEVICE),
        rows.to(DEVICE)[..., :keys],
        torch.nn.functional.normalize(centroids, dim=-1).to(DEVICE),
        (torch.rand(heads, plan.subspaces) * 0.03).to(DEVICE),
    )


def make_sequence(
    plan: TableSizes, dtype: torch.dtype, keys: int, first: int, end: int, tail: int, keep: int
) -> TableSequence:
    """A sequence whose tail's memory holds nan after the last token."""
    rows = torch.randn(plan.kv_heads, tail + 5, 2, plan.head_dim)
    rows[:, tail:] = torch.nan
    context = make_context(plan, keys, dtype)
    return TableSequence(context, rows.to(dtype).to(DEVICE), first, end, tail, keep)


def make_queries(plan: TableSizes, dtype: torch.dtype, size: int) -> Tensor:
    return (3.0 * torch.randn(size, plan.kv_heads, plan.group, plan.head_dim)).to(dtype).to(DEVICE)


def poisoned(plan: TableSizes, size: int) -> tuple[TableWork, Tensor]:
    """A workspace and counts in which what is not written shows: nan, and counts and ids that no tile can have."""
    work = TableWork.make(plan, size, DEVICE)
    partials = work.partials
    for buffer in (partials.sums_RSGD, partials.peaks_RSG, partials.totals_RSG):
        buffer.fill_(torch.nan)
    for buffer in (work.units, work.peaks, work.masses, work.normalisers):
        buffer.fill_(torch.nan)
    work.cuts.fill_(-(2**30))
    work.ids.fill_(-(2**30))
    return work, work.counts().fill_(2**30)


def checked_mask(ids_PT: Tensor, counts_P: Tensor, keys: int) -> Tensor:
    """Which keys of the context a step kept for a KV head, [keys] bool; ids ascend inside a tile."""
    for ids, count in zip(ids_PT, counts_P.tolist(), strict=True):
        assert 0 <= count <= len(ids)
        assert bool((ids[:count].diff() > 0).all())
    return kept_mask(ids_PT, counts_P, keys)


def assert_equals_reference(
    plan: TableSizes, dtype: torch.dtype, batch: list[TableSequence | None], tolerance: float
) -> None:
    """By the kernels a step keeps what the reference keeps, and attends to exactly that."""
    q = make_queries(plan, dtype, len(batch))
    work, counts = poisoned(plan, len(batch))
    reference, expected_counts = poisoned(plan, len(batch))
    out, lse = table_attention(q, records_of(batch, DEVICE), plan, work, counts)
    expected_out, expected_lse = table_attention_reference(q, batch, plan, reference, expected_counts)
    assert not work.arrivals.any()
    for b, sequence in enumerate(batch):
        if sequence is None:
            assert not out[b].any()
            assert torch.isneginf(lse[b]).all()
            assert not counts[b].any()
            continue
        if sequence.first < sequence.end:
            assert torch.equal(work.rows[b], reference.rows[b])
            assert torch.equal(work.weights[b], reference.weights[b])
        for h in range(plan.kv_heads):
            kept = checked_mask(work.ids[b, h], counts[b, h], sequence.context.keys)
            expected = checked_mask(reference.ids[b, h], expected_counts[b, h], sequence.context.keys)
            assert int((kept != expected).sum()) <= 1 + 0.02 * int(expected.sum())
            assert not kept[: sequence.first].any()
            assert not kept[sequence.end :].any()
            exact, exact_lse = attend_exactly(q[b, h].float(), sequence, kept, plan.scale, h)
            assert float((out[b, h] - exact).norm() / exact.norm()) < tolerance
            torch.testing.assert_close(lse[b, h].double(), exact_lse.double(), rtol=1e-4, atol=1e-3)
            if torch.equal(kept, expected):
                torch.testing.assert_close(out[b, h], expected_out[b, h], rtol=tolerance, atol=tolerance)
                torch.testing.assert_close(lse[b, h], expected_lse[b, h], rtol=1e-4, atol=1e-3)


def unpacked_weights(work: TableWork) -> Tensor:
    """The 8-bit weights of the picked rows times their unit, [B, H, L, J] float32."""
    shifts = torch.arange(0, 32, 8, device=work.weights.device)
    return ((work.weights[..., None] >> shifts) & 255).flatten(-2) * work.units[..., :1]
