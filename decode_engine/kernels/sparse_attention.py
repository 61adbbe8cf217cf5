"""Attention to listed keys: flash-decoding over ragged index lists.

Every row (a sequence's KV head) brings a list of key ids of its own length. Lists are cut into pieces of a fixed number
of keys, one program each, so that a head with a long list waits for nobody and none waits for it; the programs'
partial results are merged by one more launch. The query heads of a group share a tile, so every key and value is read
once. Counts stay on the device: programs beyond a row's count end at once.

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, K listed keys, S slots, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.cluster_tables import table
from decode_engine.kernels.key_values import KeyValues, check_queries
from decode_engine.kernels.partials import (
    LOG2E,
    Partials,
    chained,
    merge_partials,
    wait_for_launch,
)
from index_store.errors import InvalidArgumentError


def attend_listed(
    q_RGD: Tensor, kv: KeyValues, ids_RK: Tensor, counts_R: Tensor, scale: float, piece: int | None = None
) -> tuple[Tensor, Tensor]:
    """Attention out [R, G, d] float32 and lse [R, G] float32 over the keys that each row lists.

    q_RGD: [B * H, G, d] in the dtype of the keys, contiguous; G 1..8, d 64 or 128. ids_RK: [B * H, K] int32 key ids;
    negative entries do not count. counts_R: [B * H] int32, entries of each row that count. scale: of the logits,
    1/sqrt(d). piece: keys per program, a multiple of 64; chosen from the shapes when None.

    Rows without any key have out 0 and lse -inf. Raises InvalidArgumentError for shapes and dtypes that do not fit.
    """
    piece = piece or piece_size(*ids_RK.shape)
    partials = attend_pieces(q_RGD, kv, ids_RK, counts_R, scale, piece)
    return merge_partials(partials)


def attend_listed_reference(
    q_RGD: Tensor, kv: KeyValues, ids_RK: Tensor, counts_R: Tensor, scale: float, piece: int | None = None
) -> tuple[Tensor, Tensor]:
    """The same, eagerly, in float32."""
    outs, lses = [], []
    for row in range(len(ids_RK)):
        rows = kv.tensors[row // kv.heads][row % kv.heads]
        ids = ids_RK[row, : int(counts_R[row])].long()
        chosen = rows[ids[ids >= 0]].float()
        logits = q_RGD[row].float() @ chosen[:, 0].t() * scale
        lses.append(logits.logsumexp(-1))
        outs.append(torch.softmax(logits, -1) @ chosen[:, 1])
    return torch.stack(outs), torch.stack(lses)


def piece_size(rows: int, width: int) -> int:
    """Keys per program: enough programs to fill a large device, and few enough partial results to merge."""
    wanted = rows * width // 1024
    return min(512, max(64, int(triton.next_power_of_2(max(1, wanted)))))


@dataclass(frozen=True, slots=True)
class TakeOut:
    """Clusters that listed keys are taken out of while they are attended.

    addresses_BA, shapes_BX, left_RC, taken_RGC: as in `ClusterTables` and `Scores`.
    """

    addresses_BA: Tensor
    shapes_BX: Tensor
    left_RC: Tensor
    taken_RGC: Tensor


def attend_pieces(
    q_RGD: Tensor,
    kv: KeyValues,
    ids_RK: Tensor,
    counts_R: Tensor,
    scale: float,
    piece: int,
    into: Partials | None = None,
    first_slot: int = 0,
    out_of: TakeOut | None = None,
) -> Partials:
    """`attend_listed` without the merge: one slot per piece of a row's list.

    into, first_slot: where other launches have slots too. With `out_of` every key leaves its cluster: counts and sums
    of logits are brought up to date.
    """
    rows, width = ids_RK.shape
    check_queries(q_RGD, rows, kv.head_dim, kv.tensors[0].dtype)
    check_lists(ids_RK, counts_R)
    if piece < 64 or piece % 64:
        raise InvalidArgumentError(f"pieces have {piece} keys, expected a multiple of 64")
    if rows != len(kv.tensors) * kv.heads:
        raise InvalidArgumentError(
            f"{rows} lists of keys for {len(kv.tensors)} sequences of {kv.heads} KV heads"
        )
    group, pieces = q_RGD.shape[1], max(1, triton.cdiv(width, piece))
    partials = into or Partials.allocate(rows, pieces, group, kv.head_dim, q_RGD.device)
    attend_kernel[(pieces, rows)](
        q_RGD,
        kv.addresses_B,
        kv.head_rows_B,
        ids_RK,
        counts_R,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        None if out_of is None else out_of.addresses_BA,
        None if out_of is None else out_of.shapes_BX,
        None if out_of is None else out_of.left_RC,
        None if out_of is None else out_of.taken_RGC,
        width,
        partials.peaks_RSG.shape[1],
        first_slot,
        0 if out_of is None else out_of.left_RC.shape[1],
        scale * LOG2E,
        HEADS=kv.heads,
        GROUP=group,
        DIM=kv.head_dim,
        PIECE=piece,
        TAKE=out_of is not None,
        **tile_options(kv.tensors[0].dtype, piece),
        **chained(q_RGD.device),
    )
    return partials


def check_lists(ids_RK: Tensor, counts_R: Tensor) -> None:
    """Raises InvalidArgumentError unless ids [R, K] and counts [R] are contiguous int32."""
    for name, tensor in (("ids", ids_RK), ("counts", counts_R)):
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise InvalidArgumentError(f"{name} are {tensor.dtype}, expected int32 in one contiguous piece")
    if counts_R.shape != ids_RK.shape[:1]:
        raise InvalidArgumentError(f"{len(ids_RK)} lists of keys, but {tuple(counts_R.shape)} counts")


def tile_options(dtype: torch.dtype, piece: int) -> dict[str, Any]:
    """Shape of a launch: keys per iteration, loads in flight, warps."""
    short = piece <= 64
    return {
        "TILE": 64,
        "STAGES": 1 if short or dtype == torch.float32 else 5,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
        "num_warps": 4,
    }


@triton.jit
def head_rows(
    addresses_ptr: tl.tensor,
    head_rows_ptr: tl.tensor,
    row: tl.tensor,
    ELEMENT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> tl.tensor:
    """Pointer to the first row of a KV head's keys and values."""
    sequence = row // HEADS
    head = (row % HEADS).to(tl.int64)
    base = tl.load(addresses_ptr + sequence).to(tl.pointer_type(ELEMENT))
    base = tl.multiple_of(base, 16)
    return base + head * tl.load(head_rows_ptr + sequence) * (2 * DIM)


