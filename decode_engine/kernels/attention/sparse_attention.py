"""Attention to listed keys: flash-decoding over ragged lists, and over the keys that are always attended.

What a row attends to, the segments of its list, sinks, recent window and tail, counts as one sequence of entries, which
a fixed number of programs share evenly. So no head waits for the longest list. Each first writes down the listed keys
of its share, then attends to all of it in one loop. The query heads of a group share a tile, so every key and value is
read once. Partial results are merged by one more launch (`partials`). Counts stay on the device: programs without
entries end at once.

Keys that a remainder's clusters hold leave them here: the weight that the cluster's mean gave them is taken away from
their own (`MONOPOLE`), or their logits are summed up for a launch that does it later (`SUMS`).

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, N keys of the longest context, P segments of a
row, W keys that a segment has room for, S slots, C clusters, X programs of a row, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.key_lists import (
    KeyLists,
    context_entries,
    distance,
    entry_ids,
    join,
    listed_keys,
    located,
    places,
    share_of,
)
from decode_engine.kernels.attention.online_softmax import (
    HEAD_TILE,
    LOG2E,
    add_weighted,
    attend_run,
    grow,
    keys_of_tile,
    load_group,
    no_keys_yet,
    tile_logits,
    tile_options,
)
from decode_engine.kernels.attention.partials import Partials, store_partial
from decode_engine.kernels.attention.row_planes import load_keys, load_values, plane_pointers
from decode_engine.kernels.families import ATTENTION
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import ASSIGNMENT, KEYS, KV, SLOTS, TAIL, TAIL_KEYS, field, head_rows
from index_store.errors import InvalidArgumentError

NOTHING, MONOPOLE, SUMS = 0, 1, 2
"""What is taken out of clusters."""
_MONOPOLE = tl.constexpr(MONOPOLE)
LIST_TILE = 32
"""Keys that a program attends to at a time (`keys_of_tile`)."""
_STAGES = 5  # A tile's ids are loaded before its keys, so that half of them are keys and values in flight.
_PLANE_STAGES = 2  # they take registers, which decoding needs
_CHUNK = tl.constexpr(128)
_UNITS = tl.constexpr(2.0**24)
"""Of one in sums of logits: these are whole numbers, so that the order in which programs add them up changes no bit."""
_PROGRAMS = 384
"""Of all rows together: about one round of what a large device holds at a time."""


def list_programs(rows: int, lists: KeyLists) -> int:
    """Programs of a row, and slots that they fill."""
    _, segments, width = lists.ids_RPW.shape
    return max(2, min(128, _PROGRAMS // rows, -(-segments * width // LIST_TILE) + 4))


@dataclass(frozen=True, slots=True)
class ClusterScores:
    """What a lookup finds about the clusters of every row, and what attention takes out of them.

    logits_RCG: [R, C, G] float32, q . mean key in units of log2; -inf for clusters without keys; anything beyond a
    context's clusters. spreads_RCG: [R, C, G] float32, 1 + v / 2 with the logits' variance v. taken_RC: [R, C]
    int32 and taken_logits_RCG: [R, C, G] int64 in units of 2^-24, number and sum of logits of the keys that were taken
    out; 0 after a lookup. The last three are None where there are no variances.
    """

    logits_RCG: Tensor
    spreads_RCG: Tensor | None = None
    taken_RC: Tensor | None = None
    taken_logits_RCG: Tensor | None = None

    @staticmethod
    def allocate(
        rows: int, width: int, group: int, spread: bool, device: torch.device | str
    ) -> ClusterScores:
        """Uninitialised, for up to `width` clusters."""
        logits = torch.empty(rows, width, group, device=device)
        if not spread:
            return ClusterScores(logits)
        taken = torch.empty(rows, width, dtype=torch.int32, device=device)
        taken_logits = torch.empty_like(logits, dtype=torch.int64)
        return ClusterScores(logits, torch.empty_like(logits), taken, taken_logits)


@dataclass(frozen=True, slots=True)
class TakeOut:
    """Clusters that attended keys leave, scored by a lookup; `mode` is MONOPOLE or SUMS."""

    scores: ClusterScores
    mode: int


def attend_lists(
    q_RGD: Tensor,
    records_BF: Tensor,
    lists: KeyLists,
    joined_RN: Tensor,
    partials: Partials,
    scale: float,
    *,
    first_slot: int = 0,
    kept_RX: Tensor | None = None,
    take_out: TakeOut | None = None,
    locations_RN: Tensor | None = None,
    planes: bool = False,
) -> int:
    """Attention to listed keys, sinks, recent window and tail, into slots from first_slot on; returns their number.

    q_RGD: [R, G, d] in the dtype of the keys, contiguous; G 1..16, d 64, 128 or 256. scale: of the logits, 1/sqrt(d).
    joined_RN: [R, N] int32, set to every row's listed keys, N of them at most, where lists have several segments.
    kept_RX: [R, X] int32, set to how many listed keys each of the `list_programs` attended. locations_RN: where entries
    lie, as `slot_fetch.fetch_rows` left them together with joined_RN; by default all are read where the context is.
    planes: the contexts' rows are in two planes, the low one in place of keys and values; tails are as ever.
    Raises InvalidArgumentError for shapes and dtypes that do not fit.
    """
    rows, group, head_dim = q_RGD.shape
    check_queries(q_RGD, len(records_BF))
    if len(lists.ids_RPW) != rows:
        raise InvalidArgumentError(
            f"lists of keys have shape {tuple(lists.ids_RPW.shape)}, expected [{rows}, any, any]"
        )
    programs = list_programs(rows, lists)
    scores = None if take_out is None else take_out.scores
    joined_RN = one_list(lists, joined_RN, locations_RN)
    attend_kernel[(programs, rows)](
        q_RGD,
        records_BF,
        lists.ids_RPW,
        lists.counts_RP,
        joined_RN,
        locations_RN,
        None if scores is None else scores.logits_RCG,
        None if scores is None else scores.taken_RC,
        None if scores is None else scores.taken_logits_RCG,
        kept_RX,
        partials.sums_RSGD,
        partials.peaks_RSG,
        partials.totals_RSG,
        lists.ids_RPW.shape[2],
        joined_RN.shape[1],
        0 if scores is None else scores.logits_RCG.shape[1],
        partials.peaks_RSG.shape[1],
        first_slot,
        scale * LOG2E,
        HEADS=rows // len(records_BF),
        GROUP=group,
        DIM=head_dim,
        SEGMENTS=lists.ids_RPW.shape[1],
        SEGMENTS_TILE=triton.next_power_of_2(lists.ids_RPW.shape[1]),
        TAKE=NOTHING if take_out is None else take_out.mode,
        KEPT=kept_RX is not None,
        LOCATED=locations_RN is not None,
        PLANES=planes,
        **tile_options(q_RGD.dtype, keys_of_tile(LIST_TILE, head_dim), _PLANE_STAGES if planes else _STAGES),
        **chained(q_RGD.device),
    )
    return programs


def check_queries(q_RGD: Tensor, sequences: int) -> None:
    """Raises InvalidArgumentError unless the queries [R, G, d] are supported, contiguous, and R a multiple of B."""
    rows, group, head_dim = q_RGD.shape
    ATTENTION.check(group, head_dim)
    if not sequences or rows % sequences:
        raise InvalidArgumentError(
            f"queries have shape {tuple(q_RGD.shape)} for {sequences} sequences, expected [KV heads of all sequences, "
            "heads of a group, channels]"
        )
    if q_RGD.dtype not in ATTENTION.dtypes or not q_RGD.is_contiguous():
        raise InvalidArgumentError(
            f"queries are {q_RGD.dtype}, expected one of {', '.join(map(str, ATTENTION.dtypes))}, in one piece"
        )


def one_list(lists: KeyLists, joined_RN: Tensor, locations_RN: Tensor | None) -> Tensor:
    """Where a row's listed keys stand one after the other: a list of one segment is that by itself."""
    segments = lists.ids_RPW.shape[1]
    return lists.ids_RPW[:, 0] if segments == 1 and locations_RN is None else joined_RN


