"""Finds the rows that a step attends to in its slot caches, and fetches those that are missing from host memory.

Of the rows that a step attends to in the context, those
that searches listed, the sinks and the recent window, many were attended in the step before. Which ones are there is
found on the device, in three launches of fixed shape, so that a captured graph serves any step:

1. find: joins the segments of every row's list, looks every key up, stamps the slots of those that are there with the
   step's number, and lists the others.
2. claim: every missing key claims a slot of its set that this step does not use, the one used longest ago first.
3. copy: the rows of claimed slots are read from host memory (`gather_rows`).

Then every entry has a location, a slot or -1 for "read it at its own address". The latter is what is left for keys
that find no slot. Either way attention reads the same bytes, so that its result is the same bit for bit.

Why this is right. The cache of a layer, session and KV head is set-associative (`slot_cache`). Steps are counted from 1
per session, layer and KV head, so every stamp is at most the step's number s, and equal to it exactly if the step uses
the slot.

- Programs of find only read tags, and write s into stamps. A key is in at most one entry of its row, so no two of them
  stamp for different reasons, and the order does not matter.
- claim begins when find has ended: all slots that hold a wanted row carry s and cannot be evicted. A claim is an atomic
  maximum of the stamp and s; whoever is told a number below s owns the slot for this step, and everyone else is told s
  and tries the next way. So every slot has at most one new owner, whichever programs, or threads of one program, claim
  slots of one set at once. Stamps that were read a moment ago may be outdated in one direction only: a slot that seemed
  free is taken. A key gives up when all ways of its set are taken. Only owners write tags, locations and the list of
  copies. So of m missing keys of a set with f ways that are not in use, min(m, f) are copied, into the ways used
  longest ago; which keys these are depends on the race when f < m, the numbers and the result do not.
- copy reads each source and writes each slot once. Its rows are in use by this step only, and attention begins when it
  has ended.
- What one launch reads and changes at once is kept twice: the number of the step (find writes CURRENT and reads DONE,
  claim the other way round) and the number of misses (find counts `missed_R` up from 0, claim reads it, copy clears
  it).

Sessions in several rows of a batch have caches of their own. One cache in two rows would also give right results, but
could hold a row twice.

Cost: 68 bytes of tags, 4 of ids and 8 of locations and stamps per wanted row, most of it from the second-level cache;
besides, per missing row, 64 bytes of stamps and 32 of addresses, and the row over PCIe, which is what takes the time:
about 50 GB/s, so that 1 % of 128K keys of 8 KV heads, 5.4 MB, are 105 us when none is there and 21 us when 80 % are.

Shape legend: B sequences, H KV heads, R = B * H rows, N keys of the longest context, M misses that a row has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.gather_rows import CopyShape, RowCopies, copy_rows
from decode_engine.kernels.key_lists import KeyLists
from decode_engine.kernels.list_entries import context_entries, entry_ids, join, listed_keys, share_of
from decode_engine.kernels.partials import chained, wait_for_launch
from decode_engine.kernels.records import field
from decode_engine.kernels.slot_cache import BYPASSED, CURRENT, DONE, REUSED, TALLIES, WANTED, WAYS
from index_store.errors import InvalidArgumentError

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
_FIND_PROGRAMS = 768
"""Of all rows together."""
_CLAIM_PROGRAMS = 128


@dataclass(frozen=True, slots=True)
class FetchBuffers:
    """What the launches leave each other, shared by all layers.

    locations_RN: [R, N] int32, one for every entry of a row, the listed keys and then those always attended: a slot, or
    -1. misses_RM: [R, M] int32, entries that were not in the cache. missed_R: [R] int32, how many, 0 between steps.
    copies: room for R * M.
    """

    locations_RN: Tensor
    misses_RM: Tensor
    missed_R: Tensor
    copies: RowCopies

    @staticmethod
    def allocate(rows: int, keys: int, misses: int, device: torch.device | str) -> FetchBuffers:
        """keys: of the longest context. misses: of a row; attention reads any more from host memory."""
        return FetchBuffers(
            torch.empty(rows, keys, dtype=torch.int32, device=device),
            torch.empty(rows, misses, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            RowCopies.allocate(rows * misses, device),
        )


def fetch_rows(
    records_BF: Tensor,
    lists: KeyLists,
    joined_RN: Tensor,
    buffers: FetchBuffers,
    row_bytes: int,
    shape: CopyShape | None = None,
) -> Tensor:
    """Brings rows that are attended into the slots of every session's cache; their locations, [R, N] int32.

    joined_RN: [R, N] int32, set to every row's listed keys and then those always attended; locations belong to these.
    row_bytes: of keys and values of one token and KV head. shape: of the launch that copies. Rows of sessions without
    a cache stay where they are. Fixed launches, which never wait for the device.
    Raises InvalidArgumentError for shapes that do not fit.
    """
    rows, segments, width = lists.ids_RPW.shape
    missed, room = buffers.misses_RM.shape
    if joined_RN.shape != buffers.locations_RN.shape or not len(joined_RN) == missed == rows:
        raise InvalidArgumentError(
            f"lists of {rows} rows are joined into {tuple(joined_RN.shape)}, located in "
            f"{tuple(buffers.locations_RN.shape)}, with misses of {missed} rows"
        )
    heads = rows // len(records_BF)
    programs = max(2, min(-(-joined_RN.shape[1] // _TILE), _FIND_PROGRAMS // rows))
    find_kernel[(programs, rows)](
        records_BF,
        lists.ids_RPW,
        lists.counts_RP,
        joined_RN,
        buffers.locations_RN,
        buffers.misses_RM,
        buffers.missed_R,
        width,
        joined_RN.shape[1],
        room,
        HEADS=heads,
        SEGMENTS=segments,
        SEGMENTS_TILE=triton.next_power_of_2(segments),
        TILE=_TILE,
        num_warps=4,
        **chained(records_BF.device),
    )
    claim_kernel[(min(_CLAIM_PROGRAMS, -(-rows * room // _TILE)),)](
        records_BF,
        joined_RN,
        buffers.locations_RN,
        buffers.misses_RM,
        buffers.missed_R,
        buffers.copies.sources_C,
        buffers.copies.targets_C,
        buffers.copies.count_1,
        joined_RN.shape[1],
        room,
        rows,
        HEADS=heads,
        ROWS_TILE=triton.next_power_of_2(rows),
        ROW_BYTES=row_bytes,
        TILE=_TILE,
        num_warps=4,
        **chained(records_BF.device),
    )
    copy_rows(buffers.copies, row_bytes, shape, cleared=buffers.missed_R)
    return buffers.locations_RN


@triton.jit
def first_slots(ids: tl.tensor, sets: tl.tensor, WAYS: tl.constexpr) -> tl.tensor:
    """The first slot of every key's set, by a multiplicative hash."""
    hashed = (ids.to(tl.int64) * 2654435769) & 0xFFFFFFFF
    return ((hashed * sets) >> 32).to(tl.int32) * WAYS


