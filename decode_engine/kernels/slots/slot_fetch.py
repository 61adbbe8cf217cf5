"""Finds the rows that a step attends to in its slot caches, and fetches those that are missing from host memory.

Many rows that a step attends to in the context (listed by searches, sinks, recent window) were attended in the step
before. Which ones are there is found on the device, in launches of fixed shape, for a graph that serves any step:

1. find: joins the segments of every row's list, looks every key up, stamps the slots of those that are
   there with the step's number, and puts the others on one list of misses, each once.
2. bring: some programs read the missing rows from host memory. Meanwhile others claim slots for them:
   of the two sets of a key, those that this step does not use, the one used longest ago first. A row that has arrived
   is written where its claim says.
3. settle, in batches of several sessions: rows that a session misses and another one brings are looked
   up again.

Then every entry has a location: a slot, or -1 for "read it at its own address" where no slot was found. Either way
attention reads the same bytes, so that its result is the same bit for bit.

Why this is right. The cache of a context, layer and KV head is set-associative (`slot_cache`). Steps are counted from
1 per cache, layer and KV head, so every stamp is at most the step's number s, and equal to it exactly if the step uses
the slot.

- Programs of find only read tags, and write s into stamps. Several entries may stamp a slot, always with s, so the
  order does not matter. Every miss has a place of its own on the list, by an atomic sum.
- bring begins when find has ended: all slots that hold a wanted row carry s and cannot be evicted. A claim is an atomic
  maximum of the stamp and s; whoever is told a number below s owns the slot for this step, and everyone else is told s
  and tries another way. So every slot has at most one new owner, whichever programs, or threads of one program, claim
  slots of one set at once. Stamps that were read a moment ago may be outdated in one direction only: a slot that seemed
  free is taken. A key gives up when all ways of its sets are taken. Only owners write tags and locations, which no
  program of bring reads. So every missing key is fetched, into the way of its sets used longest ago, unless the step
  uses all of these; who then finds one, and so how many do, depends on the race, and the result does not. Among ways
  used equally long ago every key begins at another one, so that few claims fail.
- A miss has one reader and one claimer. All that the one tells the other is a number, the target, 0 until the claim is
  decided: it is written once and read until it is not 0, so no order of other memory accesses matters. Claimers wait
  for nobody, and come first among a launch's programs, which begin in that order: those that a reader waits for run.
- A key that several sessions of a context miss is on the list once: find sets a bit for it in the cache's marks, and
  who finds the bit set before leaves the key to whoever set it. So it is read once, has one slot, and no tag is there
  twice. Its claimer takes the bit back, and so does find where the list has no more room: between steps there are no
  marks, and one that stayed would only have its key read in place. Settle begins when bring has ended: tags are then
  those of all rows that were brought, and what is not there was not.
- Attention begins when the last of these has ended.
- What one launch reads and changes at once is kept twice: the number of the step (find writes CURRENT and reads DONE,
  bring the other way round), and which count is that of the list of misses (TURN and LAST_TURN likewise: bring sets the
  count to 0 that find did not use, and the next find counts there).

A row over PCIe takes several times as long as the claim of a slot. So readers ask for their rows at once, while
claimers decide where these go; when a row is there, so is its target. (One program that did both would wait for its
rows before it claims: of a warp's loads that are under way around a loop, hardware can only await all.) Where that
would read many rows in vain, since the cache is too small for what steps want, readers wait for the claim first: misses
of a cache, layer and KV head are marked so when its last step found no slot for a key.

Rows of a batch may share a cache, as sessions of one context do. They count one step together.

Cost: 144 bytes per wanted row, most of it tags and from the second-level cache; per missing row 28 bytes on the list,
128 of stamps, and the row over PCIe, which takes the time: PCIe idles only until find has ended. Misses are listed
in the order of the lists inside a tile of find.

A program of find compares a key's tag with those of its two sets. How many misses the list holds is counted twice, in
turns: one count for this step, and one that bringing them sets to 0 meanwhile for the next.

Shape legend: B sequences, H KV heads, R = B * H rows, N keys of the longest context, X programs that look a row's keys
up, C misses that there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.sparse_attention import (
    KeyLists,
    context_entries,
    listed_keys,
    segment_ids,
    share_of,
    with_always,
)
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import (
    KEYS,
    KV,
    MISSED,
    SETS,
    SLOTS,
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
    WORD,
    CopyShape,
    check_shape,
    row_words,
)
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import MARKED, slots_per_head

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
    misses: tl.tensor,
    marks_ptr: tl.tensor,
    room: tl.tensor,
    missing: tl.tensor,
    sources: tl.tensor,
    ids: tl.tensor,
    entries: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Appends missing keys to the list; 1 or 0 for each: left to another session, and found no room there."""
    sources_ptr, targets_ptr, ids_ptr, entries_ptr, count_ptr = misses
    mine = missing
    if K.SHARED:
        mine = mark(marks_ptr, ids, missing)
    listed = mine.to(tl.int32)
    number = tl.sum(listed, 0)
    place = tl.atomic_add(count_ptr, number, mask=number > 0, sem="relaxed")
    place += tl.cumsum(listed, 0) - listed
    fits = mine & (place < room)
    if K.SHARED:
        unmark(marks_ptr, ids, mine & (place >= room))
    tl.store(sources_ptr + place, sources, mask=fits)
    tl.store(targets_ptr + place, tl.zeros_like(sources), mask=fits)
    tl.store(ids_ptr + place, ids, mask=fits)
    tl.store(entries_ptr + place, entries, mask=fits)
    return missing.to(tl.int32) - listed, listed - fits.to(tl.int32)


