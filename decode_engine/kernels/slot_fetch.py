"""Finds the rows that a step attends to in its slot caches, and fetches those that are missing from host memory.

Many rows that a step attends to in the context (listed by searches, sinks, recent window) were attended in the step
before. Which ones are there is found on the device, in three launches of fixed shape, for a graph that serves any step:

1. find: joins the segments of every row's list, looks every key up, and stamps the slots of those that are there with
   the step's number.
2. claim: every other key claims a slot of its set that this step does not use, the one used longest ago first, and its
   row is put on one list of copies.
3. copy: the rows are read from host memory (`gather_rows`).

Then every entry has a location: a slot, or -1 for "read it at its own address" where no slot was found. Either way
attention reads the same bytes, so that its result is the same bit for bit.

Why this is right. The cache of a context, layer and KV head is set-associative (`slot_cache`). Steps are counted from
1 per cache, layer and KV head, so every stamp is at most the step's number s, and equal to it exactly if the step uses
the slot.

- Programs of find only read tags, and write s into stamps. Several entries may stamp a slot, always with s, so the
  order does not matter.
- claim begins when find has ended: all slots that hold a wanted row carry s and cannot be evicted. A claim is an atomic
  maximum of the stamp and s; whoever is told a number below s owns the slot for this step, and everyone else is told s
  and tries another way. So every slot has at most one new owner, whichever programs, or threads of one program, claim
  slots of one set at once. Stamps that were read a moment ago may be outdated in one direction only: a slot that seemed
  free is taken. A key gives up when all ways of its set are taken. Only owners write tags and locations, and put their
  row on the list, each row once. So of m missing keys of a set with f ways that are not in use, min(m, f) are copied,
  into the ways used longest ago; which keys these are depends on the race when f < m, the numbers and the result do
  not. Among ways used equally long ago every key begins at another one, so that few claims fail.
- Attention begins when copy has ended.
- What one launch reads and changes at once is kept twice: the number of the step (find writes CURRENT and reads DONE,
  claim the other way round).

Rows of a batch may share a cache, as sessions of one context do. They count one step together, and a key that both
miss is copied twice, into slots of which the second is found no more and leaves in its turn.

Cost: 80 bytes per wanted row, most of it tags and from the second-level cache; per missing row 64 bytes of stamps, and
the row over PCIe, which takes the time. That is why copies have a launch of their own, which does nothing else: PCIe
idles while a program that is to copy still claims. Copies are listed ascending inside a program of claim.

Shape legend: B sequences, H KV heads, R = B * H rows, N keys of the longest context, X programs that look a row's keys
up, C copies that there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.gather_rows import CopyShape, RowCopies, check_shape, copy_rows
from decode_engine.kernels.key_lists import KeyLists
from decode_engine.kernels.list_entries import context_entries, entry_ids, join, listed_keys, share_of
from decode_engine.kernels.partials import chained, wait_for_launch
from decode_engine.kernels.records import field, row_of
from decode_engine.kernels.slot_cache import BYPASSED, CURRENT, DONE, REUSED, TALLIES, WANTED, WAYS
from index_store.errors import InvalidArgumentError
from index_store.slot_memory import slots_per_head

_KV = tl.constexpr(records.KV)
_SLOTS = tl.constexpr(records.SLOTS)
_TAGS = tl.constexpr(records.TAGS)
_STAMPS = tl.constexpr(records.STAMPS)
_TALLIES = tl.constexpr(records.TALLIES)
_SETS = tl.constexpr(records.SETS)
_TALLY = tl.constexpr(TALLIES)
_DONE = tl.constexpr(DONE)
_CURRENT = tl.constexpr(CURRENT)
_WANTED = tl.constexpr(WANTED)
_REUSED = tl.constexpr(REUSED)
_BYPASSED = tl.constexpr(BYPASSED)
_WAYS = tl.constexpr(WAYS)
_CHUNK = tl.constexpr(128)
_TILE = 64
_FIND_PROGRAMS = 512
"""Of all rows together."""
_FETCH = CopyShape(programs=132)
_LEAST_COPIES = 4096
"""Of a row that there is room for, unless it has fewer keys: caches of short contexts may be larger than usual."""


@dataclass(frozen=True, slots=True)
class FetchBuffers:
    """What the launches leave each other, shared by all layers.

    locations_RN: [R, N] int32, one for every entry of a row, the listed keys and then those always attended: a slot, or
    -1. copies: of missing rows, at most C.
    """

    locations_RN: Tensor
    copies: RowCopies

    @staticmethod
    def allocate(rows: int, keys: int, device: torch.device | str) -> FetchBuffers:
        """keys: of the longest context. There is room for copies into as many slots as its caches have."""
        room = rows * min(keys, max(_LEAST_COPIES, slots_per_head(keys)))
        return FetchBuffers(
            torch.empty(rows, keys, dtype=torch.int32, device=device), RowCopies.allocate(room, device)
        )


def fetch_rows(
    records_BF: Tensor,
    lists: KeyLists,
    joined_RN: Tensor,
    buffers: FetchBuffers,
    row_bytes: int,
    shape: CopyShape | None = None,
    *,
    found_RX2: Tensor | None = None,
    heads: range | None = None,
) -> Tensor:
    """Brings rows that are attended into the slots of every session's cache; their locations, [R, N] int32.

    joined_RN: [R, N] int32, set to every row's listed keys and then those always attended; locations belong to these.
    row_bytes: of keys and values of one token and KV head. shape: of the launch that reads host memory. Rows of
    sessions without a cache stay where they are, and so do missing rows beyond the room for copies. found_RX2: [R, X,
    2] int32, set to how many of a row's keys each of the X `find_programs` found in no slot, and in one. heads: of KV
    heads, those whose rows are brought, all by default; of the others nothing is read or set. Fixed launches, which
    never wait for the device.
    Raises InvalidArgumentError for shapes that do not fit.
    """
    rows, segments, width = lists.ids_RPW.shape
    if joined_RN.shape != buffers.locations_RN.shape or len(joined_RN) != rows:
        raise InvalidArgumentError(
            f"lists of {rows} rows are joined into {tuple(joined_RN.shape)} and located in "
            f"{tuple(buffers.locations_RN.shape)}"
        )
    room = joined_RN.shape[1]
    programs, all_heads = find_programs(rows, room), rows // len(records_BF)
    some = range(all_heads) if heads is None else heads
    grid = (programs, len(records_BF) * len(some))
    if found_RX2 is not None and (found_RX2.shape != (rows, programs, 2) or not found_RX2.is_contiguous()):
        raise InvalidArgumentError(
            f"counts of found keys have shape {tuple(found_RX2.shape)}, expected [{rows}, {programs}, 2] in one piece"
        )
    shape = shape or _FETCH
    check_shape(row_bytes, shape)
    find_kernel[grid](
        records_BF,
        lists.ids_RPW,
        lists.counts_RP,
        joined_RN,
        buffers.locations_RN,
        buffers.copies.count_1,
        found_RX2,
        width,
        room,
        HEADS=all_heads,
        FIRST_HEAD=some.start,
        SOME_HEADS=len(some),
        SEGMENTS=segments,
        SEGMENTS_TILE=triton.next_power_of_2(segments),
        TILE=_TILE,
        num_warps=4,
        **chained(records_BF.device),
    )
    claim_kernel[grid](
        records_BF,
        lists.counts_RP,
        joined_RN,
        buffers.locations_RN,
        buffers.copies.sources_C,
        buffers.copies.targets_C,
        buffers.copies.count_1,
        len(buffers.copies.sources_C),
        width,
        room,
        HEADS=all_heads,
        FIRST_HEAD=some.start,
        SOME_HEADS=len(some),
        SEGMENTS=segments,
        SEGMENTS_TILE=triton.next_power_of_2(segments),
        ROW_BYTES=row_bytes,
        TILE=_TILE,
        num_warps=4,
        **chained(records_BF.device),
    )
    copy_rows(buffers.copies, row_bytes, shape)
    return buffers.locations_RN


def find_programs(rows: int, keys: int) -> int:
    """Programs that look up the keys of each of so many rows. keys: of the longest context."""
    return max(2, min(-(-keys // _TILE), _FIND_PROGRAMS // rows))


@triton.jit
def first_slots(ids: tl.tensor, sets: tl.tensor, WAYS: tl.constexpr) -> tl.tensor:
    """The first slot of every key's set, by a multiplicative hash."""
    hashed = (ids.to(tl.int64) * 2654435769) & 0xFFFFFFFF
    return ((hashed * sets) >> 32).to(tl.int32) * WAYS


