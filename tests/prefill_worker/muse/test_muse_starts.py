"""Indexes that start from the clusters of approximate attention.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import ClusterStarts, LayerSource, subspace_dims
from index_store.indexes.key_clusters.build import build_clusters, build_clusters_on_device
from index_store.indexes.key_clusters.parameters import ClusterParameters
from index_store.indexes.kmeans.kmeans import assign_clusters, spherical_kmeans
from index_store.indexes.query_tables.build import build_tables
from index_store.indexes.query_tables.build_triton import cluster_queries
from index_store.indexes.query_tables.parameters import TableParameters
from index_store.store.stored_context import QuerySample
from prefill_worker.muse.kernels.clusters import find_clusters_reference
from prefill_worker.muse.ranges import label_points
from tests.prefill_worker.muse.muse_points import make_points

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT, DIM = 400, 16


@pytest.fixture(scope="module")
def source() -> LayerSource:
    """Keys around 40 centres, queries around 20, with the clusters that MuSe finds; the last keys have none."""
    keys = make_points(1, 2, COUNT, DIM, spread=0.2, centres=40)[0]
    queries = make_points(1, 2, COUNT, DIM, seed=1, spread=0.2, centres=20)[0]
    labels = label_points(find_clusters_reference(keys[None, :, None], 8, 2.0, 3, 0), COUNT)
    labels[:, 360:] = -1
    means = find_clusters_reference(queries[None, :, None], 30, 2.0, 3, 0).centroids
    sample = QuerySample(queries[:, :, None], torch.arange(COUNT))
    return LayerSource(torch.stack([keys, keys], dim=2), sample, None, ClusterStarts(means, labels))


def spread(keys_HND: Tensor, assignment_HN: Tensor) -> float:
    total = 0.0
    for keys, own in zip(keys_HND, assignment_HN, strict=True):
        for cluster in own[own >= 0].unique():
            members = keys[own == cluster]
            total += float((members - members.mean(0)).square().sum())
    return total


def test_few_iterations_are_enough_for_keys(source: LayerSource) -> None:
    parameters = ClusterParameters(
        keys_per_cluster=10, metric="euclidean", block=192, iterations=4, moments="none", window=0, sinks=8
    )
    anew = LayerSource(source.kv_HN2D, source.queries)
    found, expected = (build_clusters(parameters, own, 0)["assignment"] for own in (source, anew))
    assert (found[:, :8] == -1).all()
    for own in (found, expected):  # blocks keep their clusters
        assert int(own[:, 8:200].max()) < int(own[:, 200:].min())
    # One iteration instead of four.
    assert spread(source.keys_HND, found) < 1.1 * spread(source.keys_HND, expected)
    first = LayerSource(
        source.kv_HN2D.to(DEVICE),
        source.queries,
        None,
        ClusterStarts(source.starts.queries_HXD, source.starts.clusters_HN.to(DEVICE))
        if source.starts
        else None,
    )
    on_device = build_clusters_on_device(parameters, first, 0)["assignment"].cpu()
    assert spread(source.keys_HND, on_device) < 1.15 * spread(source.keys_HND, expected)


def test_windowed_clusters_start_anew(source: LayerSource) -> None:
    parameters = ClusterParameters(
        keys_per_cluster=20, metric="cosine", block=0, iterations=2, moments="none", window=64, sinks=0
    )
    frequencies = torch.rand(DIM // 2, generator=torch.Generator().manual_seed(0))
    started, anew = (
        LayerSource(source.kv_HN2D, source.queries, frequencies, starts) for starts in (source.starts, None)
    )
    found, expected = (build_clusters(parameters, own, 0)["assignment"] for own in (started, anew))
    assert torch.equal(found, expected)


def test_tables_start_from_means_of_queries(source: LayerSource) -> None:
    parameters = TableParameters(
        layout="dense", subspaces=2, centroids=20, split="strided", scores="dot", alpha=0.2, iterations=4
    )
    anew = LayerSource(source.kv_HN2D, source.queries)
    found, expected = (build_tables(parameters, own, 0)["centroids"] for own in (source, anew))
    assert found.shape == expected.shape == (2, 2, 20, DIM // 2)
    assert not torch.equal(found, expected)
    assert nearness(source, found) > nearness(source, expected) - 0.02
    few = LayerSource(
        source.kv_HN2D,
        source.queries,
        None,
        ClusterStarts(torch.ones(2, 20, DIM), torch.zeros(2, COUNT, dtype=torch.int32)),
    )
    assert torch.equal(build_tables(parameters, few, 0)["centroids"], expected)
    dims = subspace_dims(parameters, DIM)
    rows = source.queries.queries_HPGD.flatten(1, 2).to(DEVICE)
    on_device = cluster_queries(rows, dims, 20, 1, 0, source.starts.queries_HXD.to(DEVICE)).cpu()
    assert nearness(source, on_device) > nearness(source, expected) - 0.02


def nearness(source: LayerSource, centroids_HMCB: Tensor) -> float:
    rows = source.queries.queries_HPGD.flatten(1, 2)
    slices = torch.stack([rows[..., 0::2], rows[..., 1::2]], dim=1)
    slices = torch.nn.functional.normalize(slices, dim=-1)
    return float((slices @ centroids_HMCB.transpose(2, 3)).amax(-1).mean())


def test_seeds_are_taken_from_the_order() -> None:
    points = torch.cat([torch.zeros(90, 4), torch.eye(4).repeat_interleave(2, 0) * 10])
    points += 0.01 * torch.randn(points.shape, generator=torch.Generator().manual_seed(0))
    # The few points apart come first, and often enough: each of the first four seeds is one of them.
    order = torch.cat([torch.arange(90, 98), torch.arange(90)])
    found = assign_clusters(points, 49, 1, 0, "euclidean", order)
    assert len(set(found[90:].tolist())) >= 4
    assert not set(found[90:].tolist()) & set(found[:90].tolist())


def test_means_seed_directions() -> None:
    directions = torch.eye(6).repeat_interleave(10, 0)
    found = spherical_kmeans(directions, 6, 1, 0, starts_XD=torch.cat([torch.eye(6), 2 * torch.eye(6)]))
    assert torch.allclose((found @ torch.eye(6)).amax(0), torch.ones(6))
