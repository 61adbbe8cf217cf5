"""The launch that goes over coded values, by the weights that `warp_pass` left, and over exact rows.

Some programs of a row attend to exact rows, the others to coded values meanwhile: either would wait more than it works.
Both share out what all segments together have, evenly, whatever one of them has. Which tiles are read is known before,
so that those to come are asked for ahead. What needs no values, sums of weights and of offsets, segments have left.

Exact rows are loaded in the layouts of operands, 16 bytes of a row for each lane and load. Values come in the planes of
coded ones, so that their sums add to those in registers. Weights are relative to a number far below the largest logit
so far; only where they could overflow everything so far moves to another one.

Shape legend: as in `value_tiles`; ROWS of a tile of exact rows; S segments of a row, E programs of it for exact rows, V
for values.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.attention.online_softmax import LOG2E, Partials
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.coarse.registers import (
    LEFT,
    OF_ROWS,
    RESULT,
    RIGHT,
    as_planes,
    as_right,
    bits_of,
    channels_of,
    key_row_layout,
    plane_count,
    row_places,
    value_places,
    value_row_layout,
)
from decode_engine.kernels.coarse.sizes import CoarseSizes, CoarseWork
from decode_engine.kernels.coarse.value_tiles import (
    add_pending,
    add_values,
    no_sums_yet,
    no_values_yet,
    nothing_pending,
    store_sums,
    value_layout,
    values_of,
    weight_layout,
)
from decode_engine.kernels.coarse.warp_pass import (
    LANES,
    copy_weights,
    new_weights_ring,
    reference_weights,
    what_passes,
)
from decode_engine.kernels.coarse.warp_reads import (
    copy_tile,
    end_of_copies,
    new_ring,
    value_codes,
    wait_for_copies,
)
from decode_engine.kernels.launches import chained, let_next_begin, wait_alone
from decode_engine.kernels.record_fields import END, FIRST, KEYS, KV, TAIL, TAIL_KEYS, field

ROWS_TILE, _HEADROOM = gl.constexpr(16), gl.constexpr(64.0)
"""ROWS; octaves that exact weights may lie above the number that weights are relative to."""
_COMING, _AT_ONCE = gl.constexpr(64), gl.constexpr(32)
"""Tiles that are looked up together, and those after which others are; the rest are what is asked for ahead."""


@gluon.jit
def load_row_queries(q_ptr: gl.tensor, row: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Queries [16, X] as they are, of the planes in which rows of keys are multiplied."""
    PLACES: gl.constexpr = row_places(K.DIM)
    a = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
    n = gl.arange(0, K.X, layout=gl.SliceLayout(0, RIGHT))
    queries: gl.tensor = ()
    for plane in gl.static_range(plane_count(K.DIM)):
        channel = channels_of(plane, a, PLACES)
        at = gl.expand_dims((row * K.GROUP + n) * K.DIM, 0) + gl.expand_dims(channel, 1)
        there = gl.expand_dims(n < K.GROUP, 0) & gl.expand_dims(channel >= 0, 1)
        queries += (gl.load(q_ptr + at, mask=there, other=0.0),)
    return queries


