"""Looks a step's rows up in slot caches: the first launch of `slot_fetch`, which lists missing ones, and the last.

A program takes the ids of a tile of keys from the segments of their row's list, compares the tags of their two sets,
stamps the slots of those that are there, and appends the others to the one list of misses. How many that list holds is
counted twice, in turns: one count for this step, and one that bringing them sets to 0 meanwhile for the next.

Where a batch may have several sessions on a context, whoever is the first to miss a key marks it, and it alone lists
the key; the others leave it to that one, and find its slot in the last launch, `settle_kernel`.

Shape legend: as in `slot_fetch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.attention.key_lists import (
    context_entries,
    listed_keys,
    segment_ids,
    share_of,
    with_always,
)
from decode_engine.kernels.launches import wait_for_launch
from decode_engine.kernels.record_fields import (
    KEYS,
    KV,
    MISSED,
    SETS,
    STAMPS,
    TAGS,
    TALLIES,
    aligned_pointer,
    field,
    row_of,
)
from decode_engine.kernels.slots.slot_cache import (
    BYPASSED,
    CROWDED,
    CURRENT,
    DONE,
    HASH,
    OTHER_HASH,
    REUSED,
    TALLY_COUNT,
    WANTED,
    WAYS,
)
from index_store.memory.placement import MARKED

TURN, LAST_TURN = 2, 3
"""Of the numbers that belong to a list of misses, behind its two counts: which of them counts in the step that runs,
and in the one that ended last."""
ENTRY_BITS = 32
"""Of a miss's entry, below its row."""
CLAIM_FIRST = 1
"""Added to a miss's source where a slot is to be claimed before the row is read."""
LEFT = -2
"""Location of a missing key that another session lists, until `settle_kernel` finds its slot."""

_TALLY = tl.constexpr(TALLY_COUNT)
_DONE = tl.constexpr(DONE)
_CURRENT = tl.constexpr(CURRENT)
_WANTED = tl.constexpr(WANTED)
_REUSED = tl.constexpr(REUSED)
_BYPASSED = tl.constexpr(BYPASSED)
_CROWDED = tl.constexpr(CROWDED)
_WAYS = tl.constexpr(WAYS)
_HASH = tl.constexpr(HASH)
_OTHER_HASH = tl.constexpr(OTHER_HASH)
_TURN = tl.constexpr(TURN)
_LAST_TURN = tl.constexpr(LAST_TURN)
_ENTRY_BITS = tl.constexpr(ENTRY_BITS)
_CLAIM_FIRST = tl.constexpr(CLAIM_FIRST)
_LEFT = tl.constexpr(LEFT)
_MARKED = tl.constexpr(MARKED)


@triton.jit
def first_slots(ids: tl.tensor, sets: tl.tensor, WAYS: tl.constexpr) -> tl.tensor:
    """The first slots of both sets of every key, by multiplicative hashes."""
    one = (ids.to(tl.int64) * _HASH) & 0xFFFFFFFF
    other = (ids.to(tl.int64) * _OTHER_HASH) & 0xFFFFFFFF
    return ((one * sets) >> 32).to(tl.int32) * WAYS, ((other * sets) >> 32).to(tl.int32) * WAYS


@triton.jit
def add_to_tally(tally_ptr: tl.tensor, number: tl.tensor, cached: tl.tensor) -> None:
    """Adds what a program counted."""
    tl.atomic_add(tally_ptr, number.to(tl.int64), mask=cached & (number != 0), sem="relaxed")


@triton.jit
def tally(
    tallies_ptr: tl.tensor, wanted: tl.tensor, found: tl.tensor, bypassed: tl.tensor, cached: tl.tensor
) -> None:
    """Adds up rows."""
    add_to_tally(tallies_ptr + _WANTED, wanted, cached)
    add_to_tally(tallies_ptr + _REUSED, found, cached)
    add_to_tally(tallies_ptr + _BYPASSED, bypassed, cached)


@triton.jit
def store_pair(pairs_ptr: tl.tensor, row: tl.tensor, one: tl.tensor, other: tl.tensor) -> None:
    """Stores two numbers for this program of a row."""
    pairs_ptr += (row * tl.num_programs(0) + tl.program_id(0)) * 2
    tl.store(pairs_ptr, one)
    tl.store(pairs_ptr + 1, other)


