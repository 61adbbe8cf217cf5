"""The kernel of `coarse_pass` for one warp each: coded values, by the weights that `warp_pass` left, and exact rows.

Some programs of a row attend to exact rows, the others to coded values meanwhile: either would wait more than it works.
Both share out what all segments together have, evenly, whatever one of them has. Which tiles are read is known before,
so that those to come are asked for ahead. Offsets are a row of numbers that all query heads' weights are multiplied
with.

Shape legend: as in `value_tiles`; S segments of a row, E programs of it for exact rows, V for values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels import records
from decode_engine.kernels.coarse.warp import warp_rows
from decode_engine.kernels.coarse.warp.tiles.channel_places import bits_of
from decode_engine.kernels.coarse.warp.tiles.value_tiles import (
    LEFT,
    OF_ROWS,
    RESULT,
    RIGHT,
    add_values,
    no_values_yet,
    store_sums,
    value_layout,
    values_of,
)
from decode_engine.kernels.coarse.warp.warp_findings import (
    LANES,
    as_operand,
    copied_weights,
    copy_weights,
    in_order_of_rows,
    new_weights_rings,
)
from decode_engine.kernels.coarse.warp.warp_pass import movable_cut, reference_weights
from decode_engine.kernels.coarse.warp.warp_records import (
    let_next_begin,
    number,
    value_codes,
    wait_alone,
)
from decode_engine.kernels.coarse.warp.warp_rings import (
    copy_tile,
    end_of_copies,
    new_ring,
    wait_for_copies,
)
from decode_engine.kernels.coarse.warp.warp_rows import attend_rows, load_row_queries

_KEYS, _FIRST, _END, _TAIL_KEYS, _KV, _TAIL = (
    gl.constexpr(field)
    for field in (records.KEYS, records.FIRST, records.END, records.TAIL_KEYS, records.KV, records.TAIL)
)
ROWS_TILE = gl.constexpr(warp_rows.TILE)
_COMING, _AT_ONCE = gl.constexpr(64), gl.constexpr(32)
"""Tiles that are looked up together, and those after which others are; the rest are what is asked for ahead."""


@gluon.constexpr_function
def segment_layout(SEGMENTS: int) -> gl.BlockedLayout:
    """Of numbers of all segments: a lane has some that follow one another."""
    return gl.BlockedLayout([SEGMENTS // 32], [32], [1], [0])


@gluon.jit
def attend_values(
    attended: gl.tensor,
    words: gl.tensor,
    weights: gl.tensor,
    scales: gl.tensor,
    offsets: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds a tile's values, as words, by its weights, and scales and offsets of each group of channels."""
    sums, evens, totals = attended
    weights = as_operand(weights, T, X)
    none = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
    ones = gl.full([16, T], 1.0, gl.float16, layout=LEFT)
    totals = totals + mma_v2(ones, weights, none)
    scaled: gl.tensor = ()
    new_evens: gl.tensor = ()
    for group in gl.static_range(len(evens)):
        scale = gl.convert_layout(
            in_order_of_rows(scales[group], T), gl.SliceLayout(1, RIGHT), assert_trivial=True
        )
        offset = gl.convert_layout(
            in_order_of_rows(offsets[group], T), gl.SliceLayout(0, LEFT), assert_trivial=True
        )
        _, offset = gl.broadcast(ones, gl.expand_dims(offset, 0))
        scaled += (weights * gl.expand_dims(scale, 1),)
        new_evens += (evens[group] + mma_v2(offset, weights, none),)
    # Added as float32 numbers are, rounded: tensor cores drop what is below a sum's last bit.
    more = add_values(no_values_yet(X, DIM), words, scaled, T, DIM, BITS)
    new: gl.tensor = ()
    for plane in gl.static_range(len(sums)):
        new += (sums[plane] + more[plane],)
    return new, new_evens, totals


@gluon.jit
def add(a: gl.tensor, b: gl.tensor) -> gl.tensor:
    return a + b


