"""Host kernel of a cluster tree's second level: products of the queries with the fine means of expanded clusters only.

Shape legend: H KV heads, T query positions, G group heads, C fine clusters, K coarse clusters, d head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from index_store.compiled.launch import B1, F4, I4, launch, on_host, task_loop

# Coarse clusters per task: enough means to outweigh starting a task, few enough to occupy every core.
_COARSE_PER_TASK = 16


def search_tree(
    queries_HTGD: Tensor,
    means_HCD: Tensor,
    counts_HC: Tensor,
    coarse_offsets_HK: Tensor,
    expanded_HTK: Tensor,
) -> Tensor:
    """[H, T, G, C] float32: q . mean of fine clusters below expanded coarse ones, -inf for others and empty ones.

    queries_HTGD, means_HCD, counts_HC: float32. coarse_offsets_HK: [H, K + 1] int32, fine clusters of coarse cluster k
    are coarse_offsets[h, k]..coarse_offsets[h, k + 1] - 1. expanded_HTK: [H, T, K] bool. Other means are not read.
    """
    if not on_host(queries_HTGD):
        return search_tree_reference(queries_HTGD, means_HCD, counts_HC, coarse_offsets_HK, expanded_HTK)
    logits = torch.full((*queries_HTGD.shape[:3], means_HCD.shape[1]), -torch.inf, device="cpu")
    if logits.numel() > 0:
        launch(
            _search_tree,
            queries_HTGD.shape[0] * queries_HTGD.shape[1] * -(-expanded_HTK.shape[2] // _COARSE_PER_TASK),
            queries_HTGD.contiguous().numpy(),
            means_HCD.numpy(),
            counts_HC.numpy(),
            coarse_offsets_HK.numpy(),
            expanded_HTK.contiguous().numpy(),
            logits.numpy(),
        )
    return logits


def search_tree_reference(
    queries_HTGD: Tensor,
    means_HCD: Tensor,
    counts_HC: Tensor,
    coarse_offsets_HK: Tensor,
    expanded_HTK: Tensor,
) -> Tensor:
    """The same from the products with all means, on any device."""
    products = torch.einsum("htgd,hcd->htgc", queries_HTGD, means_HCD)
    fine = torch.arange(means_HCD.shape[1], dtype=torch.int32, device=means_HCD.device)
    fine = fine.expand(len(means_HCD), -1)
    parents_HC = torch.searchsorted(coarse_offsets_HK.contiguous(), fine.contiguous(), right=True) - 1
    alive_HTC = expanded_HTK.gather(2, parents_HC[:, None].expand(-1, expanded_HTK.shape[1], -1))
    alive_HTC = alive_HTC & (counts_HC > 0)[:, None]
    return products.masked_fill_(~alive_HTC[:, :, None], -torch.inf)


@task_loop("f4x4 f4x3 f4x2 i4x2 b1x3 f4x4", fastmath={"reassoc", "contract"})
def _search_tree(
    task: int, queries: F4, means: F4, counts: F4, coarse_offsets: I4, expanded: B1, logits: F4
) -> None:
    _, positions, group, dim = queries.shape
    coarse = expanded.shape[2]
    parts = (coarse + _COARSE_PER_TASK - 1) // _COARSE_PER_TASK
    head = task // (positions * parts)
    position = task // parts % positions
    first = task % parts * _COARSE_PER_TASK
    for k in range(first, min(coarse, first + _COARSE_PER_TASK)):
        if not expanded[head, position, k]:
            continue
        for c in range(coarse_offsets[head, k], coarse_offsets[head, k + 1]):
            if counts[head, c] == 0:
                continue
            for g in range(group):
                product = np.float32(0)
                for i in range(dim):
                    product += queries[head, position, g, i] * means[head, c, i]
                logits[head, position, g, c] = product