@triton.jit
def head_pointer(
    records_ptr: tl.tensor,
    b: tl.tensor,
    offset: tl.tensor,
    ADDRESS: tl.constexpr,
    ELEMENT: tl.constexpr,
) -> tl.tensor:
    """Pointer to what lies `offset` elements behind an address of the record, one or several."""
    return field(records_ptr, b, ADDRESS).to(tl.pointer_type(ELEMENT)) + offset


@triton.jit
def list_misses(
    missed_ptr: tl.tensor, misses_ptr: tl.tensor, entry: tl.tensor, missing: tl.tensor, room: tl.tensor
) -> tl.tensor:
    """Lists entries that are missing behind those that others have listed; 1 for each that has found no room."""
    missing = missing.to(tl.int32)
    number = tl.sum(missing, 0)
    base = tl.atomic_add(missed_ptr, number, mask=number > 0, sem="relaxed")
    place = base + tl.cumsum(missing, 0) - missing
    tl.store(misses_ptr + place, entry, mask=(missing > 0) & (place < room))
    return tl.where(place < room, 0, missing)


@triton.jit
def tally(tally_ptr: tl.tensor, counted: tl.tensor, cached: tl.tensor) -> None:
    """Adds up what a program counted."""
    number = tl.sum(counted, 0).to(tl.int64)
    tl.atomic_add(tally_ptr, number, mask=cached & (number > 0), sem="relaxed")


