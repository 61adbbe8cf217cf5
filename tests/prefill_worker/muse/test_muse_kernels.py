"""Every kernel of MuSe equals its eager reference, on sizes that fit no tile.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from prefill_worker.muse import MuseSettings, muse_attention
from prefill_worker.muse.backend import EAGER, kernels
from prefill_worker.muse.kernels.clustering import draw_seeds, move_centroids, place_points
from prefill_worker.muse.kernels.clusters import STRETCH, BoundedClusters
from prefill_worker.muse.kernels.clusters import draw_seeds_reference as seeds_reference
from prefill_worker.muse.kernels.clusters import move_centroids_reference as move_reference
from prefill_worker.muse.kernels.clusters import place_points_reference as place_reference
from prefill_worker.muse.kernels.reference import KeyValueMoments, QueryGrads, Summaries
from tests.prefill_worker.muse.muse_points import error, make_points

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of every stage, as the stages before it leave them."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    query_clusters: BoundedClusters
    key_clusters: BoundedClusters
    summaries: Summaries
    moments: KeyValueMoments
    dipoles: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    scale: float
    group: int
    tolerance: float


def make_problem(dtype: torch.dtype, dim: int, group: int, clusters: int) -> Problem:
    """Views into longer tensors, with other strides for queries than for keys and values."""
    heads, ranges, queries, keys = 1, 2, 53, 70
    long = make_points(1, heads * group, ranges * 2 * keys, dim, seed=1).to(DEVICE, dtype)
    query = long.view(1, -1, ranges, 2 * keys, dim)[:, :, :, keys : keys + queries]
    pairs = make_points(1, ranges * keys, 2 * heads, dim, seed=2).to(DEVICE, dtype)
    key, value = pairs.view(1, ranges, keys, heads, 2, dim).permute(4, 0, 3, 1, 2, 5)
    of_queries = EAGER.find_clusters(query, clusters - 1, 1.5, 1, 1)
    of_keys = EAGER.find_clusters(key, clusters, 1.5, 1, 0)
    scale = dim**-0.5
    summaries = EAGER.summarise_keys(of_queries.centroids, key, value, of_keys, scale, group)
    moments = EAGER.covary_members(key, value, of_keys)
    dipoles = EAGER.mix_dipoles(summaries.logits, moments.covariances, group, ranges)
    out = make_points(1, heads * group, ranges * queries, dim, seed=3).to(DEVICE, dtype)
    lse = make_points(1, heads * group, ranges * queries, 1, seed=4).to(DEVICE)[..., 0] + 3
    grad = make_points(1, heads * group, ranges * queries, dim, seed=5).to(DEVICE, dtype)
    out, lse, grad = (x.view(1, heads * group, ranges, queries, *x.shape[3:]) for x in (out, lse, grad))
    EAGER.attend_summaries(query, of_queries, summaries, dipoles, scale, out, lse, True)
    clusters_ = of_queries, of_keys
    rest = summaries, moments, dipoles, out, lse, grad, scale, group, TOLERANCE[dtype]
    return Problem(query, key, value, *clusters_, *rest)


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, 16, 2, 5),
        (torch.float16, 64, 1, 17),
        pytest.param((torch.float32, 128, 1, 64), marks=ON_GPU),
        pytest.param((torch.bfloat16, 128, 4, 33), marks=ON_GPU),
        pytest.param((torch.bfloat16, 64, 1, 128), marks=ON_GPU),
    ],
    ids=str,
)
def problem(request: pytest.FixtureRequest) -> Problem:
    return make_problem(*request.param)


def assert_alike(found: object, expected: object, tolerance: float) -> None:
    """Tensors by their norms, dataclasses field by field."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert error(found, expected) < tolerance
    elif expected is None:
        assert found is None
    else:
        for name in expected.__slots__:  # type: ignore[attr-defined]
            assert_alike(getattr(found, name), getattr(expected, name), tolerance)


def test_summaries(problem: Problem) -> None:
    p = problem
    arguments = (p.query_clusters.centroids, p.keys, p.values, p.key_clusters, p.scale, p.group)
    assert_alike(kernels().summarise_keys(*arguments), EAGER.summarise_keys(*arguments), p.tolerance)


