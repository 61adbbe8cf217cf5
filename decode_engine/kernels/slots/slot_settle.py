"""Finds the slots of rows that sessions left to others on their context: the last launch of `slot_fetch`.

Shape legend: as in `slot_fetch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.attention.key_lists import context_entries, listed_keys, share_of
from decode_engine.kernels.launches import wait_for_launch
from decode_engine.kernels.record_fields import SETS, TAGS, TALLIES, aligned_pointer, field, row_of
from decode_engine.kernels.slots.slot_cache import BYPASSED, REUSED, TALLY_COUNT, WAYS
from decode_engine.kernels.slots.slot_lookup import LEFT, slots_of

_TALLY = tl.constexpr(TALLY_COUNT)
_REUSED = tl.constexpr(REUSED)
_BYPASSED = tl.constexpr(BYPASSED)
_WAYS = tl.constexpr(WAYS)
_LEFT = tl.constexpr(LEFT)


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
