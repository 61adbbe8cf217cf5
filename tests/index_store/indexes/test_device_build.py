"""Indexes built by kernels equal the eager references and the arrays that the host builds.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.build_triton import (
    build_device_clusters,
    covary_members,
    covary_members_reference,
    list_device_members,
    measure_members,
    measure_members_reference,
)
from index_store.indexes.query_tables.build_triton import (
    build_device_tables,
    score_tables,
    score_tables_reference,
)
from index_store.kmeans.kmeans_triton import (
    cluster_blocks,
    fill_rows,
    find_clusters,
    inverse_norms,
    inverse_norms_reference,
    move_centroids,
    move_centroids_reference,
)
from index_store.kmeans.nearest_triton import assign_vectors, assign_vectors_reference
from index_store.kmeans.spherical_triton import spherical_kmeans_batch, spread_seeds, spread_seeds_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=ON_GPU)]
BLOCKS = [(3, 150, 0, 20), (150, 283, 20, 37)]


def make_kv(count: int, dtype: torch.dtype, head_dim: int = 64, centres: int = 30) -> Tensor:
    """[2, count, 2, d] keys around a few centres."""
    generator = torch.Generator().manual_seed(count)
    places = torch.randint(0, centres, (2, count), generator=generator)
    middles = torch.randn(2, centres, head_dim, generator=generator)
    keys = middles.gather(1, places[..., None].expand(-1, -1, head_dim))
    keys = keys + 0.3 * torch.randn(2, count, head_dim, generator=generator)
    values = torch.randn(2, count, head_dim, generator=generator)
    return torch.stack([keys, values], dim=2).to(DEVICE, dtype)


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


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_clusters_are_as_tight_as_the_hosts(metric: str) -> None:
    from index_store.kmeans.kmeans import assign_clusters

    # Points without order: wherever k-means starts, it ends about equally well.
    vectors = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    points = torch.nn.functional.normalize(vectors, dim=-1) if metric == "cosine" else vectors
    points = points[0].cpu()
    assignment = cluster_blocks(vectors, [(0, 200, 0, 12)], 4, metric, seed=1).cpu()
    theirs = assign_clusters(vectors[0].cpu(), 12, 4, 1, metric)
    own_spread = _spread(points, assignment[0].long())
    assert own_spread < 1.05 * _spread(points, theirs)
    assert own_spread < 0.92 * float((points - points.mean(0)).square().sum())


def test_members_are_those_of_the_host() -> None:
    from index_store.indexes.key_clusters.build import list_members

    generator = torch.Generator().manual_seed(0)
    assignment = torch.randint(-1, 12, (3, 200), generator=generator).to(torch.int32)
    found = list_device_members(assignment.to(DEVICE), 13)
    for one, other in zip(found, list_members(assignment, 13), strict=True):
        assert torch.equal(one.cpu(), other)
        assert one.dtype == torch.int32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spread", "clusters"), [(True, 9), (False, 9), (True, 2)])
def test_moments(dtype: torch.dtype, spread: bool, clusters: int) -> None:
    """Of a few members, and of more than three tiles of them."""
    kv = make_kv(120, dtype)
    kv[:, :, 0] += 3.0  # means away from zero
    assignment = torch.randint(-1, clusters, (2, 120), generator=torch.Generator().manual_seed(0))
    lists = list_device_members(assignment.to(DEVICE, torch.int32), 10)
    found = measure_members(kv[:, :, 0], kv[:, :, 1], *lists, spread)
    expected = measure_members_reference(kv[:, :, 0], kv[:, :, 1], *lists, spread)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        torch.testing.assert_close(found[name], array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 40])
def test_covariances(head_dim: int) -> None:
    kv = make_kv(120, torch.float16, head_dim)
    assignment = torch.randint(-1, 9, (2, 120), generator=torch.Generator().manual_seed(0))
    lists = list_device_members(assignment.to(DEVICE, torch.int32), 10)
    moments = measure_members(kv[:, :, 0], kv[:, :, 1], *lists, spread=False)
    found = covary_members(kv[:, :, 0], kv[:, :, 1], *lists, moments)
    cpu = [tensor.cpu() for tensor in (kv[:, :, 0], kv[:, :, 1], *lists)]
    expected = covary_members_reference(*cpu, {name: array.cpu() for name, array in moments.items()})
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)


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


def test_built_clusters_are_whole() -> None:
    kv = make_kv(290, torch.float32)
    blocks = divide_keys(290, 8, 128, 4)
    arrays = build_device_clusters(kv, blocks, metric="euclidean", iterations=3, moments="diagonal", seed=0)
    assert (arrays["counts"].sum(1) == 286).all()
    members = arrays["members"][:, :286].sort(dim=1).values
    assert torch.equal(members.cpu(), torch.arange(4, 290, dtype=torch.int32).expand(2, -1))
    sums = arrays["value_sums"].sum(1)
    torch.testing.assert_close(sums, kv[:, 4:, 1].sum(1), rtol=1e-4, atol=1e-4)
    for first, end, begin, stop in blocks:
        inside = arrays["assignment"][:, first:end]
        assert int(inside.min()) >= begin
        assert int(inside.max()) < stop
    for bad in ({"moments": "some"}, {"metric": "manhattan"}, {"iterations": 0}):
        options = {"metric": "cosine", "iterations": 1, "moments": "none", "seed": 0, **bad}
        with pytest.raises(InvalidArgumentError):
            build_device_clusters(kv, blocks, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("subspaces", "centroids", "count"), [(8, 16, 130), (16, 5, 33)])
@pytest.mark.parametrize("strided", [True, False])
def test_tables(dtype: torch.dtype, subspaces: int, centroids: int, count: int, strided: bool) -> None:
    keys = make_kv(count, dtype)[:, :, 0]
    order = torch.arange(64)
    dims = order.view(-1, subspaces).t() if strided else order.view(subspaces, -1)
    dims = dims.contiguous().to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.functional.normalize(
        torch.randn(2, subspaces, centroids, 64 // subspaces, generator=generator), dim=-1
    ).to(DEVICE)
    made = made.to(dtype).float()
    scales, scores = score_tables(keys, made, dims)
    expected_scales, expected = score_tables_reference(keys, made, dims)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-4, atol=0.0)
    difference = (scores.int() - expected.int()).abs()
    assert int(difference.max()) <= 1  # where rounding is a matter of the last bit
    assert float(difference.float().mean()) < 0.002


def test_whole_tables_equal_the_hosts_but_for_their_seeds() -> None:
    keys = make_kv(90, torch.float32)[:, :, 0]
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2, 60, 64, generator=generator).to(DEVICE)
    dims = torch.arange(64).view(-1, 8).t().contiguous()
    for cosine in (False, True):
        arrays = build_device_tables(keys, sample, dims, centroids=12, iterations=1, seed=0, cosine=cosine)
        assert arrays["scores"].shape == (2, 8, 12, 90)
        slices = keys[..., dims.to(DEVICE)]
        if cosine:
            slices = torch.nn.functional.normalize(slices, dim=-1)
        products = torch.einsum("hnmb,hmcb->hmcn", slices, arrays["centroids"])
        stored = arrays["scores"].float() * arrays["scales"][..., None, None]
        assert float((stored - products).abs().max()) <= 0.51 * float(arrays["scales"].max())
        assert int(arrays["scores"].int().abs().max()) == 127


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
    from index_store.kmeans.kmeans import spherical_kmeans

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


def _spread(points: Tensor, assignment: Tensor) -> float:
    """Squared distances to the clusters' means."""
    clusters = int(assignment.max()) + 1
    sums = torch.zeros(clusters, points.shape[1]).index_add_(0, assignment, points)
    means = sums / assignment.bincount(minlength=clusters).clamp(min=1)[:, None]
    return float((points - means[assignment]).square().sum())
