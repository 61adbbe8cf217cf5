"""MuSe while a model reads a context block by block: the past is attended through clusters, the block itself exactly.

A pass carries one block of tokens. Its queries are clustered once, and attend to the ranges of the causal tree before
it (`tree.earlier_ranges`), each of a power of two of blocks. A range's keys are clustered when its first query comes,
and the clusters are kept until the last one has passed. (In `attention.attend_forward`, which has all queries at once,
those of a whole range are clustered together.)

Shape legend: E KV heads, G query heads per KV head, H = E*G, T queries of a block, N tokens of the context, X means of
queries, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import attend_to_themselves
from index_store.errors import InvalidArgumentError
from index_store.store.description.context_id import ModelIdentity
from prefill_worker.muse.backend import KERNEL_DIMS, backend_for
from prefill_worker.muse.kernels.clusters import STRETCH, BoundedClusters
from prefill_worker.muse.kernels.reference import KeyValueMoments
from prefill_worker.muse.settings import MuseSettings
from prefill_worker.muse.tree import earlier_ranges

ReadRange = Callable[[int, int], Tensor]
"""Keys and values [E, n, 2, D] of tokens first..end-1, on the device."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Clusters of the keys of one range, and their covariances where the dipole counts."""

    clusters: BoundedClusters
    moments: KeyValueMoments | None


def planned_bytes(settings: MuseSettings, model: ModelIdentity, tokens: int, dtype: torch.dtype) -> int:
    """Memory beside keys and values that a `RangeAttention` to so many tokens takes at most; dtype: of the queries.

    Every layer keeps members and covariances of its ranges' clusters. One pass makes summaries and dipoles of one
    range. Nothing for a context of one block, which is attended to exactly.
    """
    levels = ((tokens - 1) // settings.block).bit_length()  # at most so many ranges are before a block
    if levels == 0:
        return 0
    item, dim, clusters = dtype.itemsize, model.head_dim, settings.clusters
    square = dim * dim * item if settings.dipole else 0
    places = math.ceil(settings.cap * tokens) + clusters * (
        tokens // STRETCH + levels
    )  # with what is rounded up
    of_ranges = model.kv_heads * (4 * places + levels * clusters * (square + 3 * dim * item))
    one_pass = model.query_heads * settings.clusters_of_queries * (2 * clusters * dim * item + square)
    new_range = model.kv_heads * clusters * square
    return len(model.full_layers) * of_ranges + one_pass + new_range


class RangeAttention:
    """Approximate attention to the past of every layer of one context."""

    def __init__(self, settings: MuseSettings, layers: int) -> None:
        self.settings = settings
        self._ranges: list[dict[tuple[int, int], _Range]] = [{} for _ in range(layers)]

    def attend(
        self, layer: int, queries_EGTD: Tensor, start: int, chunk_ET2D: Tensor, read: ReadRange
    ) -> AttentionState:
        """Attention of a block's queries to all earlier tokens and, causally, to themselves: out [E, G, T, D].

        queries: after RoPE, not scaled. start: position of the first, a multiple of the settings' block. chunk: their
        own keys and values, as stored. Raises ValueError for a pass that is not one block, and InvalidArgumentError
        on a device for heads that the kernels do not take.
        """
        block = self.settings.block
        kv_heads, group, count, dim = queries_EGTD.shape
        if start % block or count > block:
            raise ValueError(f"a pass of {count} tokens from {start} on is not one block of {block}")
        if queries_EGTD.is_cuda and dim not in KERNEL_DIMS:
            raise InvalidArgumentError(
                f"the model's heads have {dim} dimensions; --attention muse takes {KERNEL_DIMS} on a GPU"
            )
        exact = attend_to_themselves(queries_EGTD, chunk_ET2D, cudnn=True)
        ranges = earlier_ranges(start // block)
        heads = (1, kv_heads * group, count)
        lse = exact.lse.view(heads).to(torch.promote_types(exact.lse.dtype, torch.float32)).contiguous()
        if ranges:
            query = queries_EGTD.reshape(*heads, dim)
            self._attend_ranges(layer, query, ranges, read, exact.out.view(*heads, dim), lse)
        return AttentionState(exact.out, lse.view(kv_heads, group, count))

    def _attend_ranges(
        self,
        layer: int,
        query: Tensor,
        ranges: list[tuple[int, int]],
        read: ReadRange,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        settings, backend = self.settings, backend_for(query)
        queries = query.unsqueeze(2)
        cap, iterations, seed = settings.cap, settings.iterations, settings.seed
        own = backend.find_clusters(queries, settings.clusters_of_queries, cap, iterations, seed + 1)
        known = self._ranges[layer]
        scale = 1 / math.sqrt(query.shape[-1])
        for first, blocks in ranges:
            kv = read(first * settings.block, (first + blocks) * settings.block).to(query.dtype)
            keys, values = (kv[None, :, :, part].unsqueeze(2) for part in (0, 1))
            group = query.shape[1] // keys.shape[1]
            if (first, blocks) not in known:
                clusters = backend.find_clusters(keys, settings.clusters, cap, iterations, seed)
                moments = backend.covary_members(keys, values, clusters) if settings.dipole else None
                known[first, blocks] = _Range(clusters, moments)
            of_range = known[first, blocks]
            summaries = backend.summarise_keys(own.centroids, keys, values, of_range.clusters, scale, group)
            dipoles = None
            if of_range.moments is not None:
                dipoles = backend.mix_dipoles(summaries.logits, of_range.moments.covariances, group, 1)
            into = out.unsqueeze(2), lse.unsqueeze(2)
            backend.attend_summaries(queries, own, summaries, dipoles, scale, *into, True)
        for key in known.keys() - set(ranges):
            del known[key]

    def release(self, layer: int) -> None:
        """Forgets a layer."""
        self._ranges[layer].clear()