@gluon.jit
def counts_of(
    counts_ptr: gl.tensor, row: gl.tensor, segments: gl.tensor, SEGMENTS: gl.constexpr
) -> gl.tensor:
    """What each segment of a row has, [SEGMENTS] int32, and how many there are up to its end."""
    segment = gl.arange(0, SEGMENTS, layout=segment_layout(SEGMENTS))
    counts = gl.load(
        counts_ptr + row * segments + segment, mask=segment < segments, other=0, cache_modifier=".cg"
    )
    return counts, gl.associative_scan(counts, 0, add)


@gluon.jit
def found_in(counted: gl.tensor, place: gl.tensor, SEGMENTS: gl.constexpr) -> gl.tensor:
    """In which segment a place of all of a row's lies, and where in it; for each place that there is.

    counted: as `counts_of` returns.
    """
    counts, ends = counted
    segment = place * 0
    for bit in gl.static_range(1, bits_of(SEGMENTS) + 1):
        later = segment + (SEGMENTS >> bit)
        segment = gl.where(gl.gather(ends, later - 1, 0) <= place, later, segment)
    return segment, place - gl.gather(ends - counts, segment, 0)


@gluon.jit
def at_lane(numbers: gl.tensor, place: gl.tensor) -> gl.tensor:
    """One of a vector's numbers."""
    return gl.max(gl.gather(numbers, gl.full([1], 0, gl.int32, layout=LANES) + place, 0), 0)


@gluon.jit
def coming_tiles(
    tiles_ptr: gl.tensor,
    counted: gl.tensor,
    segment: gl.tensor,
    tile: gl.tensor,
    last: gl.tensor,
    room: gl.tensor,
    SEGMENTS: gl.constexpr,
) -> gl.tensor:
    """Of some tiles from `tile` to `last` the next ones: which tiles' weights are theirs, and first keys.

    They are counted over all segments of a row, of which `segment` is the first. room: tiles from one segment to the
    next.
    """
    place = gl.minimum(tile + gl.arange(0, _COMING, layout=LANES), last)
    later, place = found_in(counted, place, SEGMENTS)
    place += (segment + later) * room
    return place, gl.load(tiles_ptr + place, cache_modifier=".cg")


