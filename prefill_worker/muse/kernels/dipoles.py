"""Covariances of the key clusters, and their mixture for each query cluster; forward and backward.

Shape legend: B batch, E KV heads, R ranges, M keys of a range, Y = B*H*R, Z = B*E*R, C query clusters, K key clusters,
U places of a cluster, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_worker.muse.kernels.clusters import BoundedClusters
from prefill_worker.muse.kernels.layout import (
    Constants,
    key_problem,
    load_rows,
    members_from,
    rows_at_a_time,
    rows_in,
    rows_of,
)
from prefill_worker.muse.kernels.reference import KeyValueMoments

_COLUMNS = 128  # entries of a covariance that a program mixes at a time


def covary_members(keys_BERMD: Tensor, values_BERMD: Tensor, clusters: BoundedClusters) -> KeyValueMoments:
    """`prefill_worker.muse.kernels.reference.covary_members_reference`."""
    heads, ranges, _, dim = keys_BERMD.shape[1:]
    problems, key_clusters, room = clusters.members.shape
    dtype, device = keys_BERMD.dtype, keys_BERMD.device
    moments = KeyValueMoments(
        torch.empty(problems, key_clusters, dim, dim, dtype=dtype, device=device),
        torch.empty(problems, key_clusters, dim, dtype=dtype, device=device),
        torch.empty(problems, key_clusters, dim, dtype=dtype, device=device),
    )
    covary_kernel[(problems * key_clusters,)](
        rows_in(keys_BERMD),
        rows_in(values_BERMD),
        clusters,
        moments,
        heads,
        ranges,
        key_clusters,
        room,
        K=Constants.of(keys_BERMD, rows_at_a_time(room, 64 if dtype != torch.float32 else 32)),
        num_warps=4 if dim <= 64 else 8,
        num_stages=2,
    )
    return moments


def mix_dipoles(logits_YCK: Tensor, covariances_ZKDD: Tensor, group: int, ranges: int) -> Tensor:
    """`prefill_worker.muse.kernels.reference.mix_dipoles_reference`."""
    problems, query_clusters, key_clusters = logits_YCK.shape
    dim = covariances_ZKDD.shape[-1]
    dipoles = torch.empty(
        problems, query_clusters, dim, dim, dtype=covariances_ZKDD.dtype, device=covariances_ZKDD.device
    )
    columns = min(_COLUMNS, dim * dim)
    mix_kernel[(problems * (dim * dim // columns),)](
        logits_YCK,
        covariances_ZKDD,
        dipoles,
        problems_per_batch(problems, covariances_ZKDD.shape[0], group, ranges),
        group,
        ranges,
        query_clusters,
        key_clusters,
        ENTRIES=dim * dim,
        COLUMNS=columns,
        K=Constants.of(covariances_ZKDD, means=query_clusters, clusters=key_clusters),
        num_warps=4,
    )
    return dipoles


def mix_dipoles_backward(
    logits_YCK: Tensor, covariances_ZKDD: Tensor, grad_YCDD: Tensor, group: int, ranges: int
) -> tuple[Tensor, Tensor]:
    """`prefill_worker.muse.kernels.reference.mix_dipoles_backward_reference`."""
    problems, query_clusters, key_clusters = logits_YCK.shape
    dim = covariances_ZKDD.shape[-1]
    by_logit = torch.empty_like(logits_YCK)
    by_covariance = torch.empty(
        problems, key_clusters, dim, dim, dtype=covariances_ZKDD.dtype, device=covariances_ZKDD.device
    )
    mix_backward_kernel[(problems,)](
        logits_YCK,
        covariances_ZKDD,
        grad_YCDD,
        by_logit,
        by_covariance,
        problems_per_batch(problems, covariances_ZKDD.shape[0], group, ranges),
        group,
        ranges,
        query_clusters,
        key_clusters,
        ENTRIES=dim * dim,
        COLUMNS=min(_COLUMNS if covariances_ZKDD.dtype != torch.float32 else 64, dim * dim),
        K=Constants.of(covariances_ZKDD, means=query_clusters, clusters=key_clusters),
        num_warps=8,
    )
    return by_logit, by_covariance


def problems_per_batch(problems: int, key_problems: int, group: int, ranges: int) -> int:
    """Query heads, as far as they matter to find the KV head: those of all batches taken together."""
    if problems != key_problems * group:
        raise ValueError(f"{problems} problems of query heads do not fit {key_problems} of KV heads")
    return problems // ranges


@triton.jit(do_not_specialize=["heads", "ranges", "key_clusters", "room"])
def covary_kernel(
    key_rows: tl.tensor,
    value_rows: tl.tensor,
    clusters: tl.tensor,
    moments: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    key_clusters: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
) -> None:
    """One program per (key cluster, problem). Keys are taken relative to their rounded mean: products stay small."""
    members_ptr, counts_ptr, centroids_ptr = clusters
    covariances_ptr, mean_keys_ptr, mean_values_ptr = moments
    index = tl.program_id(0).to(tl.int64)
    problem = tl.program_id(0) // key_clusters
    key_rows = rows_of(key_rows, problem, heads, ranges)
    value_rows = rows_of(value_rows, problem, heads, ranges)
    members_ptr += index * room
    count = tl.load(counts_ptr + index)
    dims = tl.arange(0, K.DIM)
    mean = tl.load(centroids_ptr + index * K.DIM + dims).to(tl.float32)
    products = tl.zeros([K.DIM, K.DIM], tl.float32)
    sum_keys = tl.zeros([K.DIM], tl.float32)
    sum_values = tl.zeros([K.DIM], tl.float32)
    for start in range(0, count, K.TILE):
        at, inside = members_from(members_ptr, start, count, K)
        keys = load_rows(key_rows, at, inside, K)
        values = load_rows(value_rows, at, inside, K)
        apart = tl.where(inside[:, None], keys.to(tl.float32) - mean[None, :], 0.0)
        products += tl.dot(tl.trans(values), apart.to(values.dtype), input_precision=K.PRECISION)
        sum_keys += tl.sum(apart, 0)
        sum_values += tl.sum(values.to(tl.float32), 0)
    size = tl.maximum(count, 1).to(tl.float32)
    mean_values = sum_values / size
    rest = sum_keys / size  # what the rounding of the mean left
    covariances = products / size - mean_values[:, None] * rest[None, :]
    at_square = index * (K.DIM * K.DIM) + dims[:, None] * K.DIM + dims[None, :]
    element = covariances_ptr.dtype.element_ty
    tl.store(covariances_ptr + at_square, covariances.to(element))
    tl.store(mean_keys_ptr + index * K.DIM + dims, (mean + rest).to(element))
    tl.store(mean_values_ptr + index * K.DIM + dims, mean_values.to(element))


@triton.jit
def softmax_rows(
    logits_ptr: tl.tensor,
    problem: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Shares of the key clusters for every query cluster of a problem; zero where there is none."""
    own = tl.arange(0, K.MEANS)
    others = tl.arange(0, K.CLUSTERS)
    exists = (own[:, None] < query_clusters) & (others[None, :] < key_clusters)
    row = problem.to(tl.int64) * query_clusters + own
    logits = tl.load(
        logits_ptr + row[:, None] * key_clusters + others[None, :], mask=exists, other=float("-inf")
    )
    peak = tl.max(logits, 1)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(logits - peak[:, None])
    total = tl.sum(weights, 1)
    return weights / tl.where(total > 0.0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=["heads", "group", "ranges", "query_clusters", "key_clusters"])