def test_moments_and_their_mixture(problem: Problem) -> None:
    p = problem
    assert_alike(kernels().covary_members(p.keys, p.values, p.key_clusters), p.moments, p.tolerance)
    arguments = (p.summaries.logits, p.moments.covariances, p.group, p.keys.shape[2])
    assert_alike(kernels().mix_dipoles(*arguments), p.dipoles, p.tolerance)
    grad = p.dipoles.flip(1).contiguous()
    logits, covariances, *rest = arguments
    found, expected = (
        backend.mix_dipoles_backward(logits, covariances, grad, *rest) for backend in (kernels(), EAGER)
    )
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, p.tolerance)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("dipole", [False, True])
def test_queries(problem: Problem, merge: bool, dipole: bool) -> None:
    p = problem
    results = []
    for backend in (kernels(), EAGER):
        out, lse = p.grad.clone(), p.lse.clone()
        backend.attend_summaries(
            p.queries,
            p.query_clusters,
            p.summaries,
            p.dipoles if dipole else None,
            p.scale,
            out,
            lse,
            merge,
        )
        results.append((out, lse))
    for one, other in zip(*results, strict=True):
        assert_alike(one, other, p.tolerance)


@pytest.mark.parametrize("dipole", [False, True])
def test_gradients_of_queries_and_summaries(problem: Problem, dipole: bool) -> None:
    p = problem
    dipoles = p.dipoles if dipole else None
    arguments = (p.queries, p.query_clusters, p.summaries, dipoles, p.scale, p.out, p.lse, p.grad)
    found, expected = (backend.attend_summaries_backward(*arguments) for backend in (kernels(), EAGER))
    assert_alike(found, expected, 2 * p.tolerance)


@pytest.mark.parametrize("dipole", [False, True])
def test_gradients_of_keys_and_values(problem: Problem, dipole: bool) -> None:
    p = problem
    grads: QueryGrads = EAGER.attend_summaries_backward(
        p.queries, p.query_clusters, p.summaries, p.dipoles, p.scale, p.out, p.lse, p.grad
    )
    rest = (p.moments, p.moments.covariances.flip(1).contiguous()) if dipole else (None, None)
    means = p.query_clusters.centroids
    found, expected = (
        backend.summarise_keys_backward(
            means, p.keys, p.values, p.key_clusters, p.summaries.logits, grads, p.scale, p.group, *rest
        )
        for backend in (kernels(), EAGER)
    )
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, 2 * p.tolerance)
    finished = []
    for backend in (kernels(), EAGER):
        finished.append(grads.queries.clone())
        backend.finish_queries(finished[-1], p.query_clusters, expected[2], grads.sums)
    assert_alike(*finished, p.tolerance)


@pytest.mark.parametrize(
    ("count", "clusters", "cap"),
    [(100, 7, 1.0), (65, 20, 1.5), (20, 20, 1.0), pytest.param(2 * STRETCH + 5, 64, 1.3, marks=ON_GPU)],
)
def test_clusters(count: int, clusters: int, cap: float) -> None:
    # Few centres, so that many points find their cluster full and choose again.
    points = make_points(1, 2, count, 16, spread=0.3, centres=3).to(DEVICE).unsqueeze(2)
    seeds = draw_seeds(points, clusters, 0)
    reference = seeds_reference(points, clusters, 0)  # in any order
    assert torch.equal(seeds.sort(1).values, reference.sort(1).values)
    moved = move_centroids(points, seeds)
    assert_alike(moved, move_reference(points, seeds), 1e-5)
    members, counts = place_points(points, moved, cap)
    expected, expected_counts = place_reference(points, moved, cap)
    assert torch.equal(counts, expected_counts)
    filled = torch.arange(members.shape[2], device=DEVICE) < counts[..., None]
    assert torch.equal(members[filled], expected[filled])
    found, eager = (backend.find_clusters(points, clusters, cap, 2, 3) for backend in (kernels(), EAGER))
    assert torch.equal(found.counts, eager.counts)
    assert_alike(found.centroids, eager.centroids, 1e-5)


def test_stretches_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.muse.kernels.clusters.STRETCH", 40)
    points = make_points(1, 1, 131, 16, spread=0.3, centres=3).to(DEVICE).unsqueeze(2)
    seeds = draw_seeds(points, 6, 0)
    members, counts = place_points(points, seeds, 1.1)
    expected, expected_counts = place_reference(points, seeds, 1.1)
    assert members.shape[2] == 3 * 9
    assert torch.equal(counts, expected_counts)
    filled = torch.arange(members.shape[2], device=DEVICE) < counts[..., None]
    assert torch.equal(members[filled], expected[filled])


@pytest.mark.parametrize("causal", [False, True])
def test_whole_attention(causal: bool) -> None:
    inputs = [make_points(1, heads, 41, 16, seed=seed).to(DEVICE) for seed, heads in enumerate((2, 1, 1))]
    results = []
    for backend in (kernels(), EAGER):
        leaves = [x.clone().requires_grad_() for x in inputs]
        settings = MuseSettings(clusters=4, block=14)
        out = muse_attention(*leaves, causal, enable_gqa=True, settings=settings, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert_alike(one, other, 1e-4)
