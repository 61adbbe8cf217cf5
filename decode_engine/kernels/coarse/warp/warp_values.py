"""The kernel of `coarse_pass` for one warp each: coded values, by the weights that `warp_pass` left, and exact rows.

A program has little to do, so that it waits more than it works. What is always attended does not wait for the pass;
what that left is loaded together; codes are on their way while listed rows are attended to. Which tiles are read is
known before, so that all of them are asked for ahead. Scales and offsets of values come a lane each, and go through
shared memory to the lanes that have their keys; offsets are a row of numbers that all query heads' weights are
multiplied with.

Exact rows of a row's list are shared out by tiles of a segment, so that no program waits for one whose keys are all
kept.

Shape legend: as in `warp_tiles`; P programs of a row, which are its segments.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels import records
from decode_engine.kernels.coarse.warp import warp_rows
from decode_engine.kernels.coarse.warp.warp_codes import unit_of, value_layout
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
    shrink: gl.tensor,
    room: gl.shared_memory_descriptor,
    T: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds a tile's values, as words, by its weights, as loaded; steps: bits of scales and of offsets.

    shrink: what weights are multiplied with, [X].
    """
    sums, evens, totals = attended
    weights = as_operand(loaded, T, X) * gl.expand_dims(shrink, 0)
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
def first_tiles(tiles_ptr: gl.tensor, count: gl.tensor, room: gl.tensor, AHEAD: gl.constexpr) -> gl.tensor:
    """The first AHEAD + 1 tiles of a list of `count` of at most `room`: nothing waits for the count to load them.

    There is a tile in every place, if there is any.
    """
    loaded: gl.tensor = ()
    for turn in gl.static_range(AHEAD + 1):
        loaded += (gl.load(tiles_ptr + gl.minimum(turn, room - 1), cache_modifier=".cg"),)
    tiles: gl.tensor = ()
    for turn in gl.static_range(AHEAD + 1):
        tiles += (gl.where(count > turn, loaded[turn], loaded[0]),)
    return tiles