@triton.jit(do_not_specialize=["misses_room", "width", "room"])
def find_kernel(  # noqa: PLR0915 - what a program does stands in one place
    records_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    misses: tl.tensor,
    found_ptr: tl.tensor,
    misses_room: tl.tensor,
    width: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program per (share of a row's entries but the tail, row). SHARED: rows may be on one context."""
    miss_sources_ptr, miss_targets_ptr, miss_ids_ptr, miss_entries_ptr, miss_counts_ptr = misses
    row = row_of(tl.program_id(1), K.HEADS, K.FIRST_HEAD, K.SOME_HEADS)
    b = row // K.HEADS
    head = (row % K.HEADS).to(tl.int64)
    first, end, always = context_entries(records_ptr, b)
    sets = field(records_ptr, b, SETS)
    cached = sets > 0
    tags_ptr = aligned_pointer(records_ptr, b, head * sets * _WAYS, TAGS, tl.int32)
    stamps_ptr = aligned_pointer(records_ptr, b, head * sets * _WAYS, STAMPS, tl.int32)
    tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
    marks_ptr = marks_of(records_ptr, b, head)
    source = field(records_ptr, b, KV) + head * field(records_ptr, b, KV + 1)
    ids_ptr += row.to(tl.int64) * K.SEGMENTS * width
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    first_entry = row.to(tl.int64) << _ENTRY_BITS
    wait_for_launch(CHAINED)
    # What all of these say is on its way at once.
    counts = listed_keys(counts_ptr, row, width, K)
    done = tl.load(tallies_ptr + _DONE, mask=cached, other=0)
    crowded = tl.load(tallies_ptr + _CROWDED, mask=cached, other=0)
    turn = 1 - tl.load(miss_counts_ptr + _LAST_TURN)
    step = done + 1
    source += tl.where(crowded == done, _CLAIM_FIRST, 0)
    listed = tl.minimum(tl.sum(counts, 0), room)
    entries = tl.minimum(listed + always, room)
    begin, stop = share_of(entries, K)
    keys = tl.zeros([K.TILE], tl.int32)
    reused = tl.zeros([K.TILE], tl.int32)
    bypassed = tl.zeros([K.TILE], tl.int32)
    for at in range(begin, stop, K.TILE):
        entry = at + tl.arange(0, K.TILE)
        ids = segment_ids(ids_ptr, counts, width, entry, tl.minimum(stop, listed), K)
        ids = with_always(ids, entry, listed, entries, first, end)
        sought = (ids >= 0) & cached
        slot = slots_of(tags_ptr, ids, sets, sought, _WAYS)
        there = slot >= 0
        left, unlisted = list_misses(
            (miss_sources_ptr, miss_targets_ptr, miss_ids_ptr, miss_entries_ptr, miss_counts_ptr + turn), marks_ptr,
            misses_room, sought & (slot < 0), source + ids.to(tl.int64) * K.ROW_BYTES, ids, first_entry + entry,
            K,
        )  # fmt: skip
        bypassed += unlisted
        tl.store(stamps_ptr + slot, tl.zeros([K.TILE], tl.int32) + step.to(tl.int32), mask=there)
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
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Programs as of find, each with the same entries."""
    row = row_of(tl.program_id(1), K.HEADS, K.FIRST_HEAD, K.SOME_HEADS)
    b = row // K.HEADS
    head = (row % K.HEADS).to(tl.int64)
    always = context_entries(records_ptr, b)[2]
    sets = field(records_ptr, b, SETS)
    tags_ptr = aligned_pointer(records_ptr, b, head * sets * _WAYS, TAGS, tl.int32)
    tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
    joined_ptr += row.to(tl.int64) * room
    locations_ptr += row.to(tl.int64) * room
    wait_for_launch(CHAINED)
    counts = listed_keys(counts_ptr, row, width, K)
    entries = tl.minimum(tl.minimum(tl.sum(counts, 0), room) + always, room)
    begin, stop = share_of(entries, K)
    lost = tl.zeros([K.TILE], tl.int32)
    for at in range(begin, stop, K.TILE):
        entry = at + tl.arange(0, K.TILE)
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


_TILE = 32
_FIND_PROGRAMS = 1024
"""Of all rows together."""
_FIND_WARPS = 1
_CLAIM_TILE = 32
"""Misses that a program claims slots for at once."""
_FETCH = CopyShape(programs=132)
_LEAST_MISSES = 4096
"""Of a row that there is room for, unless it has fewer keys: caches of short contexts may be larger than usual."""

NOWHERE = 1
"""Target of a miss that found no slot; no address, which are multiples of 16."""

_ENTRY_MASK = tl.constexpr(2**ENTRY_BITS - 1)
_ADDRESS = tl.constexpr(~CLAIM_FIRST)
_NOWHERE = tl.constexpr(NOWHERE)
_WORD = tl.constexpr(WORD)


class FetchConstants(NamedTuple):
    """What launches are compiled for: KV heads, those whose rows are brought, segments of a list, keys of a tile, bytes
    and words of a row, rows whose step a program ends, misses at a time, and whether rows may be on one context."""

    HEADS: tl.constexpr
    FIRST_HEAD: tl.constexpr
    SOME_HEADS: tl.constexpr
    SEGMENTS: tl.constexpr
    SEGMENTS_TILE: tl.constexpr
    TILE: tl.constexpr
    ROW_BYTES: tl.constexpr
    WORDS: tl.constexpr
    ENDED: tl.constexpr
    CLAIM_TILE: tl.constexpr
    READ_TILE: tl.constexpr
    SHARED: tl.constexpr


@dataclass(frozen=True, slots=True)
class FetchBuffers:
    """What the launches leave each other, shared by all layers.

    locations_RN: [R, N] int32, one for every entry of a row, the listed keys and then those always attended: a slot, or
    -1. Of misses, at most C: sources_C int64, addresses of rows, with a mark where slots are to be claimed first;
    targets_C int64, addresses of slots; ids_C int32, keys; entries_C int64, rows and entries. counts_4: [4] int32, two
    counts of misses, of which one is that of the step, and which one; zeros to begin with.
    """

    locations_RN: Tensor
    sources_C: Tensor
    targets_C: Tensor
    ids_C: Tensor
    entries_C: Tensor
    counts_4: Tensor

    @staticmethod
    def allocate(rows: int, keys: int, device: torch.device | str) -> FetchBuffers:
        """keys: of the longest context. There is room for as many misses as its caches have slots."""
        room = rows * min(keys, max(_LEAST_MISSES, slots_per_head(keys)))
        return FetchBuffers(
            torch.empty(rows, keys, dtype=torch.int32, device=device),
            torch.zeros(room, dtype=torch.int64, device=device),
            torch.zeros(room, dtype=torch.int64, device=device),
            torch.zeros(room, dtype=torch.int32, device=device),
            torch.zeros(room, dtype=torch.int64, device=device),
            torch.zeros(4, dtype=torch.int32, device=device),
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
    row_bytes: of keys and values of one token and KV head. shape: of the programs that read host memory. Rows of
    sessions without a cache stay where they are, and so do misses beyond the room for them. found_RX2: [R, X, 2] int32,
    set to how many of a row's keys each of the X `find_programs` found in no slot, and in one, or that another session
    brings into one. heads: of KV heads, those whose rows are brought, all by default; of the others nothing is read or
    set. Fixed launches, which never wait for the device.
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
    some_rows = len(records_BF) * len(some)
    if found_RX2 is not None and (found_RX2.shape != (rows, programs, 2) or not found_RX2.is_contiguous()):
        raise InvalidArgumentError(
            f"counts of found keys have shape {tuple(found_RX2.shape)}, expected [{rows}, {programs}, 2] in one piece"
        )
    shape = shape or _FETCH
    check_shape(row_bytes, shape)
    shared = len(records_BF) > 1
    # As many claims a round as rows that are read.
    claimers = triton.cdiv(shape.programs * shape.tile, _CLAIM_TILE)
    ended = triton.next_power_of_2(triton.cdiv(some_rows, claimers))
    segments_tile, words = triton.next_power_of_2(segments), row_bytes // WORD
    constants = (
        all_heads, some.start, len(some), segments, segments_tile, _TILE, row_bytes, words, ended, _CLAIM_TILE,
        shape.tile, shared,
    )  # fmt: skip
    finding = {"num_warps": _FIND_WARPS, "K": FetchConstants(*map(tl.constexpr, constants))}
    finding |= chained(records_BF.device)
    misses = (buffers.sources_C, buffers.targets_C, buffers.ids_C, buffers.entries_C, buffers.counts_4)
    find_kernel[(programs, some_rows)](
        records_BF,
        lists.ids_RPW,
        lists.counts_RP,
        joined_RN,
        buffers.locations_RN,
        misses,
        found_RX2,
        len(buffers.sources_C),
        width,
        room,
        **finding,
    )
    bring_kernel[(claimers + shape.programs,)](
        records_BF,
        buffers.locations_RN,
        misses,
        claimers,
        some_rows,
        len(buffers.sources_C),
        room,
        **(finding | {"num_warps": shape.warps}),
    )
    if shared:
        settle_kernel[(programs, some_rows)](
            records_BF, lists.counts_RP, joined_RN, buffers.locations_RN, found_RX2, width, room, **finding
        )
    return buffers.locations_RN


def find_programs(rows: int, keys: int) -> int:
    """Programs that look up the keys of each of so many rows. keys: of the longest context."""
    return max(2, min(-(-keys // _TILE), _FIND_PROGRAMS // rows))


@triton.jit
def claim_slots(
    stamps_ptr: tl.tensor,
    ids: tl.tensor,
    sets: tl.tensor,
    pending: tl.tensor,
    step: tl.tensor,
    K: tl.constexpr,
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
    stamps = tl.reshape(tl.join(stamps, other_stamps), [K.CLAIM_TILE, 2 * WAYS])
    ways = tl.arange(0, 2 * WAYS)[None, :]
    offset = ids % (2 * WAYS)
    turned = (ways + offset[:, None]) % (2 * WAYS)
    owned = tl.full([K.CLAIM_TILE], -1, tl.int32)
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
    misses: tl.tensor,
    rows: tl.tensor,
    misses_room: tl.tensor,
    room: tl.tensor,
    claimers: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Claims slots for a share of the misses, and ends the step of ENDED rows, some perhaps like other programs do."""
    targets_ptr, ids_ptr, entries_ptr, counts_ptr = misses
    program = tl.program_id(0)
    ended = tl.minimum(program + tl.arange(0, K.ENDED) * claimers, rows - 1)
    ended = row_of(ended, K.HEADS, K.FIRST_HEAD, K.SOME_HEADS)
    of_head = (ended % K.HEADS).to(tl.int64) * _TALLY
    ended_ptr = aligned_pointer(records_ptr, ended // K.HEADS, of_head, TALLIES, tl.int64)
    cached = field(records_ptr, ended // K.HEADS, SETS) > 0
    wait_for_launch(CHAINED)
    current = tl.load(ended_ptr + _CURRENT, mask=cached, other=0, cache_modifier=".cg")
    count, turn = misses_of_step(counts_ptr, misses_room)
    for at in range(program * K.CLAIM_TILE, count, claimers * K.CLAIM_TILE):
        place = at + tl.arange(0, K.CLAIM_TILE)
        there = place < count
        ids = tl.load(ids_ptr + place, mask=there, other=0, cache_modifier=".cg")
        entries = tl.load(entries_ptr + place, mask=there, other=0, cache_modifier=".cg")
        row = (entries >> _ENTRY_BITS).to(tl.int32)
        b = row // K.HEADS
        head = (row % K.HEADS).to(tl.int64)
        sets = field(records_ptr, b, SETS)
        tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
        slots = head * sets * _WAYS
        stamps_ptr = aligned_pointer(records_ptr, b, slots, STAMPS, tl.int32)
        tags_ptr = aligned_pointer(records_ptr, b, slots, TAGS, tl.int32)
        target = field(records_ptr, b, SLOTS) + head * field(records_ptr, b, SLOTS + 1)
        step = tl.load(tallies_ptr + _CURRENT, mask=there, other=0, cache_modifier=".cg")
        slot = claim_slots(stamps_ptr, ids, sets, there, step.to(tl.int32), K, _WAYS)
        owner = slot >= 0
        # Readers wait for this.
        target = tl.where(owner, target + slot.to(tl.int64) * K.ROW_BYTES, _NOWHERE)
        tl.store(targets_ptr + place, target, mask=there)
        tl.store(tags_ptr + slot, ids + 1, mask=owner)
        at_entry = row.to(tl.int64) * room + (entries & _ENTRY_MASK)
        tl.store(locations_ptr + at_entry, slot, mask=owner)
        if K.SHARED:
            unmark(marks_of(records_ptr, b, head), ids, there)
        bypassed = there & (slot < 0)
        tl.atomic_add(
            tallies_ptr + _BYPASSED, tl.full([K.CLAIM_TILE], 1, tl.int64), mask=bypassed, sem="relaxed"
        )
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
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Reads a share of the missing rows, TILE in every round, and writes those that have a slot."""
    first = reader * K.READ_TILE
    place = first + tl.arange(0, K.READ_TILE)
    wait_for_launch(CHAINED)
    # On their way together: the first misses, whether there are so many or not, and how many there are.
    sources = tl.load(sources_ptr + place, mask=place < misses_room, other=0, cache_modifier=".cg")
    count = misses_of_step(counts_ptr, misses_room)[0]
    for _ in range(first, count, readers * K.READ_TILE):
        there = place < count
        early = there & ((sources & _CLAIM_FIRST) == 0)
        rows = row_words(sources & _ADDRESS, K.WORDS)
        words = tl.load(rows, mask=early[:, None], other=0)
        targets = tl.load(targets_ptr + place, mask=there, other=_NOWHERE, volatile=True)
        while tl.min(targets, 0) == 0:
            targets = tl.load(targets_ptr + place, mask=there, other=_NOWHERE, volatile=True)
        # The next addresses arrive while these rows are under way.
        next_place = place + readers * K.READ_TILE
        next_sources = tl.load(
            sources_ptr + next_place, mask=next_place < count, other=0, cache_modifier=".cg"
        )
        owned = targets != _NOWHERE
        words = tl.load(rows, mask=(owned & (early == 0))[:, None], other=words)
        tl.store(row_words(targets, K.WORDS), words, mask=owned[:, None])
        place, sources = next_place, next_sources


@triton.jit(do_not_specialize=["claimers", "rows", "misses_room", "room"])
def bring_kernel(
    records_ptr: tl.tensor,
    locations_ptr: tl.tensor,
    misses: tl.tensor,
    claimers: tl.tensor,
    rows: tl.tensor,
    misses_room: tl.tensor,
    room: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """The first `claimers` programs claim, the others read. rows: of the launch that found."""
    miss_sources_ptr, miss_targets_ptr, miss_ids_ptr, miss_entries_ptr, miss_counts_ptr = misses
    if tl.program_id(0) < claimers:
        claim_misses(
            records_ptr, locations_ptr, (miss_targets_ptr, miss_ids_ptr, miss_entries_ptr, miss_counts_ptr), rows,
            misses_room, room, claimers, K, CHAINED,
        )  # fmt: skip
    else:
        read_misses(
            miss_sources_ptr, miss_targets_ptr, miss_counts_ptr, misses_room, tl.program_id(0) - claimers,
            tl.num_programs(0) - claimers, K, CHAINED,
        )  # fmt: skip
