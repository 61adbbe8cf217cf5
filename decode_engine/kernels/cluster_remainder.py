"""The centred remainder: attention to keys that were not listed, from saved scores (see `index_store.remainders`).

A cluster adds w_c (V_c - sum of the values that were taken out) to the numerator and N' w_c to the denominator, with N'
the keys left in it. Here the first part comes from the clusters' mean values, N_c w_c v_c, and the second from the
listed keys, each of which takes w_c v_i away: sums that merge with all others. So every program works alone, on a piece
of the clusters or of the list.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, C clusters, K listed keys, S slots, D head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_parts import add_clusters, take_values
from decode_engine.kernels.cluster_tables import ClusterTables, Scores, table
from decode_engine.kernels.key_values import KeyValues
from decode_engine.kernels.partials import LOG2E, Partials, chained, wait_for_launch
from decode_engine.kernels.sparse_attention import (
    TakeOut,
    attend_pieces,
    head_rows,
    piece_size,
    store_partial,
)
from index_store.errors import InvalidArgumentError

_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def attend_with_centred(
    q_RGD: Tensor,
    kv: KeyValues,
    ids_RK: Tensor,
    counts_R: Tensor,
    scores: Scores,
    tables: ClusterTables,
    scale: float,
) -> Partials:
    """Attention to listed keys, which may be any, and the centred remainder: two launches.

    The first attends and sums up the logits of the keys that leave a cluster, the second does the rest. `scores` must
    be fresh from a lookup over clusters with variances; nothing may have been taken out of its clusters.
    """
    if scores.taken_RGC is None or scores.spreads_RGC is None:
        raise InvalidArgumentError("the centred remainder needs clusters with variances")
    piece = piece_size(*ids_RK.shape)
    pieces = triton.cdiv(ids_RK.shape[1], piece)
    span = remainder_size(len(ids_RK), tables.width)
    spans = triton.cdiv(tables.width, span)
    out_of = TakeOut(tables.addresses_BA, tables.shapes_BX, scores.left_RC, scores.taken_RGC)
    partials = Partials.allocate(len(ids_RK), spans + 2 * pieces, q_RGD.shape[1], kv.head_dim, q_RGD.device)
    attend_pieces(q_RGD, kv, ids_RK, counts_R, scale, piece, partials, 0, out_of)
    _launch(kv, ids_RK, counts_R, scores, tables, partials, pieces, piece, spans, span)
    return partials


def remainder_size(rows: int, width: int) -> int:
    """Clusters per program."""
    return min(1024, max(64, int(triton.next_power_of_2(max(1, rows * width // 512)))))


def _launch(
    kv: KeyValues,
    ids_RK: Tensor,
    counts_R: Tensor,
    scores: Scores,
    tables: ClusterTables,
    partials: Partials,
    pieces: int,
    piece: int,
    spans: int,
    span: int,
) -> None:
    rows, slots, group = partials.peaks_RSG.shape
    whole = kv.tensors[0].dtype == torch.float32
    remainder_kernel[(spans + pieces, rows)](
        kv.addresses_B,
        kv.head_rows_B,
        ids_RK,
        counts_R,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        tables.addresses_BA,
        tables.shapes_BX,
        scores.logits_RGC,
        scores.spreads_RGC,
        scores.left_RC,
        scores.taken_RGC,
        ids_RK.shape[1],
        slots,
        tables.width,
        pieces,
        spans,
        HEADS=kv.heads,
        GROUP=group,
        DIM=kv.head_dim,
        PIECE=piece,
        SPAN=span,
        VALUES=_TRITON_TYPES[tables.dtype],
        TILE=64,
        SPAN_STAGES=1 if span <= 64 or whole else 3,
        PRECISION="ieee" if whole else "tf32",
        num_warps=4,
        **chained(ids_RK.device),
    )


def remainder_reference(
    kv: KeyValues, ids_RK: Tensor, counts_R: Tensor, scores: Scores, tables: ClusterTables, kind: str
) -> tuple[Tensor, Tensor]:
    """Attention out [R, G, d] and lse [R, G] of the remainder alone, once every listed key has left its cluster.

    kind: `monopole` or `centred`. `scores` as the launches before left them: for monopole those of `select_clusters`,
    for centred those of `attend_with_centred`.
    """
    outs, lses = [], []
    for row in range(len(ids_RK)):
        context, head = tables.of_row(row)
        sizes = context.sizes_HC[head]
        left = scores.left_RC[row, : len(sizes)].clamp(min=0)
        logits = scores.logits_RGC[row, :, : len(sizes)]
        if kind == "centred" and scores.taken_RGC is not None and scores.spreads_RGC is not None:
            sums = sizes * logits - scores.taken_RGC[row, :, : len(sizes)]
            logits = sums / left.clamp(min=1) + scores.spreads_RGC[row, :, : len(sizes)] / LOG2E
        logits = torch.where(left > 0, logits, -torch.inf)
        base = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
        weights = torch.exp(logits - base)
        total = (weights * left).sum(-1)
        values = weights * sizes @ context.value_means_HCD[head].float()
        ids = ids_RK[row, : int(counts_R[row])].long()
        ids = ids[ids >= 0]
        clusters = context.assignment_HN[head, ids].long()
        ids, clusters = ids[clusters >= 0], clusters[clusters >= 0]
        rows = kv.tensors[row // kv.heads][row % kv.heads]
        values -= weights[:, clusters] @ rows[ids, 1].float()
        empty = total <= 0
        outs.append((values / torch.where(empty, 1.0, total)[:, None]).masked_fill(empty[:, None], 0.0))
        lses.append(base[:, 0] + total.clamp(min=0).log())
    return torch.stack(outs), torch.stack(lses)


@triton.jit(do_not_specialize=["width", "slots", "clusters", "pieces", "spans"])
def remainder_kernel(
    addresses_ptr: tl.tensor,
    head_rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    cluster_addresses_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    spreads_ptr: tl.tensor,
    left_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    clusters: tl.tensor,
    pieces: tl.tensor,
    spans: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    SPAN: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    SPAN_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (SPAN clusters, row), and one per (piece of the list, row) that takes values away."""
    wait_for_launch(CHAINED)
    program = tl.program_id(0)
    row = tl.program_id(1)
    sequence = row // HEADS
    head = (row % HEADS).to(tl.int64)
    count = tl.minimum(tl.load(counts_ptr + row), width)
    rows_ptr = head_rows(addresses_ptr, head_rows_ptr, row, VALUES, HEADS, DIM)
    own_ids = ids_ptr + row.to(tl.int64) * width
    slot = program + pieces
    own = tl.load(shapes_ptr + sequence * 2)
    sizes_ptr = table(cluster_addresses_ptr, sequence, 2, tl.int32) + head * own
    wide = (row.to(tl.int64) * GROUP + tl.arange(0, 16)) * clusters
    left_row = left_ptr + row.to(tl.int64) * clusters
    if program < spans:
        values_ptr = table(cluster_addresses_ptr, sequence, 1, VALUES) + head * own * DIM
        first = program * SPAN
        end = tl.minimum(first + SPAN, own)
        peaks, totals, sums = add_clusters(
            logits_ptr + wide,
            spreads_ptr + wide,
            taken_ptr + wide,
            left_row,
            sizes_ptr,
            values_ptr,
            first,
            end,
            GROUP,
            DIM,
            TILE,
            SPAN_STAGES,
            PRECISION,
        )
    else:
        keys = tl.load(shapes_ptr + sequence * 2 + 1)
        assignment_ptr = table(cluster_addresses_ptr, sequence, 5, tl.int32) + head * keys
        first = (program - spans) * PIECE
        end = tl.minimum(first + PIECE, count)
        peaks, sums = take_values(
            logits_ptr + wide,
            spreads_ptr + wide,
            taken_ptr + wide,
            left_row,
            sizes_ptr,
            assignment_ptr,
            rows_ptr,
            own_ids,
            first,
            end,
            GROUP,
            DIM,
            TILE,
            PRECISION,
        )
        totals = tl.zeros([16], tl.float32)
    store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, slot, peaks, totals, sums, GROUP, DIM, 16)
