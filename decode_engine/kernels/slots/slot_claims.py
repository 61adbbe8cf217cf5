"""Reads missing rows from host memory, and claims slots for them meanwhile: the second launch of `slot_fetch`.

A row over PCIe takes several times as long as the claim of a slot. So readers ask for their rows at once, while
claimers decide where these go; when a row is there, so is its target. (One program that did both would wait for its
rows before it claims: of a warp's loads that are under way around a loop, hardware can only await all.)

Where that would read many rows in vain, since the cache is too small for what steps want, readers wait for the claim
first: misses of a cache, layer and KV head are marked so when its last step found no slot for a key.

Shape legend: as in `slot_fetch`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.launches import wait_for_launch
from decode_engine.kernels.record_fields import (
    SETS,
    SLOTS,
    STAMPS,
    TAGS,
    TALLIES,
    aligned_pointer,
    field,
    row_of,
)
from decode_engine.kernels.slots import gather_rows
from decode_engine.kernels.slots.gather_rows import row_words
from decode_engine.kernels.slots.slot_cache import BYPASSED, CROWDED, CURRENT, DONE, TALLY_COUNT, WAYS
from decode_engine.kernels.slots.slot_lookup import (
    CLAIM_FIRST,
    ENTRY_BITS,
    LAST_TURN,
    TURN,
    first_slots,
    marks_of,
    unmark,
)

NOWHERE = 1
"""Target of a miss that found no slot; no address, which are multiples of 16."""

_TALLY = tl.constexpr(TALLY_COUNT)
_DONE = tl.constexpr(DONE)
_CURRENT = tl.constexpr(CURRENT)
_BYPASSED = tl.constexpr(BYPASSED)
_CROWDED = tl.constexpr(CROWDED)
_WAYS = tl.constexpr(WAYS)
_TURN = tl.constexpr(TURN)
_LAST_TURN = tl.constexpr(LAST_TURN)
_ENTRY_BITS = tl.constexpr(ENTRY_BITS)
_ENTRY_MASK = tl.constexpr(2**ENTRY_BITS - 1)
_CLAIM_FIRST = tl.constexpr(CLAIM_FIRST)
_ADDRESS = tl.constexpr(~CLAIM_FIRST)
_NOWHERE = tl.constexpr(NOWHERE)
_WORD = tl.constexpr(gather_rows.WORD)


@triton.jit
def claim_slots(
    stamps_ptr: tl.tensor,
    ids: tl.tensor,
    sets: tl.tensor,
    pending: tl.tensor,
    step: tl.tensor,
    TILE: tl.constexpr,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The slot that each pending key, in a step of that number, now owns of those whose stamps begin there, or -1."""
    one, other = first_slots(ids, sets, WAYS)
    ways = tl.arange(0, WAYS)[None, :]
    stamps = tl.load(
        stamps_ptr[:, None] + (one[:, None] + ways), mask=pending[:, None], other=0, cache_modifier=".cg"
    )
    other_stamps = tl.load(
        stamps_ptr[:, None] + (other[:, None] + ways), mask=pending[:, None], other=0, cache_modifier=".cg"
    )
    # Ways of both sets take turns.
    stamps = tl.reshape(tl.join(stamps, other_stamps), [TILE, 2 * WAYS])
    ways = tl.arange(0, 2 * WAYS)[None, :]
    offset = ids % (2 * WAYS)
    turned = (ways + offset[:, None]) % (2 * WAYS)
    owned = tl.full([TILE], -1, tl.int32)
    while tl.max(pending.to(tl.int32), 0) > 0:
        oldest = tl.min(stamps, 1)
        turn = tl.min(tl.where(stamps == oldest[:, None], turned, 2 * WAYS), 1)
        way = (turn + 2 * WAYS - offset) % (2 * WAYS)
        slot = tl.where(way % 2 == 0, one, other) + way // 2
        trying = pending & (oldest < step)
        before = tl.atomic_max(stamps_ptr + slot, step, mask=trying, sem="relaxed")
        owned = tl.where(trying & (before < step), slot, owned)
        # Whatever came of it, this way is taken now.
        stamps = tl.where(ways == way[:, None], step[:, None], stamps)
        pending = trying & (owned < 0)
    return owned


@triton.jit
def misses_of_step(counts_ptr: tl.tensor, misses_room: tl.tensor) -> tl.tensor:
    """How many are listed, and which of the two counts said so."""
    turn = tl.load(counts_ptr + _TURN, cache_modifier=".cg")
    even = tl.load(counts_ptr, cache_modifier=".cg")
    odd = tl.load(counts_ptr + 1, cache_modifier=".cg")
    return tl.minimum(tl.where(turn == 0, even, odd), misses_room), turn


