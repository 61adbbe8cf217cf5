"""Brings rows into slots while the search that wants them still runs.

A search that goes over a context for tens of microseconds announces each key as it lists it (`list_keys` in
`coarse.warp`). A launch beside it reads what is announced, looks it up, and brings what is missing into the slots:
PCIe is busy from the first keys on, and not only when the search has ended. So it is for the sinks and the recent
window, which are known before. Then the step's own fetch (`slot_fetch`) finds these rows in their slots, as if a step
before had wanted them.

Announcements are hints. What is not announced, or not brought in time, the fetch brings; what was announced in vain is
a row in a slot that nobody asks for. So no result depends on them. A queue is a ring of cells that are never emptied:
each says of which step it is, and the fetch ends the step (`slot_lookup`), which begins when both launches have ended.

Why this disturbs nothing. The launch is part of its step: slots that it uses carry the step's number, as those of the
fetch do, and it claims slots as that one does (`slot_claims`): none that carries this number. A key that is announced
late may lose its slot to an early one, and tags that a program reads may be outdated, where another one claims the slot
at this moment: such keys are left to the fetch, which looks up all of them when this launch has ended. Of programs to
which sessions of one context announce a key, one brings it: whoever marks it first, as in the fetch.

A program waits for the search, which waits for nobody. Where launches do not run side by side, under some profilers, it
gives up after `LIMIT_NS` without a word.

Shape legend: as in `announcements`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.announcements import ROW_SHIFT, TURN_SHIFT, TURNS, Announcements
from decode_engine.kernels.attention.key_lists import context_entries, with_always
from decode_engine.kernels.fields import (
    KEYS,
    KV,
    SETS,
    SLOTS,
    STAMPS,
    TAGS,
    TALLIES,
    aligned_pointer,
    field,
)
from decode_engine.kernels.launches import clock, doze
from decode_engine.kernels.slots import gather_rows
from decode_engine.kernels.slots.gather_rows import row_words
from decode_engine.kernels.slots.slot_cache import CROWDED, DONE, TALLY_COUNT, WAYS
from decode_engine.kernels.slots.slot_lookup import first_slots, marks_of, slots_of
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import MARKED

LIMIT_NS = 5_000_000
"""Many times what a search takes between two keys."""
_TILE_BYTES, _LEAST_ROWS, _MOST_ROWS = 4096, 4, 32
"""That a program has under way, in bytes and rows."""
REGISTERS = 128
"""Of each thread: as many as a program of the search has."""

_TALLY = tl.constexpr(TALLY_COUNT)
_DONE = tl.constexpr(DONE)
_CROWDED = tl.constexpr(CROWDED)
_WAYS = tl.constexpr(WAYS)
_MARKED = tl.constexpr(MARKED)
_WORD = tl.constexpr(gather_rows.WORD)
_ROW_SHIFT = tl.constexpr(ROW_SHIFT)
_TURN_SHIFT = tl.constexpr(TURN_SHIFT)
_TURNS = tl.constexpr(TURNS)
_ROW_MASK = tl.constexpr(2 ** (TURN_SHIFT - ROW_SHIFT) - 1)
_KEY_MASK = tl.constexpr(2**ROW_SHIFT - 1)


@triton.jit
def reserve_shared(ON_DEVICE: tl.constexpr) -> None:
    """Takes as much shared memory as a program of the search.

    How a processor divides its memory between that and the first-level cache is decided while nothing runs on it, by
    what comes first: with a program that needs none, few of the search would have room beside it.
    """
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            "{ .shared .align 16 .b8 room[16384]; mov.u32 $0, room; }",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def own_slot(
    stamps_ptr: tl.tensor,
    stamps: tl.tensor,
    first: tl.tensor,
    ids: tl.tensor,
    missing: tl.tensor,
    step: tl.tensor,
    WAYS: tl.constexpr,
) -> tl.tensor:
    """The slot that each missing key owns from now on, or -1: of a set that begins at slot `first` the one used longest
    ago that the step does not use, after two tries. `slot_claims` says why a slot has one owner.

    stamps: of the set, [TILE, WAYS].
    """
    ways = tl.arange(0, WAYS)[None, :]
    turned = (ways + ids[:, None]) % WAYS
    owned = ids * 0 - 1
    for _ in tl.static_range(2):
        oldest = tl.min(stamps, 1)
        turn = tl.min(tl.where(stamps == oldest[:, None], turned, WAYS), 1)
        way = (turn - ids % WAYS + WAYS) % WAYS
        trying = missing & (owned < 0) & (oldest < step)
        before = tl.atomic_max(stamps_ptr + first + way, step, mask=trying, sem="relaxed")
        owned = tl.where(trying & (before < step), first + way, owned)
        stamps = tl.where(ways == way[:, None], step[:, None], stamps)
    return owned


@triton.jit
def bring(
    records_ptr: tl.tensor,
    brought_ptr: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    there: tl.tensor,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    """Brings those of TILE keys that are in no slot into one, and keeps the slots of the others.

    SHARED: a key may be announced by several sessions on its context.
    """
    row_bytes: tl.constexpr = WORDS * _WORD
    b = rows // HEADS
    head = (rows % HEADS).to(tl.int64)
    sets = field(records_ptr, b, SETS)
    there &= (sets > 0) & (ids >= 0) & (ids < field(records_ptr, b, KEYS).to(tl.int32))
    slots = head * sets * _WAYS
    tags_ptr = aligned_pointer(records_ptr, b, slots, TAGS, tl.int32)
    stamps_ptr = aligned_pointer(records_ptr, b, slots, STAMPS, tl.int32)
    tallies_ptr = aligned_pointer(records_ptr, b, head * _TALLY, TALLIES, tl.int64)
    done = tl.load(tallies_ptr + _DONE, mask=there, other=0)
    crowded = tl.load(tallies_ptr + _CROWDED, mask=there, other=0)
    step = (done + 1).to(tl.int32)
    if SHARED:
        # Whoever marks a key looks it up then: who had it before has brought it.
        marks_ptr = marks_of(records_ptr, b, head) + ids // _MARKED
        bit = tl.full(ids.shape, 1, tl.int32) << (ids & (_MARKED - 1))
        there &= (tl.atomic_or(marks_ptr, bit, mask=there, sem="acquire") & bit) == 0
    # Both are asked for together. Who claims a slot is told what its stamp has become.
    one, other = first_slots(ids, sets, _WAYS)
    first = tl.where(ids // _WAYS % 2 == 0, one, other)
    ways = first[:, None] + tl.arange(0, _WAYS)[None, :]
    stamps = tl.load(stamps_ptr[:, None] + ways, mask=there[:, None], other=0, cache_modifier=".cg")
    slot = slots_of(tags_ptr[:, None], ids, sets, there, _WAYS)
    tl.store(stamps_ptr + slot, step, mask=slot >= 0)
    # Of a cache that is too small rows would be read in vain.
    missing = there & (slot < 0) & ((crowded != done) | (done == 0))
    sources = field(records_ptr, b, KV) + head * field(records_ptr, b, KV + 1) + ids.to(tl.int64) * row_bytes
    words = tl.load(row_words(sources, WORDS), mask=missing[:, None], other=0)
    # Rows come while slots are claimed.
    slot = own_slot(stamps_ptr, stamps, first, ids, missing, step, _WAYS)
    owned = slot >= 0
    targets = field(records_ptr, b, SLOTS) + head * field(records_ptr, b, SLOTS + 1)
    targets += slot.to(tl.int64) * row_bytes
    tl.store(tags_ptr + slot, ids + 1, mask=owned)
    tl.atomic_add(brought_ptr + rows, 1, mask=owned, sem="relaxed")
    tl.store(row_words(targets, WORDS), words, mask=owned[:, None])
    if SHARED:
        tl.debug_barrier()
        tl.atomic_and(marks_ptr, ~bit, mask=there, sem="release")


@triton.jit(do_not_specialize=["rows", "searchers", "limit_ns"])
def early_kernel(
    records_ptr: tl.tensor,
    cells_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    brought_ptr: tl.tensor,
    rows: tl.tensor,
    searchers: tl.tensor,
    limit_ns: tl.tensor,
    QUEUES: tl.constexpr,
    CELLS: tl.constexpr,
    HEADS: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
    ON_DEVICE: tl.constexpr,
) -> None:
    """A reader of a queue: a share of what rows always attend to, then of what is announced until the search has ended.

    searchers: programs of the search.
    """
    reserve_shared(ON_DEVICE)
    reader = tl.program_id(0)
    readers = tl.num_programs(0)
    turn = tl.arange(0, TILE)
    parts = tl.maximum(readers // HEADS, 1)
    for share in range(reader, HEADS * parts, readers):
        for row in range(share % HEADS, rows, HEADS):
            first, end, always = context_entries(records_ptr, row // HEADS)
            for at in range(share // HEADS * TILE, always, parts * TILE):
                entry = at + turn
                ids = with_always(entry, entry, 0, always, first, end)
                bring(
                    records_ptr, brought_ptr, row + turn * 0, ids, entry < always, HEADS, WORDS, TILE, SHARED
                )
    cells_ptr += reader % QUEUES * CELLS
    step = tl.load(counts_ptr + QUEUES + 1) % _TURNS + 1
    # The readers of a queue take turns, a tile each.
    start = reader // QUEUES * TILE
    taken = start * 0
    idle = start.to(tl.int64) * 0
    began = clock(idle, ON_DEVICE)
    # Of the ring, once around: what comes after that was written over what nobody has read.
    most = CELLS // (readers // QUEUES)
    over = rows < 0
    waiting = rows > 0
    while waiting:
        own = taken + turn
        place = start + own // TILE * (readers // QUEUES * TILE) + own % TILE
        # Of a load, even a volatile one, the compiler makes several, in different layouts: cells fill between them.
        found = tl.atomic_or(cells_ptr + (place & (CELLS - 1)), tl.zeros([TILE], tl.int64), sem="relaxed")
        fresh = tl.cumsum((((found >> _TURN_SHIFT) != step) | (own >= most)).to(tl.int32), 0) == 0
        count = tl.sum(fresh.to(tl.int32), 0)
        if count > 0:
            row = (found >> _ROW_SHIFT).to(tl.int32) & _ROW_MASK
            ids = (found & _KEY_MASK).to(tl.int32) - 1
            there = fresh & (row < rows)
            bring(records_ptr, brought_ptr, tl.where(there, row, 0), ids, there, HEADS, WORDS, TILE, SHARED)
            taken += count
            idle = idle * 0
            began = clock(idle, ON_DEVICE)
        else:
            # Once all programs have ended the cells are looked at again: what they have announced is there then.
            idle += 1
            waiting = (over == 0) & (taken < most) & (clock(idle, ON_DEVICE) - began < limit_ns)
            over = tl.atomic_add(counts_ptr + QUEUES, 0, sem="acquire") >= searchers
            if over == 0:
                doze(ON_DEVICE)


def bring_early(
    records_BF: Tensor,
    announcements: Announcements,
    row_bytes: int,
    searchers: int,
    limit_ns: int = LIMIT_NS,
) -> None:
    """Brings what is always attended to, and what a search announces meanwhile, into the slots of every session.

    To be launched on a stream beside that of the search, which does not wait for it, and before it: where launches run
    one after another, as in Triton's interpreter, behind it. searchers: programs of the search, each of which says when
    it has ended. limit_ns: for how long nothing may be announced. row_bytes: of keys and values of one token and KV
    head. A fixed launch, which never waits for the device. Raises InvalidArgumentError for queues of too few cells.
    """
    rows, tile = len(announcements.brought_R), min(_MOST_ROWS, max(_LEAST_ROWS, _TILE_BYTES // row_bytes))
    if announcements.readers // announcements.queues * tile > announcements.cells:
        raise InvalidArgumentError(
            f"{announcements.readers} readers take {tile} cells each of {announcements.queues} queues of "
            f"{announcements.cells}, expected as many cells at least"
        )
    early_kernel[(announcements.readers,)](
        records_BF,
        announcements.cells_QC,
        announcements.counts_X,
        announcements.brought_R,
        rows,
        searchers,
        limit_ns,
        QUEUES=announcements.queues,
        CELLS=announcements.cells,
        HEADS=rows // len(records_BF),
        WORDS=row_bytes // gather_rows.WORD,
        TILE=tile,
        SHARED=len(records_BF) > 1,
        ON_DEVICE=records_BF.is_cuda,
        num_warps=1,
        **({"maxnreg": REGISTERS} if records_BF.is_cuda else {}),
    )
