"""Small batches for the query-table kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from decode_engine.kernels.table_batch import (
    LaunchShape,
    TableBatch,
    TableContext,
    TablePlan,
    TableSequence,
    Workspace,
    padded_tables,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LaunchShape(tile_keys=512, rows=16, exact_programs=2, sample_programs=1)


def make_plan(
    group: int, head_dim: int, subspaces: int, centroids: int, pooled: bool, strided: bool
) -> TablePlan:
    """Two KV heads, contexts of up to 1500 keys."""
    return TablePlan(2, group, head_dim, subspaces, centroids, 1500, pooled, strided, shape=SMALL)


def make_context(plan: TablePlan, keys: int, dtype: torch.dtype) -> TableContext:
    """Random keys and tables, the columns after the last key poisoned with the largest score."""
    heads, width = plan.kv_heads, plan.head_dim // plan.subspaces
    scores = torch.randint(-127, 128, (heads, plan.subspaces, plan.centroids, keys), dtype=torch.int8)
    tables = padded_tables(scores)
    tables[:, :, keys:] = 127
    centroids = torch.randn(heads, plan.subspaces, plan.centroids, width)
    return TableContext(
        torch.randn(heads, keys, 2, plan.head_dim).to(dtype).to(DEVICE),
        tables.to(DEVICE),
        torch.nn.functional.normalize(centroids, dim=-1).to(DEVICE),
        (torch.rand(heads, plan.subspaces) * 0.03).to(DEVICE),
    )


def make_sequence(
    plan: TablePlan, dtype: torch.dtype, keys: int, first: int, end: int, tail: int, keep: int
) -> TableSequence:
    """A sequence whose tail's memory holds nan after the last token."""
    rows = torch.randn(plan.kv_heads, tail + 5, 2, plan.head_dim)
    rows[:, tail:] = torch.nan
    context = make_context(plan, keys, dtype)
    return TableSequence(context, rows.to(dtype).to(DEVICE), first, end, tail, keep)


def make_queries(plan: TablePlan, dtype: torch.dtype, size: int) -> Tensor:
    return (3.0 * torch.randn(size, plan.kv_heads, plan.group, plan.head_dim)).to(dtype).to(DEVICE)


def poisoned(plan: TablePlan, dtype: torch.dtype, size: int) -> Workspace:
    """A workspace in which what is not written shows: nan, and counts and ids that no tile can have."""
    work = Workspace.make(plan, size, dtype, DEVICE)
    for buffer in (work.out, work.lse, work.outs, work.lses, work.peaks, work.masses, work.normalisers):
        buffer.fill_(torch.nan)
    work.counts.fill_(2**30)
    work.ids.fill_(-(2**30))
    return work


def kept_mask(batch: TableBatch, work: Workspace, b: int, h: int) -> Tensor:
    """Which keys of the context a step kept, [N] bool."""
    kept = torch.zeros(batch.sequences[b].context.keys, dtype=torch.bool, device=DEVICE)
    ids, counts = work.kept(2**31 - 1)
    own = ids[b, h, : int(counts[b, h])].long()
    assert not len(own) or bool((own.diff() > 0).all())
    kept[own] = True
    return kept