@triton.jit
def claim_misses(
    records_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    entries_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    rows: tl.tensor,
    misses_room: tl.tensor,
    room: tl.tensor,
    claimers: tl.tensor,
    HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    ENDED: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Claims slots for a share of the misses, and ends the step of ENDED rows, some perhaps like other programs do."""
    program = tl.program_id(0)
    ended = tl.minimum(program + tl.arange(0, ENDED) * claimers, rows - 1)
    ended = row_of(ended, HEADS, FIRST_HEAD, SOME_HEADS)
    of_head = (ended % HEADS).to(tl.int64) * _TALLY
    ended_ptr = aligned_pointer(records_ptr, ended // HEADS, of_head, TALLIES, tl.int64)
    cached = field(records_ptr, ended // HEADS, SETS) > 0
    wait_for_launch(CHAINED)
    current = tl.load(ended_ptr + _CURRENT, mask=cached, other=0, cache_modifier=".cg")
    count, turn = misses_of_step(counts_ptr, misses_room)
    for at in range(program * TILE, count, claimers * TILE):
        place = at + tl.arange(0, TILE)
        there = place < count
        ids = tl.load(ids_ptr + place, mask=there, other=0, cache_modifier=".cg")
        entries = tl.load(entries_ptr + place, mask=there, other=0, cache_modifier=".cg")
        row = (entries >> _ENTRY_BITS).to(tl.int32)
        b = row // HEADS
        head = (row % HEADS).to(tl.int64)
        sets = field(records_ptr, b, SETS)
        tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
        slots = head * sets * _WAYS
        stamps_ptr = aligned_pointer(records_ptr, b, slots, STAMPS, tl.int32)
        tags_ptr = aligned_pointer(records_ptr, b, slots, TAGS, tl.int32)
        target = field(records_ptr, b, SLOTS) + head * field(records_ptr, b, SLOTS + 1)
        step = tl.load(tallies_ptr + _CURRENT, mask=there, other=0, cache_modifier=".cg")
        slot = claim_slots(stamps_ptr, ids, sets, there, step.to(tl.int32), TILE, _WAYS)
        owner = slot >= 0
        # Readers wait for this.
        target = tl.where(owner, target + slot.to(tl.int64) * ROW_BYTES, _NOWHERE)
        tl.store(targets_ptr + place, target, mask=there)
        tl.store(tags_ptr + slot, ids + 1, mask=owner)
        at_entry = row.to(tl.int64) * room + (entries & _ENTRY_MASK)
        tl.store(locations_ptr + at_entry, slot, mask=owner)
        if SHARED:
            unmark(marks_of(records_ptr, b, head), ids, there)
        bypassed = there & (slot < 0)
        tl.atomic_add(tallies_ptr + _BYPASSED, tl.full([TILE], 1, tl.int64), mask=bypassed, sem="relaxed")
        tl.store(tallies_ptr + _CROWDED, step, mask=bypassed)
    tl.store(ended_ptr + _DONE, current, mask=cached)
    if program == 0:
        tl.store(counts_ptr + _LAST_TURN, turn)
        tl.store(counts_ptr + (1 - turn), 0)


@triton.jit
def read_misses(
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    misses_room: tl.tensor,
    reader: tl.tensor,
    readers: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Reads a share of the missing rows, TILE in every round, and writes those that have a slot."""
    first = reader * TILE
    place = first + tl.arange(0, TILE)
    wait_for_launch(CHAINED)
    # On their way together: the first misses, whether there are so many or not, and how many there are.
    sources = tl.load(sources_ptr + place, mask=place < misses_room, other=0, cache_modifier=".cg")
    count = misses_of_step(counts_ptr, misses_room)[0]
    for _ in range(first, count, readers * TILE):
        there = place < count
        early = there & ((sources & _CLAIM_FIRST) == 0)
        rows = row_words(sources & _ADDRESS, WORDS)
        words = tl.load(rows, mask=early[:, None], other=0)
        targets = tl.load(targets_ptr + place, mask=there, other=_NOWHERE, volatile=True)
        while tl.min(targets, 0) == 0:
            targets = tl.load(targets_ptr + place, mask=there, other=_NOWHERE, volatile=True)
        # The next addresses arrive while these rows are under way.
        next_place = place + readers * TILE
        next_sources = tl.load(
            sources_ptr + next_place, mask=next_place < count, other=0, cache_modifier=".cg"
        )
        owned = targets != _NOWHERE
        words = tl.load(rows, mask=(owned & (early == 0))[:, None], other=words)
        tl.store(row_words(targets, WORDS), words, mask=owned[:, None])
        place, sources = next_place, next_sources


@triton.jit(do_not_specialize=["claimers", "rows", "misses_room", "room"])
def bring_kernel(
    records_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    miss_sources_ptr: tl.tensor,
    miss_targets_ptr: tl.tensor,
    miss_ids_ptr: tl.tensor,
    miss_entries_ptr: tl.tensor,
    miss_counts_ptr: tl.tensor,
    claimers: tl.tensor,
    rows: tl.tensor,
    misses_room: tl.tensor,
    room: tl.tensor,
    HEADS: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    SOME_HEADS: tl.constexpr,
    ENDED: tl.constexpr,
    WORDS: tl.constexpr,
    CLAIM_TILE: tl.constexpr,
    READ_TILE: tl.constexpr,
    SHARED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The first `claimers` programs claim, the others read. rows: of the launch that found."""
    if tl.program_id(0) < claimers:
        claim_misses(
            records_ptr, locations_ptr, miss_targets_ptr, miss_ids_ptr, miss_entries_ptr, miss_counts_ptr, rows,
            misses_room, room, claimers, HEADS, FIRST_HEAD, SOME_HEADS, ENDED, WORDS * _WORD, CLAIM_TILE, SHARED,
            CHAINED,
        )  # fmt: skip
    else:
        read_misses(
            miss_sources_ptr, miss_targets_ptr, miss_counts_ptr, misses_room, tl.program_id(0) - claimers,
            tl.num_programs(0) - claimers, WORDS, READ_TILE, CHAINED,
        )  # fmt: skip