@triton.jit
def load_group(
    q_ptr: tl.tensor, row: tl.tensor, GROUP: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
) -> tl.tensor:
    """The queries of a row's group, padded with zeros to ROWS."""
    heads = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    at = (row * GROUP + heads)[:, None] * DIM + dims[None, :]
    return tl.load(q_ptr + at, mask=heads[:, None] < GROUP, other=0.0)


@triton.jit
def grow(
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    logits: tl.tensor,
    values: tl.tensor,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Adds keys with logits [rows, keys] (log2; -inf does not count) and values [keys, d] to a running softmax."""
    higher = tl.maximum(peaks, tl.max(logits, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp2(peaks - base)
    weights = tl.exp2(logits - base[:, None])
    totals = totals * shrink + tl.sum(weights, 1)
    added = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return higher, totals, sums * shrink[:, None] + added


@triton.jit
def attend_piece(
    q: tl.tensor,
    rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    assignment_ptr: tl.tensor,
    left_ptr: tl.tensor,
    taken_ptrs: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TAKE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """Peaks, totals [ROWS] and sums [ROWS, d] over entries first..end-1 of a list of key ids.

    TAKE: keys leave the clusters that assignment_ptr names; taken_ptrs are those of every head's first cluster.
    """
    dims = tl.arange(0, DIM)
    peaks = tl.full([ROWS], float("-inf"), tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(first, end, TILE, num_stages=STAGES):
        entry = start + tl.arange(0, TILE)
        ids = tl.load(ids_ptr + entry, mask=entry < end, other=-1)
        valid = ids >= 0
        # A head's rows span less than 2^31 elements up to 2^22 keys.
        at = ids[:, None] * (2 * DIM) + dims[None, :]
        keys = tl.load(rows_ptr + at, mask=valid[:, None], other=0.0)
        values = tl.load(rows_ptr + DIM + at, mask=valid[:, None], other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        if TAKE:
            cluster = tl.load(assignment_ptr + ids, mask=valid, other=-1)
            member = cluster >= 0
            tl.atomic_add(left_ptr + cluster, -1, mask=member, sem="relaxed")
            natural = logits * 0.6931471805599453
            into = taken_ptrs[:, None] + cluster[None, :]
            grouped = tl.arange(0, ROWS) < GROUP
            tl.atomic_add(into, natural, mask=grouped[:, None] & member[None, :], sem="relaxed")
        peaks, totals, sums = grow(peaks, totals, sums, logits, values, PRECISION)
    return peaks, totals, sums


@triton.jit
def store_partial(
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    row: tl.tensor,
    slots: tl.tensor,
    slot: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
) -> tl.tensor:
    """Writes what a program found into its slot."""
    heads = tl.arange(0, ROWS)
    at = (row.to(tl.int64) * slots + slot) * GROUP + heads
    tl.store(peaks_ptr + at, peaks, mask=heads < GROUP)
    tl.store(totals_ptr + at, totals, mask=heads < GROUP)
    into = sums_ptr + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(into, sums, mask=(heads < GROUP)[:, None] & (peaks != float("-inf"))[:, None])


@triton.jit(do_not_specialize=["width", "slots", "first_slot", "clusters"])
def attend_kernel(
    q_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    head_rows_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    cluster_addresses_ptr: tl.tensor,
    shapes_ptr: tl.tensor,
    left_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    width: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    clusters: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PIECE: tl.constexpr,
    TAKE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (piece, row)."""
    wait_for_launch(CHAINED)
    piece = tl.program_id(0)
    slot = first_slot + piece
    row = tl.program_id(1)
    count = tl.minimum(tl.load(counts_ptr + row), width)
    first = piece * PIECE
    end = tl.minimum(first + PIECE, count)
    if first >= end:
        heads = tl.arange(0, 16)
        at = (row.to(tl.int64) * slots + slot) * GROUP + heads
        nothing = tl.full([16], float("-inf"), tl.float32)
        tl.store(peaks_ptr + at, nothing, mask=heads < GROUP)
        tl.store(totals_ptr + at, tl.zeros([16], tl.float32), mask=heads < GROUP)
    else:
        q = load_group(q_ptr, row, GROUP, DIM, 16)
        element: tl.constexpr = q_ptr.dtype.element_ty
        rows_ptr = head_rows(addresses_ptr, head_rows_ptr, row, element, HEADS, DIM)
        own_ids = ids_ptr + row.to(tl.int64) * width
        assignment_ptr = own_ids
        left_row = own_ids
        taken_ptrs = sums_ptr
        if TAKE:
            sequence = row // HEADS
            keys = tl.load(shapes_ptr + sequence * 2 + 1)
            assignment_ptr = table(cluster_addresses_ptr, sequence, 5, tl.int32)
            assignment_ptr += (row % HEADS).to(tl.int64) * keys
            left_row = left_ptr + row.to(tl.int64) * clusters
            taken_ptrs = taken_ptr + (row.to(tl.int64) * GROUP + tl.arange(0, 16)) * clusters
        peaks, totals, sums = attend_piece(
            q,
            rows_ptr,
            own_ids,
            first,
            end,
            scale,
            assignment_ptr,
            left_row,
            taken_ptrs,
            GROUP,
            DIM,
            16,
            TAKE,
            TILE,
            STAGES,
            PRECISION,
        )
        store_partial(sums_ptr, peaks_ptr, totals_ptr, row, slots, slot, peaks, totals, sums, GROUP, DIM, 16)
