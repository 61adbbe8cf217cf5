"""Spherical k-means by kernels, and where it starts."""

from __future__ import annotations

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.spherical_triton import (
    spherical_kmeans_batch,
    spread_seeds,
    spread_seeds_reference,
)
from tests.support.devices import DEVICE


@pytest.mark.parametrize("count", [3, 130, 1500])
def test_seeds(count: int) -> None:
    points = torch.randn(2, count, 16, generator=torch.Generator().manual_seed(0))
    points = torch.nn.functional.normalize(points, dim=-1).to(DEVICE, torch.float16)
    points[0, 0] = 0.0
    found, expected = spread_seeds(points, 6, 0), spread_seeds_reference(points, 6, 0)
    assert torch.equal(found, expected)
    if count > 100:
        assert len(found[0].unique(dim=0)) == 6


def test_query_kmeans_is_as_tight_as_the_hosts() -> None:
    from index_store.indexes.kmeans.kmeans import spherical_kmeans

    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 500, 8, generator=generator)
    points[0, :5] = 0.0
    found = spherical_kmeans_batch(points.to(DEVICE), 16, 10, seed=0).cpu()
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(3, 16), rtol=1e-4, atol=1e-4)
    for problem in range(3):
        directions = torch.nn.functional.normalize(points[problem], dim=-1)
        theirs = spherical_kmeans(points[problem], 16, 10, 0)
        own_reach = float((directions @ found[problem].t()).amax(1).mean())
        assert own_reach > 0.97 * float((directions @ theirs.t()).amax(1).mean())
    few = spherical_kmeans_batch(points[:, :4].to(DEVICE), 6, 2, seed=0)
    assert torch.isfinite(few).all()
    with pytest.raises(InvalidArgumentError):
        spherical_kmeans_batch(points[:, :0], 6, 2, seed=0)