@triton.jit(do_not_specialize=["width", "room", "miss_room"])
def find_kernel(
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    misses_ptr: tl.tensor,
    missed_ptr: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    miss_room: tl.tensor,
    HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row)."""
    row = tl.program_id(1)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    first, end, always = context_entries(records_ptr, b)
    sets = field(records_ptr, b, _SETS)
    slots = head * sets * _WAYS
    tags_ptr = tl.multiple_of(head_pointer(records_ptr, b, slots, _TAGS, tl.int32), 16)
    stamps_ptr = head_pointer(records_ptr, b, slots, _STAMPS, tl.int32)
    tallies_ptr = head_pointer(records_ptr, b, head * _TALLY, _TALLIES, tl.int64)
    ids_ptr += row.to(tl.int64) * SEGMENTS * width
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    misses_ptr += row.to(tl.int64) * miss_room
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
    wanted = tl.zeros([TILE], tl.int32)
    reused = tl.zeros([TILE], tl.int32)
    passed = tl.zeros([TILE], tl.int32)
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
        passed += list_misses(missed_ptr + row, misses_ptr, entry, sought & (way == _WAYS), miss_room)
        wanted += sought.to(tl.int32)
        reused += there.to(tl.int32)
    tally(tallies_ptr + _WANTED, wanted, cached)
    tally(tallies_ptr + _REUSED, reused, cached)
    tally(tallies_ptr + _BYPASSED, passed, cached)


@triton.jit
def claim_slots(
    stamps_ptr: tl.tensor, pending: tl.tensor, step: tl.tensor, TILE: tl.constexpr, WAYS: tl.constexpr
) -> tl.tensor:
    """The way that each pending key now owns, of the set whose stamps begin at its pointer, or -1.

    step: the number of every key's step.
    """
    ways = tl.arange(0, WAYS)
    from_ptr = stamps_ptr[:, None] + ways[None, :]
    stamps = tl.load(from_ptr, mask=pending[:, None], other=0, cache_modifier=".cg")
    owned = tl.full([TILE], -1, tl.int32)
    while tl.max(pending.to(tl.int32), 0) > 0:
        oldest = tl.min(stamps, 1)
        way = tl.min(tl.where(stamps == oldest[:, None], ways[None, :], WAYS), 1)
        trying = pending & (oldest < step)
        before = tl.atomic_max(stamps_ptr + way, step, mask=trying, sem="relaxed")
        owned = tl.where(trying & (before < step), way, owned)
        # Whatever came of it, this way is taken now.
        stamps = tl.where(ways[None, :] == way[:, None], step[:, None], stamps)
        pending = trying & (owned < 0)
    return owned


@triton.jit(do_not_specialize=["room", "miss_room", "rows"])
def claim_kernel(
    records_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    misses_ptr: tl.tensor,
    missed_ptr: tl.tensor,
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    count_ptr: tl.tensor,
    room: tl.tensor,
    miss_room: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    ROWS_TILE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Programs take turns over the misses of all rows, row after row."""
    every = tl.arange(0, ROWS_TILE)
    wait_for_launch(CHAINED)
    missed = tl.minimum(tl.load(missed_ptr + every, mask=every < rows, other=0), miss_room)
    ends = tl.cumsum(missed, 0)
    total = tl.sum(missed, 0)
    if tl.program_id(0) == 0:
        tl.store(count_ptr, total)
        end_steps(records_ptr, every, every < rows, HEADS)
    for at in range(tl.program_id(0) * TILE, total, tl.num_programs(0) * TILE):
        item = at + tl.arange(0, TILE)
        inside = item < total
        passed = (item[:, None] >= ends[None, :]).to(tl.int32)
        row = tl.where(inside, tl.sum(passed, 1), 0)
        place = item - tl.sum(passed * missed[None, :], 1)
        entry = tl.load(misses_ptr + row.to(tl.int64) * miss_room + place, mask=inside, other=0)
        at_entry = row.to(tl.int64) * room + entry
        ids = tl.load(joined_ptr + at_entry, mask=inside, other=0)
        b = row // HEADS
        head = (row % HEADS).to(tl.int64)
        sets = field(records_ptr, b, _SETS)
        set_slots = first_slots(ids, sets, _WAYS)
        slots = head * sets * _WAYS
        tallies_ptr = head_pointer(records_ptr, b, head * _TALLY, _TALLIES, tl.int64)
        step = tl.load(tallies_ptr + _CURRENT, mask=inside, other=0).to(tl.int32)
        stamps_ptr = head_pointer(records_ptr, b, slots + set_slots, _STAMPS, tl.int32)
        way = claim_slots(tl.multiple_of(stamps_ptr, 16), inside, step, TILE, _WAYS)
        owner = way >= 0
        slot = set_slots + way
        tl.store(head_pointer(records_ptr, b, slots + slot, _TAGS, tl.int32), ids + 1, mask=owner)
        tl.store(locations_ptr + at_entry, slot, mask=owner)
        source = field(records_ptr, b, _KV) + head * field(records_ptr, b, _KV + 1)
        target = field(records_ptr, b, _SLOTS) + head * field(records_ptr, b, _SLOTS + 1)
        tl.store(sources_ptr + item, source + ids.to(tl.int64) * ROW_BYTES, mask=inside)
        target += slot.to(tl.int64) * ROW_BYTES
        tl.store(targets_ptr + item, tl.where(owner, target, 0), mask=inside)
        one = tl.full([TILE], 1, tl.int64)
        tl.atomic_add(tallies_ptr + _BYPASSED, one, mask=inside & (way < 0), sem="relaxed")


@triton.jit
def end_steps(records_ptr: tl.tensor, row: tl.tensor, present: tl.tensor, HEADS: tl.constexpr) -> None:
    """Counts the step of every row that has a cache as done."""
    row = tl.where(present, row, 0)
    b = row // HEADS
    tallies_ptr = head_pointer(records_ptr, b, (row % HEADS).to(tl.int64) * _TALLY, _TALLIES, tl.int64)
    cached = present & (field(records_ptr, b, _SETS) > 0)
    current = tl.load(tallies_ptr + _CURRENT, mask=cached, other=0)
    tl.store(tallies_ptr + _DONE, current, mask=cached)