def mix_kernel(
    logits_ptr: tl.tensor,
    covariances_ptr: tl.tensor,
    dipoles_ptr: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    ranges: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """One program per (COLUMNS entries of the matrices, problem)."""
    problem = tl.program_id(0) // (ENTRIES // COLUMNS)
    columns = (tl.program_id(0) % (ENTRIES // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    shares = softmax_rows(logits_ptr, problem, query_clusters, key_clusters, K)
    source = key_problem(problem, heads, group, ranges)
    others = tl.arange(0, K.CLUSTERS)
    row = source.to(tl.int64) * key_clusters + others
    covariances = tl.load(
        covariances_ptr + row[:, None] * ENTRIES + columns[None, :],
        mask=others[:, None] < key_clusters,
        other=0.0,
    )
    mixed = tl.dot(shares.to(covariances.dtype), covariances, input_precision=K.PRECISION)
    own = tl.arange(0, K.MEANS)
    row = problem.to(tl.int64) * query_clusters + own
    tl.store(
        dipoles_ptr + row[:, None] * ENTRIES + columns[None, :],
        mixed.to(dipoles_ptr.dtype.element_ty),
        mask=own[:, None] < query_clusters,
    )


@triton.jit(do_not_specialize=["heads", "group", "ranges", "query_clusters", "key_clusters"])
def mix_backward_kernel(
    logits_ptr: tl.tensor,
    covariances_ptr: tl.tensor,
    grads_ptr: tl.tensor,
    by_logit_ptr: tl.tensor,
    by_covariance_ptr: tl.tensor,
    heads: tl.tensor,
    group: tl.tensor,
    ranges: tl.tensor,
    query_clusters: tl.tensor,
    key_clusters: tl.tensor,
    ENTRIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """One program per problem."""
    problem = tl.program_id(0)
    source = key_problem(problem, heads, group, ranges).to(tl.int64)
    shares = softmax_rows(logits_ptr, problem, query_clusters, key_clusters, K)
    own = tl.arange(0, K.MEANS)
    others = tl.arange(0, K.CLUSTERS)
    own_row = problem.to(tl.int64) * query_clusters + own
    key_row = source * key_clusters + others
    into_row = problem.to(tl.int64) * key_clusters + others
    moved = tl.zeros([K.MEANS, K.CLUSTERS], tl.float32)
    for first in range(0, ENTRIES, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        grads = tl.load(
            grads_ptr + own_row[:, None] * ENTRIES + columns[None, :],
            mask=own[:, None] < query_clusters,
            other=0.0,
        )
        covariances = tl.load(
            covariances_ptr + key_row[:, None] * ENTRIES + columns[None, :],
            mask=others[:, None] < key_clusters,
            other=0.0,
        )
        moved += tl.dot(grads, tl.trans(covariances), input_precision=K.PRECISION)
        by_covariance = tl.dot(tl.trans(shares.to(grads.dtype)), grads, input_precision=K.PRECISION)
        tl.store(
            by_covariance_ptr + into_row[:, None] * ENTRIES + columns[None, :],
            by_covariance.to(by_covariance_ptr.dtype.element_ty),
            mask=others[:, None] < key_clusters,
        )
    by_logit = shares * (moved - tl.sum(shares * moved, 1)[:, None])
    tl.store(
        by_logit_ptr + own_row[:, None] * key_clusters + others[None, :],
        by_logit,
        mask=(own[:, None] < query_clusters) & (others[None, :] < key_clusters),
    )
