"""Attention to listed keys: flash-decoding over ragged lists, and over the keys that are always attended.

What a row attends to one by one is one sequence of entries that its programs share evenly, so that no head waits for
the longest list: listed keys, segment after segment, then the context's keys outside of the searched range, then the
tail. Functions for kernels say which key an entry is and where its row lies, in elements from the context's first row
on. Each program first writes down the listed keys of its share, then attends to all of it in one loop. The query heads
of a group share a tile, so every key and value is read once. Partial results are merged by one more launch. Counts stay
on the device: programs without entries end at once.

Keys that a remainder's clusters hold leave them here: the weight that the cluster's mean gave them is taken away from
their own (`MONOPOLE`), or their logits are summed up for a launch that does it later (`SUMS`).

Shape legend: B sequences, H KV heads, R = B * H rows, G group heads, N keys of the longest context, P segments of a
row, W keys that a segment has room for, S slots, C clusters, X programs of a row, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.online_softmax import (
    HEAD_TILE,
    LOG2E,
    AttendConstants,
    Partials,
    add_weighted,
    grow,
    keys_of_tile,
    load_group,
    no_keys_yet,
    store_partial,
    tile_logits,
)
from decode_engine.kernels.attention.row_planes import attend_run, load_part, plane_pointers
from decode_engine.kernels.attention.shared_attention import attend_dense_reference
from decode_engine.kernels.families import ATTENTION
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import (
    ASSIGNMENT,
    KEYS,
    KV,
    SLOTS,
    TAIL,
    TAIL_KEYS,
    field,
    head_rows,
    searched_keys,
)
from index_store.attention.attention_state import AttentionState
from index_store.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class KeyLists:
    """Selected keys of every row, in segments: one for each program that selected.

    ids_RPW: [R, P, W] int32 key ids of the context, only searched ones; a key is in at most one segment of its row.
    Searches list them ascending inside a segment, or block by block from the last one on; entries of -1 do not count.
    counts_RP: [R, P] int32, entries of each segment that were written; the others may hold anything.

    Raises InvalidArgumentError for other types and shapes.
    """

    ids_RPW: Tensor
    counts_RP: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("ids", self.ids_RPW), ("counts", self.counts_RP)):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise InvalidArgumentError(
                    f"{name} are {tensor.dtype}, expected int32 in one contiguous piece"
                )
        if self.ids_RPW.dim() != 3 or self.counts_RP.shape != self.ids_RPW.shape[:2]:
            raise InvalidArgumentError(
                f"ids have shape {tuple(self.ids_RPW.shape)} and counts {tuple(self.counts_RP.shape)}, expected "
                "[rows, segments, width] and [rows, segments]"
            )

    @staticmethod
    def allocate(rows: int, segments: int, width: int, device: torch.device | str) -> KeyLists:
        """Uninitialised lists; whoever fills them writes every count."""
        return KeyLists(
            torch.empty(rows, segments, width, dtype=torch.int32, device=device),
            torch.empty(rows, segments, dtype=torch.int32, device=device),
        )

    def of_row(self, row: int) -> Tensor:
        """The row's key ids, [count] int64, for eager references and tests; waits for the device."""
        counts = self.counts_RP[row].tolist()
        ids = torch.cat([ids[:count] for ids, count in zip(self.ids_RPW[row], counts, strict=True)]).long()
        return ids[ids >= 0]


