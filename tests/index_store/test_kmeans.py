"""k-means finds planted directions and survives awkward input."""

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.kmeans import spherical_kmeans


def test_finds_planted_directions_whatever_their_lengths() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.eye(6)
    points = truth[torch.randint(0, 6, (600,), generator=generator)] * (
        0.1 + 10 * torch.rand(600, 1, generator=generator)
    ) + 0.001 * torch.randn(600, 6, generator=generator)
    centroids = spherical_kmeans(points, 6, 10, seed=1)
    torch.testing.assert_close(centroids.norm(dim=-1), torch.ones(6))
    assert (truth @ centroids.t()).amax(1).min() > 0.99


def test_fewer_points_than_centroids_and_zero_vectors() -> None:
    points = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    centroids = spherical_kmeans(points, 4, 10, seed=0)
    assert centroids.shape == (4, 2)
    assert torch.equal(centroids[:2], torch.eye(2))
    with pytest.raises(InvalidArgumentError, match="direction"):
        spherical_kmeans(torch.zeros(5, 2), 2, 10, 0)
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        spherical_kmeans(points, 0, 10, 0)


def test_same_seed_same_centroids() -> None:
    points = torch.randn(500, 4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(spherical_kmeans(points, 16, 5, 3), spherical_kmeans(points, 16, 5, 3))
