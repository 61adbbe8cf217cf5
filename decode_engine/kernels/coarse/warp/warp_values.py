"""The kernel of `coarse_pass` for one warp each: coded values, by the weights that `warp_pass` left, and exact rows.

Some programs of a row attend to exact rows, the others to coded values meanwhile: either would wait more than it works.
Which tiles are read is known before, so that all of them are asked for ahead. Scales and offsets of values come a lane
each, and go through shared memory to the lanes that have their keys; offsets are a row of numbers that all query heads'
weights are multiplied with.

Exact rows are shared out by tiles of a segment, so that no program waits for one whose keys are all kept.

Shape legend: as in `warp_tiles`; S segments of a row, E programs of it for exact rows, V for values.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels import records
from decode_engine.kernels.coarse.warp import warp_rows
from decode_engine.kernels.coarse.warp.warp_codes import value_layout
from decode_engine.kernels.coarse.warp.warp_pass import movable_cut, reference_weights
from decode_engine.kernels.coarse.warp.warp_records import (
    let_next_begin,
    number,
    value_pointers,
    wait_alone,
)
from decode_engine.kernels.coarse.warp.warp_rings import (
    copy_tile,
    end_of_copies,
    new_ring,
    wait_for_copies,
)
from decode_engine.kernels.coarse.warp.warp_rows import attend_rows, load_row_queries
from decode_engine.kernels.coarse.warp.warp_tiles import (
    LEFT,
    OF_ROWS,
    RESULT,
    RIGHT,
    add_values,
    no_values_yet,
    store_sums,
    values_of,
)
from decode_engine.kernels.coarse.warp.warp_weights import as_operand, load_weights

_KEYS, _FIRST, _END, _TAIL_KEYS, _KV, _TAIL = (
    gl.constexpr(field)
    for field in (records.KEYS, records.FIRST, records.END, records.TAIL_KEYS, records.KV, records.TAIL)
)
_ROWS_TILE = gl.constexpr(warp_rows.TILE)
_APART = gl.constexpr(37)
"""Programs between those that have the first tiles of two neighbouring segments; kept keys lie together."""
_COUNT_BITS = gl.constexpr(22)
"""That a segment's count takes: contexts have up to 2^21 keys."""
_COUNTS = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.constexpr_function
def step_layout(T: int) -> gl.DistributedLinearLayout:
    """Of numbers of keys as they lie, [T], for lanes that have operands' keys: as `key_of` has them."""
    own, base = [], 1
    while base <= T // 8:
        own.append([base])
        base *= 2
    return gl.DistributedLinearLayout(own, [[T // 4], [T // 2], [0], [0], [0]], [], [], [T])


@gluon.jit
def load_bits(ptr: gl.tensor, base: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Bits of T float16 numbers, [T] int32, a lane each: halves of registers would be put together, and waited for."""
    key = gl.arange(0, T, layout=_COUNTS)
    return gl.inline_asm_elementwise(
        "ld.global.nc.u16 $0, [$1];", "=r,l", [(ptr + base + key).to(gl.int64)], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def in_order_of_rows(room: gl.shared_memory_descriptor, bits: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Loaded numbers [T] float16 in the order of a tile's rows, for the lanes of operands."""
    room.store(bits.to(gl.int16).to(gl.float16, bitcast=True))
    rows = gl.permute(gl.reshape(room.load(step_layout(T)), [8, T // 8]), [1, 0])
    return gl.reshape(rows, [T])


@gluon.jit
def attend_values(
    attended: gl.tensor,
    words: gl.tensor,
    loaded: gl.tensor,
    steps: gl.tensor,
    room: gl.shared_memory_descriptor,
    T: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds a tile's values, as words, by its weights, as loaded; steps: bits of scales and of offsets."""
    sums, evens, totals = attended
    weights = as_operand(loaded, T, X)
    scales = gl.convert_layout(
        in_order_of_rows(room.index(0), steps[0], T), gl.SliceLayout(1, RIGHT), assert_trivial=True
    )
    offsets = gl.convert_layout(
        in_order_of_rows(room.index(1), steps[1], T), gl.SliceLayout(0, LEFT), assert_trivial=True
    )
    ones = gl.full([16, T], 1.0, gl.float16, layout=LEFT)
    _, offsets = gl.broadcast(ones, gl.expand_dims(offsets, 0))
    none = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
    evens = evens + mma_v2(offsets, weights, none)
    totals = totals + mma_v2(ones, weights, none)
    # Added as float32 numbers are, rounded: tensor cores drop what is below a sum's last bit.
    more = add_values(no_values_yet(X, DIM), words, weights * gl.expand_dims(scales, 1), T, DIM, BITS)
    new: gl.tensor = ()
    for plane in gl.static_range(len(sums)):
        new += (sums[plane] + more[plane],)
    return new, evens, totals


@gluon.jit
def attend_segment(
    attended: gl.tensor,
    ring: gl.shared_memory_descriptor,
    room: gl.shared_memory_descriptor,
    values_ptrs: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    count: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """Adds a segment's `count` tiles: to sums of planes, to what adds to all channels, and to sums of weights.

    The last two are [16, X] of equal rows.
    """
    codes_ptr, scales_ptr, offsets_ptr = values_ptrs
    if count > 0:
        last = count - 1
        coming: gl.tensor = ()
        for turn in gl.static_range(AHEAD + 1):
            coming += (gl.load(tiles_ptr + gl.minimum(turn, last), cache_modifier=".cg"),)
        for turn in gl.static_range(AHEAD):
            copy_tile(ring, turn, codes_ptr, coming[turn], T, DIM, BITS, AHEAD)
            end_of_copies()
        steps = (load_bits(scales_ptr, coming[0], T), load_bits(offsets_ptr, coming[0], T))
        weights = load_weights(weights_ptr, 0, T, X, GROUP)
        for turn in range(0, count):
            wait_for_copies(AHEAD - 1)
            words = ring.index(turn % (AHEAD + 1)).load(value_layout(T, DIM, BITS, False))
            copy_tile(ring, turn + AHEAD, codes_ptr, coming[AHEAD], T, DIM, BITS, AHEAD)
            end_of_copies()
            current, current_steps = weights, steps
            weights = load_weights(weights_ptr, gl.minimum(turn + 1, last), T, X, GROUP)
            steps = (load_bits(scales_ptr, coming[1], T), load_bits(offsets_ptr, coming[1], T))
            later: gl.tensor = ()
            for following in gl.static_range(1, AHEAD + 1):
                later += (coming[following],)
            coming = later + (  # noqa: RUF005 - tuples are not unpacked into others here
                gl.load(tiles_ptr + gl.minimum(turn + AHEAD + 1, last), cache_modifier=".cg"),
            )
            attended = attend_values(attended, words, current, current_steps, room, T, X, DIM, BITS)
        wait_for_copies(0)
    return attended


@gluon.jit
def coarse_share(
    values_ptrs: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    weighed_ptr: gl.tensor,
    row: gl.tensor,
    segments: gl.tensor,
    share: gl.tensor,
    shares: gl.tensor,
    width: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """Sums of planes and of weights [X] over every so many of a row's segments."""
    none = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
    attended = (no_values_yet(X, DIM), none, none)
    ring = new_ring(T, DIM, BITS, AHEAD)
    room = gl.allocate_shared_memory(gl.float16, [2, T], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for segment in range(share, segments, shares):
        place = row.to(gl.int64) * segments + segment
        attended = attend_segment(
            attended, ring, room, values_ptrs, weights_ptr + place * width * GROUP, tiles_ptr + place * (width // T),
            gl.load(weighed_ptr + place, cache_modifier=".cg"), T, X, GROUP, DIM, BITS, AHEAD,
        )  # fmt: skip
    sums, evens, totals = attended
    return values_of(sums, gl.max(evens, 0), DIM, BITS), gl.max(totals, 0)


@gluon.jit
def first_tile(segment: gl.tensor, shares: gl.tensor) -> gl.tensor:
    """Of a segment that is this program's; the next ones follow E tiles apart."""
    return (gl.program_id(0) - segment * _APART % shares + shares) % shares


@gluon.jit
def next_segment(counts: gl.tensor, segment: gl.tensor, before: gl.tensor, shares: gl.tensor) -> gl.tensor:
    """The last segment before one of which this program has tiles, how many keys it has, and the first such tile.

    -1 when there is none. counts, segment: of all segments. Tile j of segment t is program's t * _APART + j, modulo E.
    """
    mine = first_tile(segment, shares) * _ROWS_TILE < counts
    found = gl.max(gl.where(mine & (segment < before), (segment << _COUNT_BITS) + counts, -1), 0)
    chosen = found >> _COUNT_BITS
    return chosen, found & ((1 << _COUNT_BITS) - 1), first_tile(chosen, shares)


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
    """Sums of planes, sums of weights and what these are relative to, [X], of this program's tiles of exact rows."""
    state = (
        no_values_yet(X, DIM),
        gl.full([X], 0.0, gl.float32, layout=OF_ROWS),
        gl.full([X], float("-inf"), gl.float32, layout=OF_ROWS),
    )
    segment = gl.arange(0, SEGMENTS, layout=_COUNTS)
    there = segment < segments
    counts = gl.load(counts_ptr + row * segments + segment, mask=there, other=0, cache_modifier=".cg")
    context, entries = context_of(records_ptr, b, head, q_ptr.dtype.element_ty)
    queries = load_row_queries(q_ptr, row, X, GROUP, DIM)
    # What is always attended counts as a segment behind all others, which has no list.
    chosen, count, tile = segments, entries, first_tile(segments, shares)
    while chosen >= 0:
        listed = gl.where(chosen < segments, count, 0)
        segment_ptr = ids_ptr + (row.to(gl.int64) * segments + gl.minimum(chosen, segments - 1)) * width
        state = attend_rows(
            queries, segment_ptr, tile * _ROWS_TILE, shares * _ROWS_TILE, count, listed, context, state, scale_log2,
            X, DIM, BITS,
        )  # fmt: skip
        chosen, count, tile = next_segment(counts, segment, chosen, shares)
    return state


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
    n = gl.arange(0, X, layout=OF_ROWS)
    at = (row.to(gl.int64) * slots + slot) * GROUP + n
    keys = number(records_ptr, b, _KEYS)
    searches = number(records_ptr, b, _END) > number(records_ptr, b, _FIRST)
    values_ptrs = value_pointers(records_ptr, b, head, keys, DIM, VALUE_BITS)
    wait_alone(CHAINED)
    let_next_begin(CHAINED)
    if EXACT and slot < shares:
        sums, total, peaks = exact_share(
            q_ptr, records_ptr, ids_ptr, counts_ptr, row, b, head, segments, shares, width, scale_log2,
            X, GROUP, DIM, VALUE_BITS, SEGMENTS,
        )  # fmt: skip
    else:
        sums, total = coarse_share(
            values_ptrs, weights_ptr, tiles_ptr, weighed_ptr, row, segments, slot - shares,
            gl.num_programs(0) - shares, width, TILE, X, GROUP, DIM, VALUE_BITS, AHEAD,
        )  # fmt: skip
        _, _, _, shift = movable_cut(cuts_ptr, row)
        peaks = reference_weights(normalisers_ptr, row, shift, searches, X, GROUP)
    gl.store(peaks_ptr + at, gl.where(total > 0, peaks, float("-inf")), mask=n < GROUP)
    gl.store(totals_ptr + at, total, mask=n < GROUP)
    store_sums(sums_ptr, sums, at, (n < GROUP) & (total > 0), DIM, VALUE_BITS)
