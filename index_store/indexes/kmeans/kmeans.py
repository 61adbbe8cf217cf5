"""k-means: on the CPU by faiss, of points on a device by kernels."""

from __future__ import annotations

import faiss
import numpy as np
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.first_centroids import METRICS


def spherical_kmeans(points_PD: Tensor, clusters: int, iterations: int, seed: int) -> Tensor:
    """Unit-length centroids [clusters, D] float32 of the directions of P points [P, D].

    k-means++ seeds, all points used (faiss would subsample to 256 a centroid). Zero vectors have no direction
    and are left out. With fewer points than clusters every point is a centroid and the last one repeats.
    Raises InvalidArgumentError when no point is left, one is not finite, or a parameter is below 1.
    """
    _check(points_PD, clusters, iterations)
    norms = points_PD.float().norm(dim=-1, keepdim=True)
    directions = (points_PD.float() / norms)[norms[:, 0] > 0]
    if len(directions) == 0:
        raise InvalidArgumentError("k-means got no point with a direction: all are zero")
    if points_PD.is_cuda:
        from index_store.indexes.kmeans.kmeans_triton import spherical_kmeans_batch

        return spherical_kmeans_batch(directions[None], clusters, iterations, seed)[0]
    directions = directions.contiguous()
    count, dim = directions.shape
    if count <= clusters:
        return torch.cat([directions, directions[-1:].expand(clusters - count, dim)])
    parameters = _parameters(count, iterations, seed, spherical=True)
    parameters.init_method = faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS
    clustering = faiss.Clustering(dim, clusters, parameters)
    clustering.train(directions.numpy(), faiss.IndexFlatIP(dim))
    centroids = faiss.vector_to_array(clustering.centroids).reshape(clusters, dim).astype(np.float32)
    return torch.nn.functional.normalize(torch.from_numpy(centroids), dim=-1)


def assign_clusters(points_PD: Tensor, clusters: int, iterations: int, seed: int, metric: str) -> Tensor:
    """The cluster, [P] int64 from 0 to clusters - 1, that k-means puts each of P points [P, D] into.

    Random seeds, all points used. `cosine` clusters the points' directions (a zero vector, which has none, lands in
    any cluster), `euclidean` the points themselves. Some clusters may stay empty; with no more points than clusters,
    every point has its own. Raises InvalidArgumentError when a point is not finite, a parameter is below 1 or the
    metric is unknown.
    """
    _check(points_PD, clusters, iterations)
    if metric not in METRICS:
        raise InvalidArgumentError(f"k-means: metric is {metric!r}, expected one of {', '.join(METRICS)}")
    count, dim = points_PD.shape
    if count <= clusters:
        return torch.arange(count, device=points_PD.device)
    if points_PD.is_cuda:
        from index_store.indexes.kmeans.kmeans_triton import find_clusters

        blocks = [(0, count, 0, clusters)]
        return find_clusters(points_PD[None], blocks, iterations, metric, seed)[0][0].long()
    points = points_PD.float()
    cosine = metric == "cosine"
    if cosine:
        points = torch.nn.functional.normalize(points, dim=-1)
    vectors = points.contiguous().numpy()
    clustering = faiss.Clustering(dim, clusters, _parameters(count, iterations, seed, spherical=cosine))
    nearest = faiss.IndexFlatIP(dim) if cosine else faiss.IndexFlatL2(dim)
    clustering.train(vectors, nearest)
    return torch.from_numpy(nearest.search(vectors, 1)[1][:, 0])


def _check(points_PD: Tensor, clusters: int, iterations: int) -> None:
    if clusters < 1 or iterations < 1:
        raise InvalidArgumentError(
            f"k-means needs at least 1 cluster and 1 iteration, got {clusters} and {iterations}"
        )
    if not bool(torch.isfinite(points_PD).all()):
        raise InvalidArgumentError("k-means got NaN or infinity; the model or its dtype overflowed")


def _parameters(count: int, iterations: int, seed: int, spherical: bool) -> faiss.ClusteringParameters:
    parameters = faiss.ClusteringParameters()
    parameters.niter = iterations
    parameters.spherical = spherical
    parameters.seed = seed
    parameters.min_points_per_centroid = 1
    parameters.max_points_per_centroid = count
    return parameters
