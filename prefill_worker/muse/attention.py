"""Multipole Semantic Attention as a drop-in for `scaled_dot_product_attention`, forward and backward.

Shape legend: B batch, H query heads, E KV heads, N queries and M keys, D head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import attend_fused, attend_fused_backward
from index_store.errors import InvalidArgumentError
from prefill_worker.muse.backend import Backend, backend_for
from prefill_worker.muse.kernels.clusters import BoundedClusters
from prefill_worker.muse.kernels.reference import KeyValueMoments, Summaries
from prefill_worker.muse.settings import MuseSettings
from prefill_worker.muse.tree import Pairs, divide_triangle


@dataclass(frozen=True, slots=True)
class ApproximatedPart:
    """What stays of an approximated part for the backward pass."""

    pairs: Pairs
    query_clusters: BoundedClusters
    key_clusters: BoundedClusters
    summaries: Summaries
    moments: KeyValueMoments | None
    dipoles: Tensor | None


def muse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    settings: MuseSettings | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of queries [B, H, N, D] to keys and values [B, E, M, D], approximated by clusters: [B, H, N, D].

    The convention is that of `torch.nn.functional.scaled_dot_product_attention`: scale is 1/sqrt(D) when None, and
    enable_gqa lets H be a multiple of E. Without is_causal all of it is approximated, and settings.block is ignored;
    with it, blocks on the diagonal are exact. Which points make a cluster counts as constant for the gradient; through
    the clusters' means it flows, once: there are no second derivatives. Nothing waits for the host. backend: for tests;
    None for the device's.

    Raises InvalidArgumentError for shapes or dtypes that do not go together.
    """
    _check(query, key, value, is_causal, enable_gqa)
    settings = settings or MuseSettings()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    backend = backend or backend_for(query)
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out: Tensor = _Muse.apply(query, key, value, scale, is_causal, settings, backend)  # type: ignore[no-untyped-call]
    return out


def attend_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    is_causal: bool,
    settings: MuseSettings,
    backend: Backend,
) -> tuple[Tensor, Tensor, list[ApproximatedPart]]:
    """Out [B, H, N, D], log-sum-exp [B, H, N], and the approximated parts."""
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = torch.empty(query.shape[:-1], dtype=wide, device=query.device)
    if not is_causal:
        pairs = [Pairs(0, 0, 1, query.shape[2])]
    else:
        pairs = list(divide_triangle(query.shape[2], settings.block))
        for block in _blocks(query.shape[2], settings.block):
            own_key, own_value = (_spread(x[:, :, block], group) for x in (key, value))
            state = attend_fused(query[:, :, block], own_key, own_value, causal=True, scale=scale, cudnn=True)
            out[:, :, block], lse[:, :, block] = state.out, state.lse
    parts = []
    for number, own in enumerate(pairs):
        queries = own.of_queries(query)
        keys, values = ((own.keys(x) if is_causal else x.unsqueeze(2)) for x in (key, value))
        seed = settings.seed + 2 * number
        part = summarise(queries, keys, values, own, scale, settings, seed, backend)
        into = own.of_queries(out), own.of_queries(lse)
        backend.attend_summaries(
            queries, part.query_clusters, part.summaries, part.dipoles, scale, *into, is_causal
        )
        parts.append(part)
    return out, lse, parts


def summarise(
    queries_BHRND: Tensor,
    keys_BERMD: Tensor,
    values_BERMD: Tensor,
    pairs: Pairs,
    scale: float,
    settings: MuseSettings,
    seed: int,
    backend: Backend,
) -> ApproximatedPart:
    """Clusters queries and keys, and takes the first stage and the dipoles."""
    group, ranges = queries_BHRND.shape[1] // keys_BERMD.shape[1], keys_BERMD.shape[2]
    cap, iterations = settings.cap, settings.iterations
    key_clusters = backend.find_clusters(keys_BERMD, settings.clusters, cap, iterations, seed)
    query_clusters = backend.find_clusters(
        queries_BHRND, settings.clusters_of_queries, cap, iterations, seed + 1
    )
    summaries = backend.summarise_keys(
        query_clusters.centroids, keys_BERMD, values_BERMD, key_clusters, scale, group
    )
    if not settings.dipole:
        return ApproximatedPart(pairs, query_clusters, key_clusters, summaries, None, None)
    moments = backend.covary_members(keys_BERMD, values_BERMD, key_clusters)
    dipoles = backend.mix_dipoles(summaries.logits, moments.covariances, group, ranges)
    return ApproximatedPart(pairs, query_clusters, key_clusters, summaries, moments, dipoles)