@triton.jit
def context_entries(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """First searched key, their end, and how many keys of the context are always attended."""
    first, end = searched_keys(records_ptr, b)
    keys = field(records_ptr, b, KEYS).to(tl.int32)
    return first, end, first + tl.maximum(keys - end, 0)


@triton.jit
def listed_keys(counts_ptr: tl.tensor, row: tl.tensor, width: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Entries of each of a row's segments, [SEGMENTS_TILE]."""
    segment = tl.arange(0, K.SEGMENTS_TILE)
    counts = tl.load(counts_ptr + row.to(tl.int64) * K.SEGMENTS + segment, mask=segment < K.SEGMENTS, other=0)
    return tl.minimum(counts, width)


@triton.jit
def share_of(entries: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """First entry and end of this program's share, in whole tiles."""
    share = tl.cdiv(tl.cdiv(entries, tl.num_programs(0)), K.TILE) * K.TILE
    first = tl.minimum(tl.program_id(0) * share, entries)
    return first, tl.minimum(first + share, entries)


@triton.constexpr_function
def halvings(size: int) -> int:
    """How often a power of two can be halved."""
    return size.bit_length() - 1


@triton.jit
def segment_ids(
    ids_ptr: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    entry: tl.tensor,
    stop: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Key ids of entries of a row's segments, one after the other; -1 from stop on.

    counts: of a power of two of segments, as `listed_keys` returns them.
    """
    if K.SEGMENTS == 1:
        place = entry.to(tl.int64)
    else:
        # Halves are looked at in turn: entries compared with all of several hundred segments leave no registers.
        ends = tl.cumsum(counts, 0)
        segment = entry * 0
        for halving in tl.static_range(1, halvings(counts.shape[0]) + 1):
            later = segment + (counts.shape[0] >> halving)
            segment = tl.where(tl.gather(ends, later - 1, 0) <= entry, later, segment)
        place = segment.to(tl.int64) * width + (entry - tl.gather(ends - counts, segment, 0))
    return tl.load(ids_ptr + place, mask=entry < stop, other=-1)


_CHUNK = tl.constexpr(128)


@triton.jit
def join(
    ids_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    K: tl.constexpr,
) -> None:
    """Writes down entries begin..stop-1 of a row's segments as one list."""
    for start in range(begin, stop, _CHUNK):
        entry = start + tl.arange(0, _CHUNK)
        ids = segment_ids(ids_ptr, counts, width, entry, stop, K)
        tl.store(joined_ptr + entry, ids, mask=entry < stop)


@triton.jit
def entry_ids(
    joined_ptr: tl.tensor,
    entry: tl.tensor,
    listed: tl.tensor,
    in_context: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
) -> tl.tensor:
    """Key ids of a row's entries, those of the list and then those always attended; -1 from in_context on."""
    ids = tl.load(joined_ptr + entry, mask=entry < listed, other=-1)
    return with_always(ids, entry, listed, in_context, first, end)


@triton.jit
def with_always(
    ids: tl.tensor,
    entry: tl.tensor,
    listed: tl.tensor,
    in_context: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
) -> tl.tensor:
    """Key ids of entries, given those that are listed."""
    always = entry - listed
    always = tl.where(always < first, always, end + always - first)
    return tl.where((entry >= listed) & (entry < in_context), always, ids)


@triton.jit
def distance(from_ptr: tl.tensor, to_ptr: tl.tensor, ELEMENT: tl.constexpr) -> tl.tensor:
    """In elements; found in units of 16 bytes, so that loads are known to be aligned."""
    units = (to_ptr.to(tl.int64) - from_ptr.to(tl.int64)) // 16
    return units * (128 // ELEMENT.primitive_bitwidth)


@triton.jit
def places(
    ids: tl.tensor,
    entry: tl.tensor,
    in_context: tl.tensor,
    stop: tl.tensor,
    to_tail: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Which entries are keys, and where they begin from the context's first row on; those after the context's are the
    tail's."""
    in_tail = (entry >= in_context) & (entry < stop)
    of_tail = to_tail + (entry - in_context).to(tl.int64) * (2 * K.WIDTH)
    return (ids >= 0) | in_tail, tl.where(in_tail, of_tail, ids.to(tl.int64) * (2 * K.WIDTH))


@triton.jit
def located(
    where: tl.tensor,
    locations_ptr: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    to_slots: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Where entries begin, from the context's first row on: in their slots, or for those without one where they did."""
    if K.LOCATED:
        slot = tl.load(locations_ptr + place, mask=present, other=-1)
        where = tl.where(slot >= 0, to_slots + slot.to(tl.int64) * (2 * K.WIDTH), where.to(tl.int64))
    return where


NOTHING, MONOPOLE, SUMS = 0, 1, 2
"""What is taken out of clusters."""
_MONOPOLE = tl.constexpr(MONOPOLE)
LIST_TILE = 32
"""Keys that a program attends to at a time (`keys_of_tile`)."""
_STAGES = 5  # A tile's ids are loaded before its keys, so that half of them are keys and values in flight.
_PLANE_STAGES = 2  # they take registers, which decoding needs
_UNITS = tl.constexpr(2.0**24)
"""Of one in sums of logits: these are whole numbers, so that the order in which programs add them up changes no bit."""
_PROGRAMS = 384
"""Of all rows together: about one round of what a large device holds at a time."""


def list_programs(rows: int, lists: KeyLists) -> int:
    """Programs of a row, and slots that they fill."""
    _, segments, width = lists.ids_RPW.shape
    return max(2, min(128, _PROGRAMS // rows, -(-segments * width // LIST_TILE) + 4))


class ClusterScores(NamedTuple):
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
    rows = len(q_RGD)
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
        (lists.ids_RPW, lists.counts_RP, joined_RN, locations_RN),
        (None, None, None)
        if scores is None
        else (scores.logits_RCG, scores.taken_RC, scores.taken_logits_RCG),
        kept_RX,
        partials,
        lists.ids_RPW.shape[2],
        joined_RN.shape[1],
        0 if scores is None else scores.logits_RCG.shape[1],
        partials.peaks_RSG.shape[1],
        first_slot,
        scale * LOG2E,
        K=list_constants(
            q_RGD, records_BF, lists, locations_RN, planes, _PLANE_STAGES if planes else _STAGES
        ),
        TAKE=NOTHING if take_out is None else take_out.mode,
        **chained(q_RGD.device),
    )
    return programs


def list_constants(
    q_RGD: Tensor, records_BF: Tensor, lists: KeyLists, locations_RN: Tensor | None, planes: bool, stages: int
) -> AttendConstants:
    """What kernels over lists are compiled for."""
    return AttendConstants.of(
        q_RGD,
        len(q_RGD) // len(records_BF),
        keys_of_tile(LIST_TILE, q_RGD.shape[2]),
        stages,
        planes=planes,
        segments=lists.ids_RPW.shape[1],
        located=locations_RN is not None,
    )


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
    scores: tl.tensor,
    TAKE: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """Takes keys out of their clusters, those of the row being `before` and on; logits of the clusters' means."""
    logits_ptr, taken_ptr, taken_logits_ptr = scores
    heads = tl.arange(0, HEAD_TILE)
    member = cluster >= 0
    inside = (heads < K.GROUP)[:, None] & member[None, :]
    at = cluster[None, :] * K.GROUP + heads[:, None]
    means = logits
    if TAKE == _MONOPOLE:
        means = tl.load(logits_ptr + before * K.GROUP + at, mask=inside, other=float("-inf"))
    else:
        one = tl.full([K.TILE], 1, tl.int32)
        tl.atomic_add(taken_ptr + before + cluster, one, mask=member, sem="relaxed")
        units = tl.where(inside, logits * _UNITS, 0.0).to(tl.int64)
        tl.atomic_add(taken_logits_ptr + before * K.GROUP + at, units, mask=inside, sem="relaxed")
    return means


@triton.jit
def taken_sums(taken_logits_ptr: tl.tensor, at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Sums of the logits that `take` took out of clusters."""
    return tl.load(taken_logits_ptr + at, mask=inside, other=0).to(tl.float32) / _UNITS


@triton.jit(do_not_specialize=["width", "room", "cluster_width", "slots", "first_slot"])
def attend_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    lists: tl.tensor,
    scores: tl.tensor,
    kept_ptr: tl.tensor,
    partials: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    cluster_width: tl.tensor,
    slots: tl.tensor,
    first_slot: tl.tensor,
    scale: tl.tensor,
    K: tl.constexpr,
    TAKE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries, row)."""
    ids_ptr, counts_ptr, joined_ptr, locations_ptr = lists
    row = tl.program_id(1)
    b = row // K.HEADS
    head = (row % K.HEADS).to(tl.int64)
    element: tl.constexpr = q_ptr.dtype.element_ty
    stored: tl.constexpr = tl.uint32 if K.PLANES else element
    rows_ptr = head_rows(records_ptr, b, head, KV, stored)
    tail_ptr = head_rows(records_ptr, b, head, TAIL, element)
    keys = field(records_ptr, b, KEYS).to(tl.int32)
    to_tail = distance(rows_ptr, tail_ptr, stored)
    to_slots = distance(rows_ptr, head_rows(records_ptr, b, head, SLOTS, stored), stored)
    pointers = plane_pointers(records_ptr, b, head, K)
    first, end, always = context_entries(records_ptr, b)
    tail_keys = field(records_ptr, b, TAIL_KEYS).to(tl.int32)
    assignment_ptr = field(records_ptr, b, ASSIGNMENT).to(tl.pointer_type(tl.int32)) + head * keys
    before = row.to(tl.int64) * cluster_width
    ids_ptr += row.to(tl.int64) * K.SEGMENTS * width
    joined_ptr += row.to(tl.int64) * room
    wait_for_launch(CHAINED)
    counts = listed_keys(counts_ptr, row, width, K)
    listed = tl.minimum(tl.sum(counts, 0), room)
    in_context = listed + always
    begin, stop = share_of(in_context + tail_keys, K)
    if K.SEGMENTS > 1 and not K.LOCATED:
        join(ids_ptr, joined_ptr, counts, width, begin, tl.minimum(stop, listed), K)
        tl.debug_barrier()
    q = load_group(q_ptr, row, K)
    peaks, totals, sums = no_keys_yet(K)
    attended = tl.zeros([K.TILE], tl.int32)
    until = tl.minimum(stop, in_context) if K.PLANES else stop  # tails have another form
    for at in tl.range(begin, until, K.TILE, num_stages=K.STAGES):
        entry = at + tl.arange(0, K.TILE)
        ids = entry_ids(joined_ptr, entry, listed, in_context, first, end)
        attended += ((ids >= first) & (ids < end)).to(tl.int32)
        valid, where = places(ids, entry, in_context, until, to_tail, K)
        # Lists that hold entries of -1 may be so long that not all that follows them was located.
        where = located(
            where, locations_ptr, row.to(tl.int64) * room + entry, entry < tl.minimum(in_context, room), to_slots,
            K,
        )  # fmt: skip
        tile_keys = load_part(rows_ptr, where, pointers, ids, valid, False, K, element)
        values = load_part(rows_ptr, where, pointers, ids, valid, True, K, element)
        logits = tile_logits((q,), (tile_keys,), valid, scale, K)
        means = logits
        if TAKE > 0:
            cluster = tl.load(assignment_ptr + ids, mask=ids >= 0, other=-1)
            means = take(logits, cluster, before, scores, TAKE, K)
        peaks, totals, shrink, weights = grow(peaks, totals, logits, 1.0, means, TAKE == _MONOPOLE)
        sums = add_weighted(sums * shrink[:, None], weights, values, False, K)
    if K.PLANES:
        peaks, totals, sums = attend_run(
            q, tail_ptr, (), tl.maximum(begin - in_context, 0), stop - in_context, (peaks, totals, sums), scale, 1, K
        )  # fmt: skip
    if kept_ptr is not None:
        tl.store(kept_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(attended, 0))
    store_partial(partials, row, slots, first_slot + tl.program_id(0), (peaks, totals, sums), K, True)


@dataclass(frozen=True, slots=True)
class ListedSequence:
    """One sequence of a batch, as tensors. Fields as in `records`.

    kv_HN2D: [H, N, 2, d]. tail_HT2D: [H, capacity, 2, d], of which tail_keys rows count.
    """

    kv_HN2D: Tensor
    tail_HT2D: Tensor
    tail_keys: int
    first: int
    end: int
    keep: int

    def fields(self) -> dict[int, int]:
        """The record's fields but those of a searched index."""
        return {
            records.KV: self.kv_HN2D.data_ptr(),
            records.KV_HEAD: self.kv_HN2D.stride(0) * self.kv_HN2D.element_size(),
            records.TAIL: self.tail_HT2D.data_ptr(),
            records.TAIL_HEAD: self.tail_HT2D.stride(0) * self.tail_HT2D.element_size(),
            records.KEYS: self.kv_HN2D.shape[1],
            records.FIRST: self.first,
            records.END: self.end,
            records.TAIL_KEYS: self.tail_keys,
            records.KEEP: self.keep,
        }

    def always(self) -> Tensor:
        """Ids of the context's keys that are always attended, [count] int64."""
        return torch.tensor([*range(self.first), *range(self.end, self.kv_HN2D.shape[1])], dtype=torch.int64)


def attend_lists_reference(
    q_RGD: Tensor, sequences: Sequence[ListedSequence | None], lists: KeyLists, scale: float
) -> AttentionState:
    """Attention [R, G, d] to listed keys, to those always attended, and to the tail; float32."""
    states = []
    heads = len(q_RGD) // len(sequences)
    for row, q_GD in enumerate(q_RGD):
        sequence = sequences[row // heads]
        if sequence is None:
            states.append(AttentionState.empty(q_GD.shape[:1], q_GD.shape[1], q_GD.device))
            continue
        kv = sequence.kv_HN2D[row % heads]
        ids = torch.cat([sequence.always(), lists.of_row(row).cpu()]).to(kv.device)
        chosen = torch.cat([kv[ids], sequence.tail_HT2D[row % heads, : sequence.tail_keys].to(kv)])
        state = attend_dense_reference(q_GD[None].to(kv.device), chosen[None], scale)
        states.append(AttentionState(state.out[0], state.lse[0]))
    return stacked(states, q_RGD.device)


def stacked(states: Sequence[AttentionState], device: torch.device) -> AttentionState:
    return AttentionState(
        torch.stack([state.out.to(device) for state in states]),
        torch.stack([state.lse.to(device) for state in states]),
    )
