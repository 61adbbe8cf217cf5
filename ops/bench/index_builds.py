"""How long indexes of one layer take to build on a GPU; a part of `clusters_gpu`.

Keys scatter around centres, within blocks of 8192 tokens, and are clustered by the product's own k-means on the device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_timing import event_ms
from torch import Tensor

from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.build_triton import build_device_clusters
from index_store.indexes.query_tables.build_triton import build_device_tables

KV_HEADS, GROUP, HEAD_DIM, DTYPE = 8, 4, 128, torch.bfloat16
SINKS, RECENT, PER_CLUSTER, BLOCK = 8, 128, 16, 8192
SAMPLE = 1024
"""Sampled positions whose queries are clustered for tables."""


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


def gather_around_centres(kv_HN2D: Tensor) -> None:
    heads, length = kv_HN2D.shape[:2]
    for first in range(0, length, BLOCK):
        block = kv_HN2D[:, first : first + BLOCK, 0]
        centres = torch.randn(heads, BLOCK // PER_CLUSTER, HEAD_DIM, device="cuda")
        chosen = torch.randint(0, centres.shape[1], block.shape[:2], device="cuda")
        moved = centres.gather(1, chosen[..., None].expand(-1, -1, HEAD_DIM))
        block.copy_(0.8 * moved + 0.6 * block.float())


def build_figures(length: int) -> list[dict[str, Any]]:
    """Milliseconds to build both kinds of index for one layer from its keys, values and sampled queries."""
    kv = torch.empty(KV_HEADS, length, 2, HEAD_DIM, dtype=DTYPE, device="cuda").normal_()
    gather_around_centres(kv)
    sample = torch.randn(KV_HEADS, SAMPLE * GROUP, HEAD_DIM, device="cuda")
    blocks = divide_keys(length, PER_CLUSTER, BLOCK, SINKS)

    def clusters() -> dict[str, Tensor]:
        return build_device_clusters(kv, blocks, metric="cosine", iterations=10, moments="diagonal", seed=0)

    def tables(subspaces: int, centroids: int) -> dict[str, Tensor]:
        dims = torch.arange(HEAD_DIM).view(-1, subspaces).t().contiguous()
        return build_device_tables(kv[:, :, 0], sample, dims, centroids=centroids, iterations=10, seed=0)

    def both(subspaces: int, centroids: int) -> None:
        clusters()
        tables(subspaces, centroids)

    _check_clusters(kv, clusters())
    _check_tables(kv, tables(16, 32))
    clusters_ms = _median_ms(clusters)
    return [
        {
            "bench": "clusters_gpu",
            "figure": f"build, tables {subspaces}x{centroids} and clusters",
            "context": length,
            "queries": SAMPLE * GROUP,
            "clusters_ms": round(clusters_ms, 2),
            "tables_ms": round(_median_ms(partial(tables, subspaces, centroids)), 2),
            "both_ms": round(_median_ms(partial(both, subspaces, centroids)), 2),
        }
        for subspaces, centroids in ((8, 64), (16, 32))
    ]


def _median_ms(work: Callable[[], object]) -> float:
    """Of a whole build, launches from Python included."""
    for _ in range(2):
        work()
    return statistics.median(event_ms(work) for _ in range(7))


def _check_clusters(kv: Tensor, arrays: dict[str, Tensor]) -> None:
    """Keys are in clusters about as near as any, and sums are those of the members."""
    keys = kv[0, SINKS : SINKS + BLOCK, 0].double()
    own = arrays["assignment"][0, SINKS : SINKS + BLOCK].long()
    means = arrays["means"][0, : BLOCK // PER_CLUSTER].double()
    products = keys @ torch.nn.functional.normalize(means, dim=-1).t()
    # Means are not quite the centroids of the last comparison, which are means of directions.
    gap = float(((products.amax(1) - products.gather(1, own[:, None])[:, 0]) / keys.norm(dim=-1)).mean())
    if not gap < 0.02:
        raise CheckFailedError(f"keys are {gap:.3f} farther from their cluster than from the nearest")
    named = arrays["assignment"][0] >= 0
    sums = torch.zeros(arrays["means"].shape[1], HEAD_DIM, dtype=torch.float64, device="cuda")
    sums.index_add_(0, arrays["assignment"][0][named].long(), kv[0, named, 1].double())
    error = float((sums - arrays["value_sums"][0]).norm() / sums.norm())
    if not error < 1e-5:
        raise CheckFailedError(f"sums of values are off by {error:.1e}")


def _check_tables(kv: Tensor, arrays: dict[str, Tensor]) -> None:
    subspaces = arrays["centroids"].shape[1]
    slices = kv[0, :4096, 0].double().view(-1, HEAD_DIM // subspaces, subspaces)
    products = torch.einsum("nbm,mcb->mcn", slices, arrays["centroids"][0].double())
    units = products / arrays["scales"][0, :, None, None]
    error = float((units - arrays["scores"][0, ..., :4096]).abs().max())
    if not error < 0.51:
        raise CheckFailedError(f"scores are off by {error:.3f} units, expected 0.5 at most")