@gluon.jit
def attend_tiles(
    codes_ptr: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    counted: gl.tensor,
    segment: gl.tensor,
    first: gl.tensor,
    end: gl.tensor,
    width: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    GROUPS: gl.constexpr,
    SEGMENTS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """Sums of planes and of weights [X] over the values of consecutive tiles, `first` to `end` (`coming_tiles`)."""
    none = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
    evens: gl.tensor = ()
    for _ in gl.static_range(GROUPS):
        evens += (none,)
    attended = (no_values_yet(X, DIM), evens, none)
    ring, rings = new_ring(T, DIM, BITS, AHEAD), new_weights_rings(T, X, GROUPS, AHEAD)
    last = end - 1
    if end > first:
        places, begins = coming_tiles(tiles_ptr, counted, segment, first, last, width // T, SEGMENTS)
        for early in gl.static_range(AHEAD):
            there = first + early < end
            copy_tile(ring, early, codes_ptr, at_lane(begins, early), there, T, DIM, BITS, AHEAD)
            copy_weights(rings, early, weights_ptr, at_lane(places, early), there, T, X, GROUP, GROUPS, AHEAD)
            end_of_copies()
        for some in range(first, end, _AT_ONCE):
            for turn in range(0, gl.minimum(end - some, _AT_ONCE)):
                wait_for_copies(AHEAD - 1)
                now = some - first + turn
                words = ring.index(now % (AHEAD + 1)).load(value_layout(T, DIM, BITS, False))
                weights, scales, offsets = copied_weights(rings, now, T, X, GROUPS, AHEAD)
                later, there = turn + AHEAD, some + turn + AHEAD < end
                copy_tile(ring, now + AHEAD, codes_ptr, at_lane(begins, later), there, T, DIM, BITS, AHEAD)
                copy_weights(
                    rings, now + AHEAD, weights_ptr, at_lane(places, later), there, T, X, GROUP, GROUPS, AHEAD
                )
                end_of_copies()
                attended = attend_values(attended, words, weights, scales, offsets, T, X, DIM, BITS)
            if some + _AT_ONCE < end:
                places, begins = coming_tiles(
                    tiles_ptr, counted, segment, some + _AT_ONCE, last, width // T, SEGMENTS
                )
        wait_for_copies(0)
    sums, evens, totals = attended
    return values_of(sums, evens, DIM, BITS), gl.max(totals, 0)


@gluon.jit
def context_of(records_ptr: gl.tensor, b: gl.tensor, head: gl.tensor, ELEMENT: gl.constexpr) -> gl.tensor:
    """What `attend_rows` has to know of a row's context, and how many entries are always attended."""
    first = number(records_ptr, b, _FIRST).to(gl.int32)
    end = number(records_ptr, b, _END).to(gl.int32)
    in_context = first + gl.maximum(number(records_ptr, b, _KEYS).to(gl.int32) - end, 0)
    context = number(records_ptr, b, _KV) + head * number(records_ptr, b, _KV + 1)
    tail = number(records_ptr, b, _TAIL) + head * number(records_ptr, b, _TAIL + 1)
    # Found in units of 16 bytes, so that loads are known to be aligned.
    to_tail = (tail - context) // 16 * (128 // ELEMENT.primitive_bitwidth)
    rows_ptr = gl.multiple_of(context.to(gl.pointer_type(ELEMENT)), 16)
    entries = in_context + number(records_ptr, b, _TAIL_KEYS).to(gl.int32)
    return (rows_ptr, first, end, in_context, to_tail), entries


@gluon.jit
def load_listed(
    ids_ptr: gl.tensor,
    counted: gl.tensor,
    row: gl.tensor,
    segments: gl.tensor,
    width: gl.tensor,
    begin: gl.tensor,
    listed: gl.tensor,
    SEGMENTS: gl.constexpr,
) -> gl.tensor:
    """The listed keys of a tile of entries from `begin` on, [ROWS_TILE] int32; 0 for entries behind all of these."""
    entry = begin + gl.arange(0, ROWS_TILE, layout=LANES)
    segment, place = found_in(counted, gl.where(entry < listed, entry, 0), SEGMENTS)
    segment_ptr = ids_ptr + (row.to(gl.int64) * segments + segment) * width
    return gl.load(segment_ptr + place, mask=entry < listed, other=0, cache_modifier=".cg")


@gluon.jit
def always_attended(entry: gl.tensor, context: gl.tensor) -> gl.tensor:
    """Which keys those entries are that are always attended; from -1 downwards those of the tail."""
    _, first, end, in_context, _ = context
    outside = gl.where(entry < first, entry, end + entry - first)
    return gl.where(entry < in_context, outside, in_context - 1 - entry)


@gluon.jit
def exact_share(
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    counts_ptr: gl.tensor,
    row: gl.tensor,
    b: gl.tensor,
    head: gl.tensor,
    segments: gl.tensor,
    shares: gl.tensor,
    width: gl.tensor,
    scale_log2: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    SEGMENTS: gl.constexpr,
) -> gl.tensor:
    """Sums of planes, sums of weights and what these are relative to, [X], of every so many tiles of exact rows.

    What is always attended comes behind all that is listed.
    """
    state = (
        no_values_yet(X, DIM),
        gl.full([X], 0.0, gl.float32, layout=OF_ROWS),
        gl.full([X], float("-inf"), gl.float32, layout=OF_ROWS),
    )
    counted = counts_of(counts_ptr, row, segments, SEGMENTS)
    context, always = context_of(records_ptr, b, head, q_ptr.dtype.element_ty)
    queries = load_row_queries(q_ptr, row, X, GROUP, DIM)
    listed = gl.max(counted[1], 0)
    count = listed + always
    first, apart = gl.program_id(0) * ROWS_TILE, shares * ROWS_TILE
    ids = load_listed(ids_ptr, counted, row, segments, width, first, listed, SEGMENTS)
    for begin in range(first, count, apart):
        entry = begin + gl.arange(0, ROWS_TILE, layout=LANES)
        keys = gl.where(entry < listed, ids, always_attended(entry - listed, context))
        ids = load_listed(ids_ptr, counted, row, segments, width, begin + apart, listed, SEGMENTS)
        state = attend_rows(queries, keys, count - begin, context, state, scale_log2, X, DIM, BITS)
    return state


@gluon.jit
def store_state(
    sums_ptr: gl.tensor,
    peaks_ptr: gl.tensor,
    totals_ptr: gl.tensor,
    state: gl.tensor,
    place: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> None:
    """Leaves sums of planes, sums of weights and what these are relative to in the place-th of all slots, int64."""
    sums, total, peaks = state
    n = gl.arange(0, X, layout=OF_ROWS)
    at = place * GROUP + n
    gl.store(peaks_ptr + at, gl.where(total > 0, peaks, float("-inf")), mask=n < GROUP)
    gl.store(totals_ptr + at, total, mask=n < GROUP)
    store_sums(sums_ptr, sums, at, (n < GROUP) & (total > 0), DIM, BITS)


@gluon.jit(do_not_specialize=["segments", "shares", "width", "slots"])
def values_kernel(
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    cuts_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    counts_ptr: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    weighed_ptr: gl.tensor,
    sums_ptr: gl.tensor,
    peaks_ptr: gl.tensor,
    totals_ptr: gl.tensor,
    scale_log2: gl.tensor,
    segments: gl.tensor,
    shares: gl.tensor,
    width: gl.tensor,
    slots: gl.tensor,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    VALUE_BITS: gl.constexpr,
    VALUE_GROUPS: gl.constexpr,
    TILE: gl.constexpr,
    EXACT: gl.constexpr,
    SEGMENTS: gl.constexpr,
    AHEAD: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (slot, row): some of the segments that programs of `pass_kernel` left, into a slot.

    EXACT: the first `shares` programs of a row attend to listed keys, and to sinks, recent window and tail, instead;
    else there are 0 of these. SEGMENTS: a power of two, S at least.
    """
    slot, row = gl.program_id(0), gl.program_id(1)
    b, head = row // HEADS, row % HEADS
    keys = number(records_ptr, b, _KEYS)
    searches = number(records_ptr, b, _END) > number(records_ptr, b, _FIRST)
    codes_ptr = value_codes(records_ptr, b, head, keys, DIM, VALUE_BITS)
    wait_alone(CHAINED)
    let_next_begin(CHAINED)
    if EXACT and slot < shares:
        sums, total, peaks = exact_share(
            q_ptr, records_ptr, ids_ptr, counts_ptr, row, b, head, segments, shares, width, scale_log2,
            X, GROUP, DIM, VALUE_BITS, SEGMENTS,
        )  # fmt: skip
    else:
        counted = counts_of(weighed_ptr, row, segments, SEGMENTS)
        tiles = gl.max(counted[1], 0)
        share, programs = slot - shares, gl.num_programs(0) - shares
        sums, total = attend_tiles(
            codes_ptr, weights_ptr, tiles_ptr, counted, row * segments, tiles * share // programs,
            tiles * (share + 1) // programs, width, TILE, X, GROUP, DIM, VALUE_BITS, VALUE_GROUPS, SEGMENTS, AHEAD,
        )  # fmt: skip
        _, _, _, shift = movable_cut(cuts_ptr, row)
        peaks = reference_weights(normalisers_ptr, row, shift, searches, X, GROUP, 1)
    place = row.to(gl.int64) * slots + slot
    store_state(sums_ptr, peaks_ptr, totals_ptr, (sums, total, peaks), place, X, GROUP, DIM, VALUE_BITS)
