"""Lists of selected keys, which searches on a device leave and attention reads; and how kernels walk along them.

What a row attends to one by one is one sequence of entries that its programs share: listed keys, segment after segment,
then the context's keys outside of the searched range, then the tail. Functions for kernels say which key an entry is
and where its row lies, in elements from the context's first row on.

Shape legend: R rows (sequence x KV head), P segments of a row, W keys that a segment has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.record_fields import KEYS, field, searched_keys
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
def listed_keys(
    counts_ptr: tl.tensor, row: tl.tensor, width: tl.tensor, SEGMENTS: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Entries of each of a row's segments, [TILE]."""
    segment = tl.arange(0, TILE)
    counts = tl.load(counts_ptr + row.to(tl.int64) * SEGMENTS + segment, mask=segment < SEGMENTS, other=0)
    return tl.minimum(counts, width)


@triton.jit
def share_of(entries: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """First entry and end of this program's share, in whole tiles."""
    share = tl.cdiv(tl.cdiv(entries, tl.num_programs(0)), TILE) * TILE
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
    SEGMENTS: tl.constexpr,
) -> tl.tensor:
    """Key ids of entries of a row's segments, one after the other; -1 from stop on.

    counts: of a power of two of segments, as `listed_keys` returns them.
    """
    if SEGMENTS == 1:
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


@triton.jit
def join(
    ids_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    counts: tl.tensor,
    width: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    SEGMENTS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Writes down entries begin..stop-1 of a row's segments as one list."""
    for start in range(begin, stop, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        ids = segment_ids(ids_ptr, counts, width, entry, stop, SEGMENTS)
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
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Which entries are keys, and where they begin from the context's first row on; those after the context's are the
    tail's. WIDTH: elements of a key, half a row."""
    in_tail = (entry >= in_context) & (entry < stop)
    of_tail = to_tail + (entry - in_context).to(tl.int64) * (2 * WIDTH)
    return (ids >= 0) | in_tail, tl.where(in_tail, of_tail, ids.to(tl.int64) * (2 * WIDTH))


@triton.jit
def located(
    where: tl.tensor,
    locations_ptr: tl.tensor,
    place: tl.tensor,
    present: tl.tensor,
    to_slots: tl.tensor,
    LOCATED: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Where entries begin, from the context's first row on: in their slots, or for those without one where they did."""
    if LOCATED:
        slot = tl.load(locations_ptr + place, mask=present, other=-1)
        where = tl.where(slot >= 0, to_slots + slot.to(tl.int64) * (2 * WIDTH), where.to(tl.int64))
    return where