@gluon.jit
def places_of(keys: gl.tensor, context: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Where the rows of keys begin; from -1 downwards those of the tail."""
    both: gl.constexpr = 2 * K.DIM  # elements of a key and its value
    own = gl.where(keys >= 0, keys, -1 - keys).to(gl.int64) * both
    return gl.where(keys >= 0, own, own + context[4])


@gluon.jit
def load_rows(
    rows_ptr: gl.tensor,
    keys: gl.tensor,
    stop: gl.tensor,
    context: gl.tensor,
    K: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Rows [ROWS, DIM] of keys (`places_of`), from rows_ptr on; zeros for those from `stop` on."""
    keys = gl.convert_layout(keys, gl.SliceLayout(1, LAYOUT))
    entry = gl.arange(0, ROWS_TILE, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, K.DIM, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(places_of(keys, context, K), 1) + gl.expand_dims(channel, 0)
    there = gl.expand_dims(entry < stop, 1) & gl.expand_dims(channel >= 0, 0)
    return gl.load(rows_ptr + at, mask=there, other=0.0)


@gluon.jit
def multiply_rows(rows: gl.tensor, queries: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Products [ROWS, X] of rows of keys with queries."""
    PLACES: gl.constexpr = row_places(K.DIM)
    planes = as_planes(rows, ROWS_TILE, K.DIM, PLACES)
    products = gl.full([ROWS_TILE, K.X], 0.0, gl.float32, layout=RESULT)
    for plane in gl.static_range(plane_count(K.DIM)):
        own = gl.convert_layout(gl.permute(planes[plane], [1, 0]), LEFT, assert_trivial=True)
        products = mma_v2(own, queries[plane], products)
    return products


@gluon.jit
def add_rows(sums: gl.tensor, rows: gl.tensor, weights: gl.tensor, K: gl.constexpr) -> gl.tensor:
    """Adds rows of values [ROWS, DIM] to the planes [16, X], by weights, a right operand [ROWS, X]."""
    PLACES: gl.constexpr = value_places(K.DIM, K.BITS)
    planes = as_planes(rows, ROWS_TILE, K.DIM, PLACES)
    new: gl.tensor = ()
    for plane in gl.static_range(plane_count(K.DIM)):
        own = gl.convert_layout(planes[plane], LEFT, assert_trivial=True)
        new += (mma_v2(own, weights, sums[plane]),)
    return new


@gluon.jit
def attend_rows(
    queries: gl.tensor,
    keys: gl.tensor,
    stop: gl.tensor,
    context: gl.tensor,
    state: gl.tensor,
    scale_log2: gl.tensor,
    K: gl.constexpr,
) -> gl.tensor:
    """Adds a tile of keys to a state: sums of planes, sums of weights [X], and what these are relative to.

    keys: [E] int32, from -1 downwards those of the tail; those before `stop` are there. context: where rows begin,
    first and end of the searched range, how many others there are, and elements from rows to the tail's.
    """
    KEY_ROWS: gl.constexpr = key_row_layout(ROWS_TILE, K.DIM)
    VALUE_ROWS: gl.constexpr = value_row_layout(ROWS_TILE, K.DIM, K.BITS)
    rows_ptr = context[0]
    element: gl.constexpr = rows_ptr.dtype.element_ty
    sums, totals, peaks = state
    keys_ED = load_rows(rows_ptr, keys, stop, context, K, KEY_ROWS)
    values_ED = load_rows(rows_ptr + K.DIM, keys, stop, context, K, VALUE_ROWS)
    logits = multiply_rows(keys_ED, queries, K) * scale_log2
    there = gl.arange(0, ROWS_TILE, layout=gl.SliceLayout(1, RESULT)) < stop
    logits = gl.where(gl.expand_dims(there, 1), logits, float("-inf"))
    higher = gl.maximum(peaks, gl.max(logits, 0) - _HEADROOM)
    shrink = gl.exp2(peaks - higher)
    weights = gl.exp2(logits - gl.expand_dims(higher, 0))
    shrunk: gl.tensor = ()
    for plane in gl.static_range(plane_count(K.DIM)):
        shrunk += (sums[plane] * gl.expand_dims(shrink, 0),)
    sums = add_rows(shrunk, values_ED, as_right(weights.to(element), ROWS_TILE, K.X), K)
    return sums, totals * shrink + gl.sum(weights, 0), higher


@gluon.constexpr_function
def segment_layout(SEGMENTS: int) -> gl.BlockedLayout:
    """Of numbers of all segments: a lane has some that follow one another."""
    return gl.BlockedLayout([SEGMENTS // 32], [32], [1], [0])


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
    """Of some tiles from `tile` to `last` the next ones: which tiles' weights are theirs, first keys, and units.

    They are counted over all segments of a row, of which `segment` is the first. room: tiles from one segment to the
    next.
    """
    place = gl.minimum(tile + gl.arange(0, _COMING, layout=LANES), last)
    later, place = found_in(counted, place, SEGMENTS)
    place += (segment + later) * room
    begins = gl.load(tiles_ptr + 2 * place, cache_modifier=".cg")
    units = gl.load(tiles_ptr + (2 * place + 1), cache_modifier=".cg")
    return place, begins, units.to(gl.float32, bitcast=True)


@gluon.jit
def attend_tiles(
    codes_ptr: gl.tensor,
    ptrs: gl.tensor,
    counted: gl.tensor,
    segment: gl.tensor,
    first: gl.tensor,
    end: gl.tensor,
    width: gl.tensor,
    K: gl.constexpr,
    SEGMENTS: gl.constexpr,
) -> gl.tensor:
    """Sums of bytes (`value_tiles`) over the values of consecutive tiles, `first` to `end` (`coming_tiles`).

    Tiles of a segment nearly always have one unit, so that integers add up.

    ptrs: to weights in words, and to first keys and units of all segments' tiles.
    """
    sums, pending, unit = no_sums_yet(K), nothing_pending(K), width * 0.0
    ring, weights_ring = new_ring(K), new_weights_ring(K)
    last = end - 1
    if end > first:
        places, begins, units = coming_tiles(ptrs[1], counted, segment, first, last, width // K.T, SEGMENTS)
        for early in gl.static_range(K.AHEAD):
            there = first + early < end
            copy_tile(ring, early, codes_ptr, at_lane(begins, early), there, K)
            copy_weights(weights_ring, early, ptrs[0], at_lane(places, early), there, K)
            end_of_copies()
        for some in range(first, end, _AT_ONCE):
            for turn in range(0, gl.minimum(end - some, _AT_ONCE)):
                wait_for_copies(K.AHEAD - 1)
                now = some - first + turn
                words = ring.index(now % (K.AHEAD + 1)).load(value_layout(K.T, K.DIM, K.BITS))
                weights = weights_ring.index(now % (K.AHEAD + 1)).load(weight_layout(K.T, K.GROUPS * K.Y))
                later, there = turn + K.AHEAD, some + turn + K.AHEAD < end
                copy_tile(ring, now + K.AHEAD, codes_ptr, at_lane(begins, later), there, K)
                copy_weights(weights_ring, now + K.AHEAD, ptrs[0], at_lane(places, later), there, K)
                end_of_copies()
                own_unit = at_lane(units, turn)
                if own_unit != unit:
                    sums, pending = add_pending(sums, pending, unit), nothing_pending(K)
                    unit = own_unit
                sums, pending = add_values(sums, pending, words, weights, unit, K)
            # Before sums of integers could overflow.
            sums, pending = add_pending(sums, pending, unit), nothing_pending(K)
            if some + _AT_ONCE < end:
                places, begins, units = coming_tiles(
                    ptrs[1], counted, segment, some + _AT_ONCE, last, width // K.T, SEGMENTS
                )
        wait_for_copies(0)
    return sums


@gluon.jit
def sums_left(
    left_ptr: gl.tensor,
    segment: gl.tensor,
    segments: gl.tensor,
    share: gl.tensor,
    shares: gl.tensor,
    K: gl.constexpr,
) -> gl.tensor:
    """What a share of a row's segments, of which `segment` is the first, left: [X] of each kind."""
    n = gl.arange(0, K.X, layout=OF_ROWS)
    sums: gl.tensor = ()
    for _ in gl.static_range(1 + K.GROUPS):
        sums += (gl.full([K.X], 0.0, gl.float32, layout=OF_ROWS),)
    for other in range(share, segments, shares):
        at = left_ptr + (segment + other) * ((1 + K.GROUPS) * K.GROUP) + n
        more: gl.tensor = ()
        for kind in gl.static_range(1 + K.GROUPS):
            own = gl.load(at + kind * K.GROUP, mask=n < K.GROUP, other=0.0, cache_modifier=".cg")
            more += (sums[kind] + own,)
        sums = more
    return sums


@gluon.jit
def context_of(records_ptr: gl.tensor, b: gl.tensor, head: gl.tensor, ELEMENT: gl.constexpr) -> gl.tensor:
    """What `attend_rows` has to know of a row's context, and how many entries are always attended."""
    first = field(records_ptr, b, FIRST).to(gl.int32)
    end = field(records_ptr, b, END).to(gl.int32)
    in_context = first + gl.maximum(field(records_ptr, b, KEYS).to(gl.int32) - end, 0)
    context = field(records_ptr, b, KV) + head * field(records_ptr, b, KV + 1)
    tail = field(records_ptr, b, TAIL) + head * field(records_ptr, b, TAIL + 1)
    # Found in units of 16 bytes, so that loads are known to be aligned.
    to_tail = (tail - context) // 16 * (128 // ELEMENT.primitive_bitwidth)
    rows_ptr = gl.multiple_of(context.to(gl.pointer_type(ELEMENT)), 16)
    entries = in_context + field(records_ptr, b, TAIL_KEYS).to(gl.int32)
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
    lists: gl.tensor,
    row: gl.tensor,
    segments: gl.tensor,
    shares: gl.tensor,
    width: gl.tensor,
    scale_log2: gl.tensor,
    K: gl.constexpr,
    SEGMENTS: gl.constexpr,
) -> gl.tensor:
    """Sums of planes, sums of weights and what these are relative to, [X], of every so many tiles of exact rows.

    What is always attended comes behind all that is listed.
    """
    state = (
        no_values_yet(K),
        gl.full([K.X], 0.0, gl.float32, layout=OF_ROWS),
        gl.full([K.X], float("-inf"), gl.float32, layout=OF_ROWS),
    )
    ids_ptr, counts_ptr = lists
    counted = counts_of(counts_ptr, row, segments, SEGMENTS)
    context, always = context_of(records_ptr, row // K.HEADS, row % K.HEADS, q_ptr.dtype.element_ty)
    queries = load_row_queries(q_ptr, row, K)
    listed = gl.max(counted[1], 0)
    count = listed + always
    first, apart = gl.program_id(0) * ROWS_TILE, shares * ROWS_TILE
    ids = load_listed(ids_ptr, counted, row, segments, width, first, listed, SEGMENTS)
    for begin in range(first, count, apart):
        entry = begin + gl.arange(0, ROWS_TILE, layout=LANES)
        keys = gl.where(entry < listed, ids, always_attended(entry - listed, context))
        ids = load_listed(ids_ptr, counted, row, segments, width, begin + apart, listed, SEGMENTS)
        state = attend_rows(queries, keys, count - begin, context, state, scale_log2, K)
    return state


@gluon.jit
def store_state(partials: gl.tensor, state: gl.tensor, place: gl.tensor, K: gl.constexpr) -> None:
    """Leaves sums of planes, sums of weights and what these are relative to in the place-th of all slots, int64."""
    sums_ptr, peaks_ptr, totals_ptr = partials
    sums, total, peaks = state
    n = gl.arange(0, K.X, layout=OF_ROWS)
    at = place * K.GROUP + n
    # What there is may have no weight of its own: weights of values were summed up by the segment that left them.
    gl.store(peaks_ptr + at, peaks, mask=n < K.GROUP)
    gl.store(totals_ptr + at, total, mask=n < K.GROUP)
    store_sums(sums_ptr, sums, at, (n < K.GROUP) & (peaks > float("-inf")), K)


@gluon.jit(do_not_specialize=["segments", "shares", "width", "slots"])
def values_kernel(
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    lists: gl.tensor,
    leaves: gl.tensor,
    partials: gl.tensor,
    scale_log2: gl.tensor,
    segments: gl.tensor,
    shares: gl.tensor,
    width: gl.tensor,
    slots: gl.tensor,
    K: gl.constexpr,
    EXACT: gl.constexpr,
    SEGMENTS: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (slot, row): some of the segments that programs of `pass_kernel` left, into a slot.

    EXACT: the first `shares` programs of a row attend to listed keys, and to sinks, recent window and tail, instead;
    else there are 0 of these. SEGMENTS: a power of two, S at least.
    """
    weights_ptr, tiles_ptr, weighed_ptr, left_ptr = leaves
    slot, row = gl.program_id(0), gl.program_id(1)
    b, head = row // K.HEADS, row % K.HEADS
    keys = field(records_ptr, b, KEYS)
    searches = field(records_ptr, b, END) > field(records_ptr, b, FIRST)
    codes_ptr = value_codes(records_ptr, b, head, keys, K)
    wait_alone(CHAINED)
    let_next_begin(CHAINED)
    if EXACT and slot < shares:
        sums, total, peaks = exact_share(
            q_ptr, records_ptr, lists, row, segments, shares, width, scale_log2, K, SEGMENTS
        )
    else:
        counted = counts_of(weighed_ptr, row, segments, SEGMENTS)
        tiles = gl.max(counted[1], 0)
        share, programs = slot - shares, gl.num_programs(0) - shares
        ptrs = (weights_ptr, tiles_ptr)
        found = attend_tiles(
            codes_ptr, ptrs, counted, row * segments, tiles * share // programs, tiles * (share + 1) // programs,
            width, K, SEGMENTS,
        )  # fmt: skip
        left = sums_left(left_ptr, row * segments, segments, share, programs, K)
        total, evens = left[0], left[1:]
        sums = values_of(found, evens, K)
        peaks = reference_weights(normalisers_ptr, row, searches, K)
    place = row.to(gl.int64) * slots + slot
    store_state(partials, (sums, total, peaks), place, K)


def attend_others(
    q_BHGD: Tensor,
    records_BF: Tensor,
    sizes: CoarseSizes,
    work: CoarseWork,
    lists: KeyLists,
    partials: Partials,
    *,
    exact: bool = False,
) -> None:
    """Coarse attention to all keys of the searched range that `weigh_keys` has not listed, into the first slots.

    exact: the first programs attend to everything else exactly, listed keys, sinks, recent window and tail, and
    sizes.slots(B * H) slots are filled; for queries, keys and values in bfloat16.
    """
    rows, segments = q_BHGD.shape[0] * sizes.kv_heads, lists.counts_RP.shape[1]
    shares = sizes.exact_programs(rows) if exact else 0
    values_kernel[(shares + sizes.value_programs(rows), rows)](
        *what_passes(q_BHGD, records_BF, work, lists),
        partials,
        sizes.head_dim**-0.5 * LOG2E,
        segments,
        shares,
        sizes.width(rows),
        partials.peaks_RSG.shape[1],
        K=sizes.passes(keys=False),
        EXACT=exact,
        SEGMENTS=max(32, triton.next_power_of_2(segments)),
        **sizes.launch(keys=False),
        **chained(q_BHGD.device),
    )
