"""k-means finds planted directions and survives awkward input."""

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.kmeans import (
    assign_clusters,
    euclidean_kmeans,
    euclidean_kmeans_batch,
    spherical_kmeans,
)


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


@pytest.mark.parametrize("count", [7, 300])
def test_several_sets_of_points_at_once(count: int) -> None:
    points = torch.randn(3, count, 4, generator=torch.Generator().manual_seed(2))
    centroids = euclidean_kmeans_batch(points, 16, 5, 3)
    assert centroids.shape == (3, 16, 4)
    for number in range(3):
        assert torch.equal(centroids[number], euclidean_kmeans(points[number], 16, 5, 3 + number))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_planted_groups_share_a_cluster(metric: str) -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(0, 6, (600,), generator=generator)
    points = 5 * torch.eye(6)[truth] + 0.01 * torch.randn(600, 6, generator=generator)
    cluster = assign_clusters(points, 40, 10, seed=1, metric=metric)
    assert cluster.dtype == torch.int64
    assert 0 <= int(cluster.min()) <= int(cluster.max()) < 40
    for number in cluster.unique():
        assert len(truth[cluster == number].unique()) == 1


def test_cosine_ignores_lengths_and_euclidean_does_not() -> None:
    generator = torch.Generator().manual_seed(3)
    direction = torch.randint(0, 2, (400,), generator=generator)
    length = torch.randint(0, 2, (400,), generator=generator)
    points = torch.eye(2)[direction] * (1.0 + 9.0 * length[:, None])
    points += 0.001 * torch.randn(400, 2, generator=generator)
    by_direction = assign_clusters(points, 2, 10, 0, "cosine")
    assert len({*zip(by_direction.tolist(), direction.tolist(), strict=True)}) == 2
    by_place = assign_clusters(points, 40, 10, 0, "euclidean")
    for number in by_place.unique():
        inside = by_place == number
        assert len({*zip(direction[inside].tolist(), length[inside].tolist(), strict=True)}) == 1


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_awkward_points_are_assigned(metric: str) -> None:
    some_zero = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    some_zero[::3] = 0.0
    for points in (some_zero, torch.zeros(50, 4), torch.ones(50, 4)):
        cluster = assign_clusters(points, 7, 10, 0, metric)
        assert cluster.shape == (50,)
        assert 0 <= int(cluster.min()) <= int(cluster.max()) < 7
    assert assign_clusters(some_zero[:3], 7, 10, 0, metric).tolist() == [0, 1, 2]
    assert torch.equal(
        assign_clusters(some_zero, 7, 10, 5, metric), assign_clusters(some_zero, 7, 10, 5, metric)
    )


def test_assigning_refuses_bad_arguments() -> None:
    points = torch.randn(9, 2)
    with pytest.raises(InvalidArgumentError, match="cosine, euclidean"):
        assign_clusters(points, 2, 10, 0, "manhattan")
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        assign_clusters(points, 2, 0, 0, "cosine")
    with pytest.raises(InvalidArgumentError, match="NaN"):
        assign_clusters(points * torch.nan, 2, 10, 0, "cosine")