@triton.jit
def head_pointer(
    records_ptr: tl.tensor, b: tl.tensor, offset: tl.tensor, ADDRESS: tl.constexpr, ELEMENT: tl.constexpr
) -> tl.tensor:
    """Pointer to what lies `offset` elements behind an address of the record, one or several."""
    return field(records_ptr, b, ADDRESS).to(tl.pointer_type(ELEMENT)) + offset


@triton.jit
def tally(tallies_ptr: tl.tensor, keys: tl.tensor, reused: tl.tensor, cached: tl.tensor) -> None:
    """Adds up what a program counted."""
    number = tl.sum(keys, 0).to(tl.int64)
    tl.atomic_add(tallies_ptr + _WANTED, number, mask=cached & (number > 0), sem="relaxed")
    number = tl.sum(reused, 0).to(tl.int64)
    tl.atomic_add(tallies_ptr + _REUSED, number, mask=cached & (number > 0), sem="relaxed")


@triton.jit
def store_pair(pairs_ptr: tl.tensor, row: tl.tensor, one: tl.tensor, other: tl.tensor) -> None:
    """Stores two numbers for this program of a row."""
    pairs_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(pairs_ptr, one)
    tl.store(pairs_ptr + 1, other)


@triton.jit(do_not_specialize=["width", "room"])
def find_kernel(
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    copies_ptr: tl.tensor,
    found_ptr: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row)."""
    row = row_of(tl.program_id(1), HEADS, FIRST_HEAD, SOME_HEADS)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    first, end, always = context_entries(records_ptr, b)
    sets = field(records_ptr, b, _SETS)
    tags_ptr = tl.multiple_of(head_pointer(records_ptr, b, head * sets * _WAYS, _TAGS, tl.int32), 16)
    stamps_ptr = head_pointer(records_ptr, b, head * sets * _WAYS, _STAMPS, tl.int32)
    tallies_ptr = head_pointer(records_ptr, b, head * _TALLY, _TALLIES, tl.int64)
    ids_ptr += row.to(tl.int64) * SEGMENTS * width
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    ways = tl.arange(0, _WAYS)
    wait_for_launch(CHAINED)
    counts = listed_keys(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    listed = tl.minimum(tl.sum(counts, 0), room)
    entries = tl.minimum(listed + always, room)
    begin, stop = share_of(entries, TILE)
    join(ids_ptr, joined_ptr, counts, width, begin, tl.minimum(stop, listed), SEGMENTS, _CHUNK)
    tl.debug_barrier()
    cached = sets > 0
    step = (tl.load(tallies_ptr + _DONE, mask=cached, other=0) + 1).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(tallies_ptr + _CURRENT, step.to(tl.int64), mask=cached)
    keys = tl.zeros([TILE], tl.int32)
    reused = tl.zeros([TILE], tl.int32)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(copies_ptr, 0)
    for at in range(begin, stop, TILE):
        entry = at + tl.arange(0, TILE)
        ids = entry_ids(joined_ptr, entry, listed, entries, first, end)
        tl.store(joined_ptr + entry, ids, mask=(entry >= listed) & (entry < stop))
        sought = (ids >= 0) & cached
        set_slots = first_slots(ids, sets, _WAYS)
        at_ways = set_slots[:, None] + ways[None, :]
        tags = tl.load(tags_ptr + at_ways, mask=sought[:, None], other=0, cache_modifier=".cg")
        way = tl.min(tl.where(tags == (ids + 1)[:, None], ways[None, :], _WAYS), 1)
        there = sought & (way < _WAYS)
        slot = set_slots + way
        tl.store(stamps_ptr + slot, tl.zeros([TILE], tl.int32) + step, mask=there)
        tl.store(locations_ptr + entry, tl.where(there, slot, -1), mask=entry < stop)
        keys += (ids >= 0).to(tl.int32)
        reused += there.to(tl.int32)
    if found_ptr is not None:
        # Behind entries of -1 there may be no room for all keys: attention reads the others from host memory.
        beyond = tl.where(tl.program_id(0) == 0, listed + always - entries, 0)
        store_pair(found_ptr, row, tl.sum(keys - reused, 0) + beyond, tl.sum(reused, 0))
    tally(tallies_ptr, keys, reused, cached)


@triton.jit
def claim_slots(
    stamps_ptr: tl.tensor,
    ids: tl.tensor,
    pending: tl.tensor,
    step: tl.tensor,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The way that each pending key, in a step of that number, now owns of the set whose stamps begin there, or -1."""
    ways = tl.arange(0, WAYS)
    from_ptr = stamps_ptr[:, None] + ways[None, :]
    stamps = tl.load(from_ptr, mask=pending[:, None], other=0, cache_modifier=".cg")
    offset = ids % WAYS
    turned = (ways[None, :] + offset[:, None]) % WAYS
    owned = tl.full([TILE], -1, tl.int32)
    while tl.max(pending.to(tl.int32), 0) > 0:
        oldest = tl.min(stamps, 1)
        turn = tl.min(tl.where(stamps == oldest[:, None], turned, WAYS), 1)
        way = (turn + WAYS - offset) % WAYS
        trying = pending & (oldest < step)
        before = tl.atomic_max(stamps_ptr + way, step, mask=trying, sem="relaxed")
        owned = tl.where(trying & (before < step), way, owned)
        # Whatever came of it, this way is taken now.
        stamps = tl.where(ways[None, :] == way[:, None], step[:, None], stamps)
        pending = trying & (owned < 0)
    return owned