class _Muse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        is_causal: bool,
        settings: MuseSettings,
        backend: Backend,
    ) -> Tensor:
        out, lse, parts = attend_forward(query, key, value, scale, is_causal, settings, backend)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = scale, is_causal, settings.block, backend, parts
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        scale, is_causal, block, backend, parts = ctx.rest
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = _Gradients(query, key, value, out, lse, grad, scale)
        if is_causal:
            grads.add_blocks(block)
        for part in parts:
            grads.add_part(part, is_causal, backend)
        return grads.query, grads.key, grads.value, None, None, None, None


class _Gradients:
    """The sum of the gradients through all parts."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, grad: Tensor, scale: float
    ) -> None:
        self._inputs = query, key, value
        self._out, self._lse, self._grad, self._scale = out, lse, grad, scale
        self._group = query.shape[1] // key.shape[1]
        self.query, self.key, self.value = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
        )

    def add_blocks(self, block: int) -> None:
        query, key, value = self._inputs
        for own in _blocks(query.shape[2], block):
            own_key, own_value = (_spread(x[:, :, own], self._group) for x in (key, value))
            of_query, of_key, of_value = attend_fused_backward(
                self._grad[:, :, own],
                query[:, :, own],
                own_key,
                own_value,
                AttentionState(self._out[:, :, own], self._lse[:, :, own]),
                self._scale,
            )
            self.query[:, :, own] = of_query
            self.key[:, :, own] = _gather_heads(of_key, self._group)
            self.value[:, :, own] = _gather_heads(of_value, self._group)

    def add_part(self, part: ApproximatedPart, is_causal: bool, backend: Backend) -> None:
        query, key, value = self._inputs
        pairs, scale, group = part.pairs, self._scale, self._group
        keys, values = ((pairs.keys(x) if is_causal else x.unsqueeze(2)) for x in (key, value))
        grads = backend.attend_summaries_backward(
            pairs.of_queries(query),
            part.query_clusters,
            part.summaries,
            part.dipoles,
            scale,
            pairs.of_queries(self._out),
            pairs.of_queries(self._lse),
            pairs.of_queries(self._grad),
        )
        by_covariance = None
        if part.moments is not None and grads.dipoles is not None:
            by_logit, by_covariance = backend.mix_dipoles_backward(
                part.summaries.logits, part.moments.covariances, grads.dipoles, group, keys.shape[2]
            )
            grads.deltas.sub_(by_logit)
            split = by_covariance.view(*query.shape[:2], keys.shape[2], *by_covariance.shape[1:])
            by_covariance = _gather_heads(split, group).flatten(0, 2)
        by_key, by_value, by_mean = backend.summarise_keys_backward(
            part.query_clusters.centroids,
            keys,
            values,
            part.key_clusters,
            part.summaries.logits,
            grads,
            scale,
            group,
            part.moments,
            by_covariance,
        )
        backend.finish_queries(grads.queries, part.query_clusters, by_mean, grads.sums)
        by_key, by_value = _gather_heads(by_key, group), _gather_heads(by_value, group)
        if not is_causal:  # the only part
            self.query, self.key, self.value = (x.squeeze(2) for x in (grads.queries, by_key, by_value))
            return
        pairs.of_queries(self.query).add_(grads.queries)
        pairs.keys(self.key).add_(by_key)
        pairs.keys(self.value).add_(by_value)


def _blocks(count: int, block: int) -> list[slice]:
    return [slice(first, min(first + block, count)) for first in range(0, count, block)]


def _spread(x_BETD: Tensor, group: int) -> Tensor:
    return x_BETD if group == 1 else x_BETD.repeat_interleave(group, dim=1)


def _gather_heads(x_BHX: Tensor, group: int) -> Tensor:
    """Sums over the query heads of each KV head."""
    return x_BHX if group == 1 else x_BHX.view(x_BHX.shape[0], -1, group, *x_BHX.shape[2:]).sum(2)


def _check(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, enable_gqa: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or 0 in query.shape + key.shape:
        raise InvalidArgumentError(
            f"{shapes}: expected [batch, heads, tokens, dim], keys and values alike, none empty"
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise InvalidArgumentError(f"{shapes}: batch and head dim must agree")
    if query.shape[1] % key.shape[1] or (query.shape[1] != key.shape[1] and not enable_gqa):
        raise InvalidArgumentError(
            f"{shapes}: expected as many query heads as key heads, or a multiple of them with enable_gqa"
        )
    if is_causal and query.shape[2] != key.shape[2]:
        raise InvalidArgumentError(f"{shapes}: causal attention needs as many queries as keys")
    if len({query.dtype, key.dtype, value.dtype}) > 1 or not query.is_floating_point():
        raise InvalidArgumentError(
            f"query, key and value are {query.dtype}, {key.dtype} and {value.dtype}, expected one float dtype"
        )