@triton.jit
def slots_of(
    tags_ptr: tl.tensor, ids: tl.tensor, sets: tl.tensor, sought: tl.tensor, WAYS: tl.constexpr
) -> tl.tensor:
    """The slot in which each sought key is, or -1."""
    one, other = first_slots(ids, sets, WAYS)
    one = one[:, None] + tl.arange(0, WAYS)[None, :]
    other = other[:, None] + tl.arange(0, WAYS)[None, :]
    tags = tl.load(tags_ptr + one, mask=sought[:, None], other=0, cache_modifier=".cg")
    other_tags = tl.load(tags_ptr + other, mask=sought[:, None], other=0, cache_modifier=".cg")
    tag = (ids + 1)[:, None]
    at = tl.maximum(tl.where(tags == tag, one, -1), tl.where(other_tags == tag, other, -1))
    return tl.where(sought, tl.max(at, 1), -1)


@triton.jit
def marks_of(records_ptr: tl.tensor, b: tl.tensor, head: tl.tensor) -> tl.tensor:
    """Pointer to the marks of a KV head's keys."""
    words = tl.cdiv(field(records_ptr, b, KEYS), _MARKED)
    return aligned_pointer(records_ptr, b, head * words, MISSED, tl.int32)


@triton.jit
def mark(marks_ptr: tl.tensor, ids: tl.tensor, missing: tl.tensor) -> tl.tensor:
    """Marks missing keys; which of them nobody had marked before."""
    bit = tl.full(ids.shape, 1, tl.int32) << (ids & (_MARKED - 1))
    before = tl.atomic_or(marks_ptr + ids // _MARKED, bit, mask=missing, sem="relaxed")
    return missing & ((before & bit) == 0)


@triton.jit
def unmark(marks_ptr: tl.tensor, ids: tl.tensor, marked: tl.tensor) -> None:
    """Takes back what `mark` did. marks_ptr: of all keys, or of each."""
    bit = tl.full(ids.shape, 1, tl.int32) << (ids & (_MARKED - 1))
    tl.atomic_and(marks_ptr + ids // _MARKED, ~bit, mask=marked, sem="relaxed")


@triton.jit
def list_misses(
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    count_ptr: tl.tensor,
    marks_ptr: tl.tensor,
    room: tl.tensor,
    missing: tl.tensor,
    sources: tl.tensor,
    ids: tl.tensor,
    entries: tl.tensor,
    SHARED: tl.constexpr,
) -> tl.tensor:
    """Appends missing keys to the list; 1 or 0 for each: left to another session, and found no room there."""
    mine = missing
    if SHARED:
        mine = mark(marks_ptr, ids, missing)
    listed = mine.to(tl.int32)
    number = tl.sum(listed, 0)
    place = tl.atomic_add(count_ptr, number, mask=number > 0, sem="relaxed")
    place += tl.cumsum(listed, 0) - listed
    fits = mine & (place < room)
    if SHARED:
        unmark(marks_ptr, ids, mine & (place >= room))
    tl.store(sources_ptr + place, sources, mask=fits)
    tl.store(targets_ptr + place, tl.zeros_like(sources), mask=fits)
    tl.store(ids_ptr + place, ids, mask=fits)
    tl.store(entries_ptr + place, entries, mask=fits)
    return missing.to(tl.int32) - listed, listed - fits.to(tl.int32)


@triton.jit(do_not_specialize=["misses_room", "width", "room"])
def find_kernel(
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    miss_sources_ptr: tl.tensor,
    miss_targets_ptr: tl.tensor,
    miss_ids_ptr: tl.tensor,
    miss_entries_ptr: tl.tensor,
    miss_counts_ptr: tl.tensor,
    found_ptr: tl.tensor,
    misses_room: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENTS_TILE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row). SHARED: rows may be on one context."""
    row = row_of(tl.program_id(1), HEADS, FIRST_HEAD, SOME_HEADS)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    first, end, always = context_entries(records_ptr, b)
    sets = field(records_ptr, b, SETS)
    cached = sets > 0
    tags_ptr = aligned_pointer(records_ptr, b, head * sets * _WAYS, TAGS, tl.int32)
    stamps_ptr = aligned_pointer(records_ptr, b, head * sets * _WAYS, STAMPS, tl.int32)
    tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
    marks_ptr = marks_of(records_ptr, b, head)
    source = field(records_ptr, b, KV) + head * field(records_ptr, b, KV + 1)
    ids_ptr += row.to(tl.int64) * SEGMENTS * width
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    first_entry = row.to(tl.int64) << _ENTRY_BITS
    wait_for_launch(CHAINED)
    # What all of these say is on its way at once.
    counts = listed_keys(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    done = tl.load(tallies_ptr + _DONE, mask=cached, other=0)
    crowded = tl.load(tallies_ptr + _CROWDED, mask=cached, other=0)
    turn = 1 - tl.load(miss_counts_ptr + _LAST_TURN)
    step = done + 1
    source += tl.where(crowded == done, _CLAIM_FIRST, 0)
    listed = tl.minimum(tl.sum(counts, 0), room)
    entries = tl.minimum(listed + always, room)
    begin, stop = share_of(entries, TILE)
    keys = tl.zeros([TILE], tl.int32)
    reused = tl.zeros([TILE], tl.int32)
    bypassed = tl.zeros([TILE], tl.int32)
    for at in range(begin, stop, TILE):
        entry = at + tl.arange(0, TILE)
        ids = segment_ids(ids_ptr, counts, width, entry, tl.minimum(stop, listed), SEGMENTS)
        ids = with_always(ids, entry, listed, entries, first, end)
        sought = (ids >= 0) & cached
        slot = slots_of(tags_ptr, ids, sets, sought, _WAYS)
        there = slot >= 0
        left, unlisted = list_misses(
            miss_sources_ptr, miss_targets_ptr, miss_ids_ptr, miss_entries_ptr, miss_counts_ptr + turn, marks_ptr,
            misses_room, sought & (slot < 0), source + ids.to(tl.int64) * ROW_BYTES, ids, first_entry + entry, SHARED,
        )  # fmt: skip
        bypassed += unlisted
        tl.store(stamps_ptr + slot, tl.zeros([TILE], tl.int32) + step.to(tl.int32), mask=there)
        tl.store(locations_ptr + entry, tl.where(left > 0, _LEFT, slot), mask=entry < stop)
        tl.store(joined_ptr + entry, ids, mask=entry < stop)
        keys += (ids >= 0).to(tl.int32)
        reused += there.to(tl.int32) + left
    wanted = tl.sum(keys, 0)
    found = tl.sum(reused, 0)
    if found_ptr is not None:
        # Behind entries of -1 there may be no room for all keys: attention reads the others from host memory.
        beyond = tl.where(tl.program_id(0) == 0, listed + always - entries, 0)
        store_pair(found_ptr, row, wanted - found + beyond, found)
    tl.store(tallies_ptr + _CURRENT, step, mask=cached & (tl.program_id(0) == 0))
    tl.store(miss_counts_ptr + _TURN, turn, mask=(tl.program_id(0) == 0) & (tl.program_id(1) == 0))
    tally(tallies_ptr, wanted, found, tl.sum(bypassed, 0), cached)


@triton.jit(do_not_specialize=["width", "room"])
def settle_kernel(
    records_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
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
    """Programs as of find, each with the same entries."""
    row = row_of(tl.program_id(1), HEADS, FIRST_HEAD, SOME_HEADS)
    b = row // HEADS
    head = (row % HEADS).to(tl.int64)
    always = context_entries(records_ptr, b)[2]
    sets = field(records_ptr, b, SETS)
    tags_ptr = aligned_pointer(records_ptr, b, head * sets * _WAYS, TAGS, tl.int32)
    tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    wait_for_launch(CHAINED)
    counts = listed_keys(counts_ptr, row, width, SEGMENTS, SEGMENTS_TILE)
    entries = tl.minimum(tl.minimum(tl.sum(counts, 0), room) + always, room)
    begin, stop = share_of(entries, TILE)
    lost = tl.zeros([TILE], tl.int32)
    for at in range(begin, stop, TILE):
        entry = at + tl.arange(0, TILE)
        location = tl.load(locations_ptr + entry, mask=entry < stop, other=-1, cache_modifier=".cg")
        left = location == _LEFT
        if tl.max(left.to(tl.int32), 0) > 0:
            ids = tl.load(joined_ptr + entry, mask=left, other=0, cache_modifier=".cg")
            slot = slots_of(tags_ptr, ids, sets, left, _WAYS)
            tl.store(locations_ptr + entry, slot, mask=left)
            lost += (left & (slot < 0)).to(tl.int32)
    # Find took them for found.
    bypassed = tl.sum(lost, 0)
    if bypassed > 0:
        tl.atomic_add(tallies_ptr + _BYPASSED, bypassed.to(tl.int64), sem="relaxed")
        tl.atomic_add(tallies_ptr + _REUSED, -bypassed.to(tl.int64), sem="relaxed")
        if found_ptr is not None:
            found_ptr += (row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 2
            tl.store(found_ptr, tl.load(found_ptr) + bypassed)
            tl.store(found_ptr + 1, tl.load(found_ptr + 1) - bypassed)