@triton.jit(do_not_specialize=["copies_room", "width", "room"])
def claim_kernel(
    records_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    copies_ptr: tl.tensor,
    copies_room: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row)."""
    row = row_of(tl.program_id(1), HEADS, FIRST_HEAD, SOME_HEADS)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    always = context_entries(records_ptr, b)[2]
    sets = field(records_ptr, b, _SETS)
    slots = head * sets * _WAYS
    tags_ptr = head_pointer(records_ptr, b, slots, _TAGS, tl.int32)
    stamps_ptr = tl.multiple_of(head_pointer(records_ptr, b, slots, _STAMPS, tl.int32), 16)
    tallies_ptr = head_pointer(records_ptr, b, head * _TALLY, _TALLIES, tl.int64)
    source = field(records_ptr, b, _KV) + head * field(records_ptr, b, _KV + 1)
    target = field(records_ptr, b, _SLOTS) + head * field(records_ptr, b, _SLOTS + 1)
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    wait_for_launch(CHAINED)
    counts = listed_keys(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    entries = tl.minimum(tl.minimum(tl.sum(counts, 0), room) + always, room)
    begin, stop = share_of(entries, TILE)
    cached = sets > 0
    step = tl.load(tallies_ptr + _CURRENT, mask=cached, other=0)
    if tl.program_id(0) == 0:
        tl.store(tallies_ptr + _DONE, step, mask=cached)
    bypassed = tl.zeros([TILE], tl.int32)
    stop = tl.where(cached, stop, begin)
    for at in range(begin, stop, TILE):
        entry = at + tl.arange(0, TILE)
        location = tl.load(locations_ptr + entry, mask=entry < stop, other=0)
        ids = tl.load(joined_ptr + entry, mask=entry < stop, other=-1)
        missing = (location < 0) & (ids >= 0)
        if tl.max(missing.to(tl.int32), 0) > 0:
            set_slots = first_slots(ids, sets, _WAYS)
            way = claim_slots(stamps_ptr + set_slots, ids, missing, step.to(tl.int32), TILE, _WAYS)
            owned = (way >= 0).to(tl.int32)
            first = tl.atomic_add(copies_ptr, tl.sum(owned, 0), sem="relaxed")
            place = first + tl.cumsum(owned, 0) - owned
            # Where the list is full, the slot keeps the row that it has.
            owner = (way >= 0) & (place < copies_room)
            slot = set_slots + way
            tl.store(sources_ptr + place, source + ids.to(tl.int64) * ROW_BYTES, mask=owner)
            tl.store(targets_ptr + place, target + slot.to(tl.int64) * ROW_BYTES, mask=owner)
            tl.store(tags_ptr + slot, ids + 1, mask=owner)
            tl.store(locations_ptr + entry, slot, mask=owner)
            bypassed += (missing & (owner == 0)).to(tl.int32)
    number = tl.sum(bypassed, 0).to(tl.int64)
    tl.atomic_add(tallies_ptr + _BYPASSED, number, mask=cached & (number > 0), sem="relaxed")
