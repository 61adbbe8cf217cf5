"""The kernels of remainders equal their eager references."""

from __future__ import annotations

import pytest
import torch

from index_store.selection.remainders_numba import (
    cluster_sums,
    cluster_sums_reference,
    leave_out,
    leave_out_reference,
)


@pytest.mark.parametrize("clusters", [1, 255, 256, 700])
@pytest.mark.parametrize(("positions", "group"), [(1, 1), (1, 4), (3, 5), (20, 2)])
@pytest.mark.parametrize("variances", [True, False])
@pytest.mark.parametrize("slack", [0, 9])
def test_it_equals_the_reference(
    clusters: int, positions: int, group: int, variances: bool, slack: int
) -> None:
    """slack: unused rows behind every head's, as growing buffers have."""
    heads, dim = 3, 24
    generator = torch.Generator().manual_seed(clusters + positions)
    logits = -12 * torch.rand(heads, positions, group, clusters, generator=generator)
    logits[..., 0] = 0.0
    logits[..., 1::5] = -torch.inf
    counts = torch.randint(1, 30, (heads, positions, clusters), generator=generator).float()
    queries = torch.randn(heads, positions, group, dim, generator=generator)
    spread, values = (
        torch.rand(heads, clusters + slack, dim, generator=generator)[:, :clusters] for _ in range(2)
    )
    given = (logits, counts, queries, spread if variances else None, values - 0.5)
    found, expected = cluster_sums(*given), cluster_sums_reference(*given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_clusters_without_influence_are_not_read() -> None:
    logits = torch.tensor([0.0, -100.0, -torch.inf]).expand(2, 1, 2, 3)
    values = torch.ones(2, 3, 8)
    values[:, 1:] = torch.nan
    weights, totals, sums = cluster_sums(logits, torch.ones(2, 1, 3), torch.zeros(2, 1, 2, 8), None, values)
    assert torch.equal(weights[0, 0, 0], torch.tensor([1.0, 0.0, 0.0]))
    assert (totals == 1.0).all()
    assert (sums == 1.0).all()


def test_no_clusters_add_nothing() -> None:
    empty = torch.empty(2, 1, 3, 0)
    weights, totals, sums = cluster_sums(
        empty, torch.empty(2, 1, 0), torch.ones(2, 1, 3, 8), None, torch.empty(2, 0, 8)
    )
    assert weights.shape == empty.shape
    assert (totals == 0).all()
    assert (sums == 0).all()


@pytest.mark.parametrize("size", [1, 63, 500])
def test_listed_columns_are_left_out_where_they_count(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    whole = torch.randn(3, 2, 2, size + 3, generator=generator)
    columns = torch.randint(-2, size + 2, (3, 2, 20), generator=generator, dtype=torch.int32)
    counted = torch.rand(columns.shape, generator=generator) < 0.7
    expected = whole.clone()
    leave_out_reference(expected[..., 1:-2], columns, counted)
    leave_out(whole[..., 1:-2], columns, counted)
    assert torch.equal(whole, expected)
    assert size < 10 or 0 < int(torch.isneginf(whole).sum()) < 2 * 2 * 3 * 20
