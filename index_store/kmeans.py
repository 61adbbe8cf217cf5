"""k-means on the CPU, by faiss."""

from __future__ import annotations

import faiss
import numpy as np
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError


def spherical_kmeans(points_PD: Tensor, clusters: int, iterations: int, seed: int) -> Tensor:
    """Unit-length centroids [clusters, D] float32 of the directions of P points [P, D].

    k-means++ seeds, all points used (faiss would subsample to 256 a centroid). Zero vectors have no direction
    and are left out. With fewer points than clusters every point is a centroid and the last one repeats.
    Raises InvalidArgumentError when no point is left, one is not finite, or a parameter is below 1.
    """
    if clusters < 1 or iterations < 1:
        raise InvalidArgumentError(
            f"k-means needs at least 1 cluster and 1 iteration, got {clusters} and {iterations}"
        )
    if not bool(torch.isfinite(points_PD).all()):
        raise InvalidArgumentError("k-means got NaN or infinity; the model or its dtype overflowed")
    norms = points_PD.float().norm(dim=-1, keepdim=True)
    directions = (points_PD.float() / norms)[norms[:, 0] > 0]
    if len(directions) == 0:
        raise InvalidArgumentError("k-means got no point with a direction: all are zero")
    directions = directions.contiguous()
    count, dim = directions.shape
    if count <= clusters:
        return torch.cat([directions, directions[-1:].expand(clusters - count, dim)])
    parameters = faiss.ClusteringParameters()
    parameters.niter = iterations
    parameters.spherical = True
    parameters.seed = seed
    parameters.init_method = faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS
    parameters.min_points_per_centroid = 1
    parameters.max_points_per_centroid = count
    clustering = faiss.Clustering(dim, clusters, parameters)
    clustering.train(directions.numpy(), faiss.IndexFlatIP(dim))
    centroids = faiss.vector_to_array(clustering.centroids).reshape(clusters, dim).astype(np.float32)
    return torch.nn.functional.normalize(torch.from_numpy(centroids), dim=-1)
