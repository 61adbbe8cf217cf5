"""Multipole Attention over key clusters in five launches: attend to all means, bin, select, attend to keys, merge.

The lookup reads mean keys and mean values together and attends to every cluster as N keys at its mean; that alone is an
attention to the whole context, read in one stream. Then what a budget selects is exchanged for its keys: the selection
takes its share away and lists the keys, and flash-decoding over the lists adds them exactly.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, S slots, D head dim.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from decode_engine.kernels.cluster_lookup import bin_weights, look_up, split_size
from decode_engine.kernels.cluster_selection import select_clusters, selection_programs
from decode_engine.kernels.cluster_tables import ClusterTables, Scores
from decode_engine.kernels.key_values import KeyValues, check_queries
from decode_engine.kernels.partials import Partials, merge_partials
from decode_engine.kernels.sparse_attention import attend_pieces, piece_size
from index_store.errors import InvalidArgumentError


def attend_clusters(
    q_RGD: Tensor,
    looked_up_RGD: Tensor,
    kv: KeyValues,
    tables: ClusterTables,
    budgets_R: Tensor,
    capacity: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to all keys: those of clusters up to a token budget exactly, the others as means of their clusters.

    q_RGD, looked_up_RGD: [B * H, G, d], queries as attended and as compared with the clusters, in the dtype of keys and
    clusters. budgets_R, capacity: as in `select_clusters`. The result equals attention to the listed keys merged with
    the monopole remainder (`index_store.remainders`, Multipole Attention section 3.2).

    Returns out [R, G, d] float32, lse [R, G], and counts [R] int32 of the keys attended exactly.
    """
    rows, group, width = len(q_RGD), q_RGD.shape[1], tables.width
    check_queries(q_RGD, rows, kv.head_dim, tables.dtype)
    if rows != len(kv.tensors) * kv.heads or kv.tensors[0].dtype != tables.dtype:
        raise InvalidArgumentError(
            f"{rows} rows of queries over clusters of {tables.dtype} for {len(kv.tensors)} sequences of {kv.heads} KV "
            f"heads of {kv.tensors[0].dtype}"
        )
    splits = triton.cdiv(width, split_size(rows, width))
    selecting = selection_programs(rows, width)
    piece = piece_size(rows, capacity)
    slots = splits + selecting + triton.cdiv(capacity, piece)
    scores = Scores.allocate(rows, group, width, splits, False, q_RGD.device, slots)
    sums = torch.empty(rows, slots, group, kv.head_dim, device=q_RGD.device)
    partials = Partials(sums, scores.peaks_RSG, scores.totals_RSG)
    look_up(looked_up_RGD, tables, scale, scores, sums)
    bin_weights(scores)
    ids, counts = select_clusters(scores, tables, budgets_R, capacity, (kv, partials))
    attend_pieces(q_RGD, kv, ids, counts, scale, piece, partials, splits + selecting)
    return *merge_partials(partials), counts
