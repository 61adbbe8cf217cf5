"""Attention to everything, where sessions share contexts: flash-decoding over contexts and tails.

The query heads of a group's sessions share a tile of the tensor cores, so every key and value of a context is read once
for all sessions on it; `row_groups` says who shares what, and which program reads what.

Shape legend: B sequences, H KV heads, G group heads, S slots, d head dim, F fields of a record, X rows of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E, attend_run, tile_options
from decode_engine.kernels.attention.partials import Partials
from decode_engine.kernels.attention.row_groups import (
    FEW_ROWS,
    OF_CONTEXT,
    OF_TAIL,
    RowGroups,
    load_task,
    member_rows,
    part_of,
    task_count,
)
from decode_engine.kernels.attention.row_planes import attend_plane_run, plane_pointers
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import KEYS, KV, TAIL, TAIL_KEYS, field, head_rows
from index_store.attention.attention_state import AttentionState

_FEW_ROWS = tl.constexpr(FEW_ROWS)


@dataclass(frozen=True, slots=True)
class SharedShape:
    """Of launches.

    rows: query heads of a large tile. tile, stages: keys of an iteration, and iterations in flight, with a small tile;
    many_tile, many_stages: with a large one. warps: of a program. programs: of a multiprocessor.
    """

    rows: int = 64
    tile: int = 64
    stages: int = 3
    many_tile: int = 64
    many_stages: int = 3
    warps: int = 4
    programs: int = 2


def shared_shape(group: int, head_dim: int, planes: bool) -> SharedShape:
    """Of launches for layers of that shape: sums have room in registers, of one program on a multiprocessor or two."""
    # The heads of such a group are found in a large tile by divisions, which take registers.
    uneven = group & (group - 1) != 0
    if head_dim > 128 and planes:  # decoding long rows leaves none for a large tile
        return SharedShape(rows=FEW_ROWS, tile=16, stages=5)
    if head_dim > 128 and uneven:
        return SharedShape(many_tile=32, warps=8, programs=1)
    if head_dim > 128:
        return SharedShape(rows=128, stages=2, many_stages=2, warps=8, programs=1)
    if head_dim == 128 and not planes and uneven and group > 8:
        return SharedShape(many_tile=32, many_stages=4)
    return SharedShape()


def shared_programs(shape: SharedShape, heads: int, device: torch.device) -> int:
    """Programs for each KV head: all multiprocessors have as many as fit, of all heads together."""
    if device.type != "cuda":
        return 4
    present = torch.cuda.get_device_properties(device).multi_processor_count * shape.programs
    return max(1, min(128, present // heads))


@triton.jit
def attend_task(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    slots: tl.tensor,
    scale_log2: tl.tensor,
    first_place: tl.tensor,
    members: tl.tensor,
    leader: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    what: tl.tensor,
    slot: tl.tensor,
    h: tl.tensor,
    X: tl.constexpr,
    ALONE: tl.constexpr,
    PLANES: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One task of a KV head. ALONE: it may have a single member, and read that one's tail."""
    element: tl.constexpr = q_ptr.dtype.element_ty
    x = tl.arange(0, X)
    d = tl.arange(0, DIM)
    present = x // GROUP < members
    b = member_rows(table_ptr, first_place + x // GROUP, present)
    query = (b * HEADS + h) * GROUP + x % GROUP
    q = tl.load(q_ptr + query[:, None] * DIM + d[None, :], mask=present[:, None], other=0.0)
    peaks = tl.full([X], float("-inf"), tl.float32)
    totals = tl.zeros([X], tl.float32)
    sums = tl.zeros([X, DIM], tl.float32)
    keys = field(records_ptr, leader, KEYS).to(tl.int32)
    begin, end = part_of(keys, part, parts, TILE)
    end = tl.where(what & OF_CONTEXT != 0, end, begin)
    if PLANES:
        low_ptr = head_rows(records_ptr, leader, h, KV, tl.uint32)
        pointers = plane_pointers(records_ptr, leader, h, PLANES, DIM)
        peaks, totals, sums = attend_plane_run(
            q, low_ptr, pointers, begin, end, peaks, totals, sums, scale_log2, DIM, TILE, STAGES, PRECISION
        )
    else:
        rows_ptr = head_rows(records_ptr, leader, h, KV, element)
        peaks, totals, sums = attend_run(
            q, rows_ptr, begin, end, peaks, totals, sums, scale_log2, DIM, TILE, STAGES, PRECISION
        )
    if ALONE:
        tail_keys = field(records_ptr, leader, TAIL_KEYS).to(tl.int32)
        begin, end = part_of(tail_keys, part, parts, TILE)
        rows_ptr = head_rows(records_ptr, leader, h, TAIL, element)
        end = tl.where(what & OF_TAIL != 0, end, begin)
        peaks, totals, sums = attend_run(
            q, rows_ptr, begin, end, peaks, totals, sums, scale_log2, DIM, TILE, 1, PRECISION
        )
    at = ((b * HEADS + h).to(tl.int64) * slots + slot) * GROUP + x % GROUP
    tl.store(peaks_ptr + at, peaks, mask=present)
    tl.store(totals_ptr + at, totals, mask=present)
    found = present & (peaks != float("-inf"))
    tl.store(sums_ptr + at[:, None] * DIM + d[None, :], sums, mask=found[:, None])


@triton.jit(do_not_specialize=["slots"])
def shared_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    slots: tl.tensor,
    scale_log2: tl.tensor,
    PLANES: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    MANY_TILE: tl.constexpr,
    MANY_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (place, KV head): tasks in turns with the others of the head. ROWS: of the largest tile."""
    h = tl.program_id(1)
    count = task_count(table_ptr)
    first, members, leader, part, parts, what, slot = load_task(table_ptr, tl.program_id(0), count, SIZE)
    wait_for_launch(CHAINED)
    for task in range(tl.program_id(0), count, tl.num_programs(0)):
        many = members * GROUP > _FEW_ROWS
        if ROWS > _FEW_ROWS:  # noqa: SIM102 - decided when the kernel is compiled
            if many:
                attend_task(
                    q_ptr, records_ptr, table_ptr, sums_ptr, peaks_ptr, totals_ptr, slots, scale_log2,
                    first, members, leader, part, parts, what, slot, h,
                    ROWS, False, PLANES, SIZE, HEADS, GROUP, DIM, MANY_TILE, MANY_STAGES, PRECISION,
                )  # fmt: skip
        if not many:
            attend_task(
                q_ptr, records_ptr, table_ptr, sums_ptr, peaks_ptr, totals_ptr, slots, scale_log2,
                first, members, leader, part, parts, what, slot, h,
                _FEW_ROWS, True, PLANES, SIZE, HEADS, GROUP, DIM, TILE, STAGES, PRECISION,
            )  # fmt: skip
        following = task + tl.num_programs(0)
        first, members, leader, part, parts, what, slot = load_task(table_ptr, following, count, SIZE)


def attend_shared(
    q_BHGD: Tensor,
    records_BF: Tensor,
    groups: RowGroups,
    partials: Partials,
    scale: float,
    shape: SharedShape,
    planes: bool = False,
) -> None:
    """Fills the partial attention [B * H, S, G, d] of contexts and tails: each row's first `groups.slots_B` slots.

    q_BHGD: contiguous, unscaled, in the dtype of keys and values; G 1..16, d 64, 128 or 256. scale: of the logits.
    planes: the contexts' rows are in two planes, the low one in place of keys and values; tails are as ever.
    """
    size, heads, group, head_dim = q_BHGD.shape
    options = tile_options(q_BHGD.dtype, shape.tile, shape.stages)
    many = tile_options(q_BHGD.dtype, shape.many_tile, shape.many_stages)
    shared_kernel[(groups.programs, heads)](
        q_BHGD,
        records_BF,
        groups.table,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        partials.sums_RSGD.shape[1],
        scale * LOG2E,
        PLANES=planes,
        SIZE=size,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        ROWS=shape.rows if size > groups.few else FEW_ROWS,
        MANY_TILE=many["TILE"],
        MANY_STAGES=many["STAGES"],
        **(options | {"num_warps": shape.warps}),
        **chained(q_BHGD.device),
    )


def attend_dense_reference(q_HGD: Tensor, kv_HN2D: Tensor, scale: float) -> AttentionState:
    """Attention [H, G, d] of one sequence to rows [H, N, 2, d], context and tail together, computed in float64.

    Of fewer rows than all it is what every kernel that selects keys is compared with.
    """
    if kv_HN2D.shape[1] == 0:
        return AttentionState.empty(q_HGD.shape[:2], q_HGD.shape[2], q_HGD.device)
    keys, values = kv_HN2D[:, :, 0].double(), kv_HN2D[:, :, 1].double()
    logits = torch.einsum("hgd,hnd->hgn", q_HGD.double() * scale, keys)
    out = torch.einsum("hgn,hnd->hgd", logits.softmax(-1), values)
    return AttentionState(out.float(), logits.logsumexp(-1).float())