@triton.jit
def take(
    logits: tl.tensor,
    cluster: tl.tensor,
    before: tl.tensor,
    logits_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    TAKE: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Takes keys out of their clusters, those of the row being `before` and on; logits of the clusters' means."""
    heads = tl.arange(0, HEAD_TILE)
    member = cluster >= 0
    inside = (heads < GROUP)[:, None] & member[None, :]
    at = cluster[None, :] * GROUP + heads[:, None]
    means = logits
    if TAKE == _MONOPOLE:
        means = tl.load(logits_ptr + before * GROUP + at, mask=inside, other=float("-inf"))
    else:
        one = tl.full([TILE], 1, tl.int32)
        tl.atomic_add(taken_ptr + before + cluster, one, mask=member, sem="relaxed")
        units = tl.where(inside, logits * _UNITS, 0.0).to(tl.int64)
        tl.atomic_add(taken_logits_ptr + before * GROUP + at, units, mask=inside, sem="relaxed")
    return means


@triton.jit
def taken_sums(taken_logits_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Sums of the logits that `take` took out of clusters."""
    return tl.load(taken_logits_ptr + at, mask=inside, other=0).to(tl.float32) / _UNITS


@triton.jit(do_not_specialize=["width", "room", "cluster_width", "slots", "first_slot"])
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    logits_ptr: tl.tensor,
    taken_ptr: tl.tensor,
    taken_logits_ptr: tl.tensor,
    kept_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    cluster_width: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    TAKE: tl.constexpr,
    KEPT: tl.constexpr,
    LOCATED: tl.constexpr,
    PLANES: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries, row)."""
    row = tl.program_id(1)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    element: tl.constexpr = q_ptr.dtype.element_ty
    stored: tl.constexpr = tl.uint32 if PLANES else element
    WIDTH: tl.constexpr = DIM // 8 if PLANES else DIM  # of a key as it is stored
    rows_ptr = head_rows(records_ptr, b, head, KV, stored)
    tail_ptr = head_rows(records_ptr, b, head, TAIL, element)
    keys = field(records_ptr, b, KEYS).to(tl.int32)
    to_tail = distance(rows_ptr, tail_ptr, stored)
    to_slots = distance(rows_ptr, head_rows(records_ptr, b, head, SLOTS, stored), stored)
    pointers = plane_pointers(records_ptr, b, head, PLANES, DIM)
    first, end, always = context_entries(records_ptr, b)
    tail_keys = field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    assignment_ptr = field(records_ptr, b, ASSIGNMENT).to(tl.pointer_type(tl.int32)) + head * keys
    before = row.to(tl.int64) * cluster_width
    ids_ptr += row.to(tl.int64) * SEGMENTS * width
    joined_ptr += row.to(tl.int64) * room
    wait_for_launch(CHAINED)
    counts = listed_keys(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    listed = tl.minimum(tl.sum(counts, 0), room)
    in_context = listed + always
    begin, stop = share_of(in_context + tail_keys, TILE)
    if SEGMENTS > 1 and not LOCATED:
        join(ids_ptr, joined_ptr, counts, width, begin, tl.minimum(stop, listed), SEGMENTS, _CHUNK)
        tl.debug_barrier()
    q = load_group(q_ptr, row, GROUP, DIM)
    peaks, totals, sums = no_keys_yet(DIM)
    attended = tl.zeros([TILE], tl.int32)
    until = tl.minimum(stop, in_context) if PLANES else stop  # tails have another form
    for at in tl.range(begin, until, TILE, num_stages=STAGES):
        entry = at + tl.arange(0, TILE)
        ids = entry_ids(joined_ptr, entry, listed, in_context, first, end)
        attended += ((ids >= first) & (ids < end)).to(tl.int32)
        valid, where = places(ids, entry, in_context, until, to_tail, WIDTH)
        # Lists that hold entries of -1 may be so long that not all that follows them was located.
        where = located(
            where, locations_ptr, row.to(tl.int64) * room + entry, entry < tl.minimum(in_context, room), to_slots,
            LOCATED, WIDTH,
        )  # fmt: skip
        tile_keys = load_keys(rows_ptr, where, pointers, ids, valid, PLANES, DIM, element)
        values = load_values(rows_ptr, where, pointers, ids, valid, PLANES, DIM, element)
        logits = tile_logits(q, tile_keys, valid, scale, PRECISION)
        means = logits
        if TAKE > 0:
            cluster = tl.load(assignment_ptr + ids, mask=ids >= 0, other=-1)
            means = take(logits, cluster, before, logits_ptr, taken_ptr, taken_logits_ptr, TAKE, GROUP, TILE)
        peaks, totals, shrink, weights = grow(peaks, totals, logits, 1.0, means, TAKE == _MONOPOLE)
        sums = add_weighted(sums * shrink[:, None], weights, values, False, PRECISION)
    if PLANES:
        peaks, totals, sums = attend_run(
            q, tail_ptr, tl.maximum(begin - in_context, 0), stop - in_context, peaks, totals, sums, scale, DIM, TILE, 1,
            PRECISION,
        )  # fmt: skip
    if KEPT:
        tl.store(kept_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(attended, 0))
    store_partial(
        sums_ptr, peaks_ptr, totals_ptr, row, slots, first_slot + tl.program_id(0), peaks, totals, sums,
        GROUP, DIM, True,
    )  # fmt: skip
