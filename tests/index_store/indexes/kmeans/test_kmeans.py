"""k-means finds planted directions and survives awkward input."""

from __future__ import annotations

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.kmeans import (
    assign_clusters,
    spherical_kmeans,
)
from index_store.indexes.kmeans.kmeans_triton import (
    assign_vectors,
    assign_vectors_reference,
    fill_rows,
    find_clusters,
    inverse_norms,
    inverse_norms_reference,
    move_centroids,
    move_centroids_reference,
    spherical_kmeans_batch,
    spread_seeds,
    spread_seeds_reference,
)
from tests.support.devices import DEVICE, DTYPES, make_kv


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


BLOCKS = [(3, 150, 0, 20), (150, 283, 20, 37)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_an_iteration_of_kmeans(dtype: torch.dtype, metric: str, head_dim: int) -> None:
    vectors = make_kv(300, dtype, head_dim)[:, :, 0]
    table = torch.tensor(BLOCKS, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    centroids = torch.randn(2, 37, head_dim, generator=generator).to(DEVICE, dtype)
    scales, halves = None, None
    if metric == "cosine":
        centroids = torch.nn.functional.normalize(centroids.float(), dim=-1).to(dtype)
        scales = vectors.float().norm(dim=-1).reciprocal()
    else:
        halves = 0.5 * centroids.float().square().sum(-1)
    found, expected = (torch.full((2, 300), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    assign_vectors(vectors, centroids, halves, table, BLOCKS, found)
    assign_vectors_reference(vectors, centroids, halves, table, BLOCKS, expected)
    assert float((found == expected).float().mean()) > 0.995  # ties
    assert (found[:, :3] == -1).all()
    assert (found[:, 283:] == -1).all()
    moved = [(centroids.clone(), None if halves is None else halves.clone()) for _ in range(2)]
    move_centroids(vectors, scales, expected, table, BLOCKS, *moved[0])
    move_centroids_reference(vectors, scales, expected, table, BLOCKS, *moved[1])
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for one, other in zip(moved[0], moved[1], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert not torch.equal(moved[0][0], centroids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inverse_norms(dtype: torch.dtype) -> None:
    vectors = make_kv(300, dtype)[:, :, 0]
    vectors[1, 7] = 0.0
    found = inverse_norms(vectors)
    torch.testing.assert_close(found, inverse_norms_reference(vectors), rtol=1e-5, atol=0)
    assert float(found[1, 7]) == pytest.approx(1e20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("halved", [False, True])
def test_a_centroid_among_more_than_a_tile_holds(dtype: torch.dtype, halved: bool) -> None:
    blocks = [(0, 150, 0, 257), (150, 300, 257, 322), (300, 310, 322, 323)]
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(2, 310, 64, generator=generator).to(DEVICE, dtype)
    centroids = torch.randn(2, 323, 64, generator=generator).to(DEVICE, dtype)
    halves = 0.5 * centroids.float().square().sum(-1) if halved else None
    table = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    found, expected = (torch.full((2, 310), -1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    assign_vectors(vectors, centroids, halves, table, blocks, found)
    assign_vectors_reference(vectors, centroids, halves, table, blocks, expected)
    assert float((found == expected).float().mean()) > 0.99  # ties
    assert int(expected[:, :150].amax()) > 192
    assert (found[:, 300:] == 322).all()


def test_sums_of_long_blocks_are_those_of_short_ones() -> None:
    count = 33_000
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1, count, 16, generator=generator).to(DEVICE)
    named = torch.randint(0, 5, (1, count), generator=generator).to(DEVICE, torch.int32)
    blocks = [(0, count, 0, 6)]
    table = torch.tensor(blocks, dtype=torch.int32, device=DEVICE)
    for scales in (None, vectors.norm(dim=-1).reciprocal()):
        halves = torch.ones(1, 6, device=DEVICE) if scales is None else None
        moved = [
            (torch.zeros(1, 6, 16, device=DEVICE), None if halves is None else halves.clone())
            for _ in range(2)
        ]
        move_centroids(vectors, scales, named, table, blocks, *moved[0])
        move_centroids_reference(vectors, scales, named, table, blocks, *moved[1])
        for one, other in zip(moved[0], moved[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert (moved[0][0][0, 5] == 0).all()  # no vector: it stays


def test_rows_of_any_length() -> None:
    assert fill_rows(torch.ones(2, 3)).tolist() == [[1.0] * 3 + [0.0] * 13] * 2
    fitting = torch.ones(2, 64)
    assert fill_rows(fitting) is fitting
    assert fill_rows(torch.ones(64, 2).t()).stride() == (64, 1)
    with pytest.raises(InvalidArgumentError, match="257 dimensions"):
        fill_rows(torch.ones(2, 257))
    vectors = make_kv(80, torch.float32, 24)[:, :, 0]
    assignment, centroids = find_clusters(vectors, [(0, 80, 0, 7)], 3, "euclidean", 0)
    assert centroids.shape == (2, 7, 24)
    nearest = torch.cdist(vectors, centroids).argmin(-1)
    assert float((nearest == assignment).float().mean()) > 0.99


@pytest.mark.parametrize("clusters", [5, 7])
def test_no_more_vectors_than_clusters(clusters: int) -> None:
    vectors = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assignment, centroids = find_clusters(vectors, [(0, 5, 0, clusters)], 2, "euclidean", 0)
    assert assignment.tolist() == [[0, 1, 2, 3, 4]]
    torch.testing.assert_close(centroids[:, :5], vectors)
    torch.testing.assert_close(centroids[:, 5:], vectors[:, 4:].expand(-1, clusters - 5, -1))


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