@gluon.jit
def coarse_share(
    attended: gl.tensor,
    ring: gl.shared_memory_descriptor,
    room: gl.shared_memory_descriptor,
    coming: gl.tensor,
    values_ptrs: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    count: gl.tensor,
    shrink: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """Adds tiles, of which the first AHEAD are on their way.

    attended: sums of planes, what adds to all channels and sums of weights, the last two [16, X] of equal rows.
    """
    codes_ptr, scales_ptr, offsets_ptr = values_ptrs
    last = count - 1
    steps = (load_bits(scales_ptr, coming[0], T), load_bits(offsets_ptr, coming[0], T))
    weights = load_weights(weights_ptr, T, X, GROUP)
    for turn in range(0, count):
        wait_for_copies(AHEAD - 1)
        words = ring.index(turn % (AHEAD + 1)).load(value_layout(T, DIM, BITS, False))
        copy_tile(ring, turn + AHEAD, codes_ptr, coming[AHEAD], T, DIM, BITS, AHEAD)
        end_of_copies()
        current, current_steps = weights, steps
        weights = load_weights(weights_ptr + gl.minimum(turn + 1, last) * (T * GROUP), T, X, GROUP)
        steps = (load_bits(scales_ptr, coming[1], T), load_bits(offsets_ptr, coming[1], T))
        later: gl.tensor = ()
        for following in gl.static_range(1, AHEAD + 1):
            later += (coming[following],)
        later += (gl.load(tiles_ptr + gl.minimum(turn + AHEAD + 1, last), cache_modifier=".cg"),)
        coming = later
        attended = attend_values(attended, words, current, current_steps, shrink, room, T, X, DIM, BITS)
    wait_for_copies(0)
    return attended


@gluon.jit
def next_segment(counts: gl.tensor, segment: gl.tensor, before: gl.tensor, programs: gl.tensor) -> gl.tensor:
    """The last segment before one of which this program has tiles, how many keys it has, and the first such tile.

    -1 when there is none. counts, segment: of all segments. Tile j of segment t is program's t * _APART + j, modulo P.
    """
    mine = first_tile(segment, programs) * _ROWS_TILE < counts
    found = gl.max(gl.where(mine & (segment < before), (segment << _COUNT_BITS) + counts, -1), 0)
    chosen = found >> _COUNT_BITS
    return chosen, found & ((1 << _COUNT_BITS) - 1), first_tile(chosen, programs)


@gluon.jit
def first_tile(segment: gl.tensor, programs: gl.tensor) -> gl.tensor:
    """Of a segment that is this program's; the next ones follow P tiles apart."""
    return (gl.program_id(0) - segment * _APART % programs + programs) % programs


@gluon.jit
def context_of(
    records_ptr: gl.tensor, b: gl.tensor, head: gl.tensor, keys: gl.tensor, ELEMENT: gl.constexpr
) -> gl.tensor:
    """What `attend_rows` has to know of a row's context, and how many entries are always attended."""
    first = number(records_ptr, b, _FIRST).to(gl.int32)
    end = number(records_ptr, b, _END).to(gl.int32)
    in_context = first + gl.maximum(keys.to(gl.int32) - end, 0)
    context = number(records_ptr, b, _KV) + head * number(records_ptr, b, _KV + 1)
    tail = number(records_ptr, b, _TAIL) + head * number(records_ptr, b, _TAIL + 1)
    # Found in units of 16 bytes, so that loads are known to be aligned.
    to_tail = (tail - context) // 16 * (128 // ELEMENT.primitive_bitwidth)
    rows_ptr = gl.multiple_of(context.to(gl.pointer_type(ELEMENT)), 16)
    entries = in_context + number(records_ptr, b, _TAIL_KEYS).to(gl.int32)
    return (rows_ptr, first, end, in_context, to_tail), entries


@gluon.jit(do_not_specialize=["width", "slots"])
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
    """Program (split, row): the tiles that this one of `pass_kernel` weighed, into a slot.

    EXACT: also attends to a share of the listed keys, and of sinks, recent window and tail. SEGMENTS: a power of two,
    P at least.
    """
    row = gl.program_id(1)
    programs = gl.num_programs(0)
    b, head = row // HEADS, row % HEADS
    keys = number(records_ptr, b, _KEYS)
    searches = number(records_ptr, b, _END) > number(records_ptr, b, _FIRST)
    values_ptrs = value_pointers(records_ptr, b, head, keys, DIM, VALUE_BITS)
    place = row.to(gl.int64) * programs + gl.program_id(0)
    weights_ptr += place * width * GROUP
    tiles_ptr += place * (width // TILE)
    ring = new_ring(TILE, DIM, VALUE_BITS, AHEAD)
    room = gl.allocate_shared_memory(gl.float16, [2, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # This began when all programs of the pass had waited: what came before that, such as cuts, is there.
    _, _, _, shift = movable_cut(cuts_ptr, row)
    reference = reference_weights(normalisers_ptr, row, shift, searches, X, GROUP)
    state = (no_values_yet(X, DIM), gl.full([X], 0.0, gl.float32, layout=OF_ROWS), reference)
    if EXACT:
        context, entries = context_of(records_ptr, b, head, keys, q_ptr.dtype.element_ty)
        queries = load_row_queries(q_ptr, row, X, GROUP, DIM)
        begin = gl.program_id(0) * _ROWS_TILE
        state = attend_rows(
            queries,
            ids_ptr,
            begin,
            programs * _ROWS_TILE,
            entries,
            0,
            context,
            state,
            scale_log2,
            X,
            DIM,
            VALUE_BITS,
        )
    wait_alone(CHAINED)
    let_next_begin(CHAINED)
    weighed = gl.load(weighed_ptr + place, cache_modifier=".cg")
    coming = first_tiles(tiles_ptr, weighed, width // TILE, AHEAD)
    if EXACT:
        segment = gl.arange(0, SEGMENTS, layout=_COUNTS)
        counts = gl.load(
            counts_ptr + row * programs + segment, mask=segment < programs, other=0, cache_modifier=".cg"
        )
    if weighed > 0:
        for turn in gl.static_range(AHEAD):
            copy_tile(ring, turn, values_ptrs[0], coming[turn], TILE, DIM, VALUE_BITS, AHEAD)
            end_of_copies()
    if EXACT:
        chosen, listed, tile = next_segment(counts, segment, programs, programs)
        while chosen >= 0:
            segment_ptr = ids_ptr + (row.to(gl.int64) * programs + chosen) * width
            state = attend_rows(
                queries, segment_ptr, tile * _ROWS_TILE, programs * _ROWS_TILE, listed, listed, context, state,
                scale_log2, X, DIM, VALUE_BITS,
            )  # fmt: skip
            chosen, listed, tile = next_segment(counts, segment, chosen, programs)
    sums, total, peaks = state
    if weighed > 0:
        in_units: gl.tensor = ()
        for plane in gl.static_range(len(sums)):
            in_units += (sums[plane] * (1.0 / unit_of(plane, VALUE_BITS)),)
        none = gl.full([16, X], 0.0, gl.float32, layout=RESULT)
        shrink = gl.convert_layout(gl.exp2(reference - peaks).to(gl.float16), gl.SliceLayout(0, RIGHT))
        in_units, evens, totals = coarse_share(
            (in_units, none, none), ring, room, coming, values_ptrs, weights_ptr, tiles_ptr, weighed, shrink,
            TILE, X, GROUP, DIM, VALUE_BITS, AHEAD,
        )  # fmt: skip
        sums = values_of(in_units, gl.max(evens, 0), DIM, VALUE_BITS)
        total += gl.max(totals, 0)
    n = gl.arange(0, X, layout=OF_ROWS)
    at = (row.to(gl.int64) * slots + gl.program_id(0)) * GROUP + n
    gl.store(peaks_ptr + at, gl.where(total > 0, peaks, float("-inf")), mask=n < GROUP)
    gl.store(totals_ptr + at, total, mask=n < GROUP)
    store_sums(sums_ptr, sums, at, (n < GROUP) & (total > 0), DIM, VALUE_BITS)
