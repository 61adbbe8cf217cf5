"""The kernel of `coarse_pass` for one warp each, where tensor cores and registers suffice (`warp_tiles`).

It does what that one does, by the same cut, with results that differ by rounding. A program is one warp: it waits for
nobody, and what it reads next is on its way while it works.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels import border, records
from decode_engine.kernels.coarse.warp import warp_rows
from decode_engine.kernels.coarse.warp.warp_codes import key_layout
from decode_engine.kernels.coarse.warp.warp_lists import list_keys
from decode_engine.kernels.coarse.warp.warp_records import (
    key_pointers,
    let_next_begin,
    number,
    prefetch_steps,
    value_pointers,
    wait_alone,
)
from decode_engine.kernels.coarse.warp.warp_rings import (
    copy_tile,
    end_of_copies,
    new_ring,
    wait_for_copies,
)
from decode_engine.kernels.coarse.warp.warp_rooms import (
    add_sums,
    copied_steps,
    copy_steps,
    keep_queries,
    kept_queries,
    load_sums,
    needs_rooms,
    new_steps,
    new_sums,
)
from decode_engine.kernels.coarse.warp.warp_rows import attend_rows
from decode_engine.kernels.coarse.warp.warp_tiles import (
    OF_KEYS,
    OF_ROWS,
    add_planes,
    fold,
    key_of,
    load_queries,
    load_steps,
    multiply_keys,
    no_values_yet,
    store_sums,
)
from decode_engine.kernels.coarse.warp.warp_values import (
    attend_tile,
    attention_of,
    load_value_steps,
    next_tiles,
    no_tiles,
    nothing_yet,
    weigh_tile,
)
from index_store.indexes.coarse_rows.scalars import scalar_rows

NEGLIGIBLE = 0.005
"""Share of its even share of a row's weight, all heads together, below which a tile's values are not read: that holds
for less than this share of all of them, then."""

_KEYS, _FIRST, _END, _TAIL_KEYS, _KV, _TAIL = (
    gl.constexpr(field)
    for field in (records.KEYS, records.FIRST, records.END, records.TAIL_KEYS, records.KV, records.TAIL)
)
_BLOCK = gl.constexpr(scalar_rows.BLOCK)
_DRAW_STEP = gl.constexpr(border.DRAW_STEP.value)
_HEAD_STEP = gl.constexpr(border.HEAD_STEP)
_INFINITE = gl.constexpr(border.INFINITE)
_ROWS_TILE = gl.constexpr(warp_rows.TILE)
_NEGLIGIBLE = gl.constexpr(NEGLIGIBLE)


@gluon.jit
def movable_cut(cuts_ptr: gl.tensor, row: gl.tensor) -> gl.tensor:
    """A row's cut (`border.load_cut`) in units in which it is about an eighth, and log2 of how many these are of one.

    Weights are multiplied as float16 numbers. A power of two: the bits of weights and cuts move alike.
    """
    least = gl.load(cuts_ptr + row * 3, cache_modifier=".cg")
    above = gl.load(cuts_ptr + row * 3 + 1, cache_modifier=".cg")
    draws = gl.load(cuts_ptr + row * 3 + 2, cache_modifier=".cg")
    bounded = (above > 0) & (above < _INFINITE)
    shift = gl.where(bounded, 124 - (above >> 23), 0)
    least = gl.where(bounded & (least >= 0), least + (shift << 23), least)
    return least, gl.where(bounded, above + (shift << 23), above), draws, shift.to(gl.float32)


@gluon.jit
def share_of_blocks(first: gl.tensor, end: gl.tensor) -> gl.tensor:
    """A program's first block, and where all of a row's end; its others follow num_programs blocks apart each.

    What a query attends to lies together, at the end of a context above all. So neighbours are different programs'.
    """
    base = first // _BLOCK
    stop = gl.where(end > first, (end + _BLOCK - 1) // _BLOCK, base)
    return base + gl.program_id(0), stop


@gluon.jit
def tile_after(tile: gl.tensor, TILES: gl.constexpr, inner: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """First key of a program's tile that comes TILES tiles after that which begins with key `tile`, the key `inner` of
    its block."""
    blocks = (inner + TILES * T) // _BLOCK
    return tile + TILES * T + blocks * ((gl.num_programs(0) - 1) * _BLOCK)


@gluon.jit
def kept_keys(
    together: gl.tensor,
    key: gl.tensor,
    head: gl.tensor,
    searched: gl.tensor,
    least: gl.tensor,
    above: gl.tensor,
    draws: gl.tensor,
) -> gl.tensor:
    """Which keys a cut keeps, as `border.passes` decides, int32. together: bits of their weights, summed over heads."""
    drawn = key * _DRAW_STEP + head * _HEAD_STEP
    return ((together >= gl.where(drawn < draws, least, above)) & searched).to(gl.int32)


@gluon.jit
def exact_share(
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    row: gl.tensor,
    b: gl.tensor,
    head: gl.tensor,
    listed: gl.tensor,
    sums: gl.tensor,
    total: gl.tensor,
    peaks: gl.tensor,
    scale_log2: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds exact attention to a program's listed keys, and to its share of what is always attended."""
    element: gl.constexpr = q_ptr.dtype.element_ty
    first = number(records_ptr, b, _FIRST).to(gl.int32)
    end = number(records_ptr, b, _END).to(gl.int32)
    in_context = first + gl.maximum(number(records_ptr, b, _KEYS).to(gl.int32) - end, 0)
    entries = in_context + number(records_ptr, b, _TAIL_KEYS).to(gl.int32)
    tiles = (entries + _ROWS_TILE - 1) // _ROWS_TILE
    share = (tiles + gl.num_programs(0) - 1) // gl.num_programs(0) * _ROWS_TILE
    always = gl.minimum(gl.program_id(0) * share, entries)
    stop = gl.minimum(always + share, entries)
    context = number(records_ptr, b, _KV) + head * number(records_ptr, b, _KV + 1)
    tail = number(records_ptr, b, _TAIL) + head * number(records_ptr, b, _TAIL + 1)
    # Found in units of 16 bytes, so that loads are known to be aligned.
    to_tail = (tail - context) // 16 * (128 // element.primitive_bitwidth)
    rows_ptr = gl.multiple_of(context.to(gl.pointer_type(element)), 16)
    return attend_rows(
        q_ptr, rows_ptr, ids_ptr, row, listed, first, end, always, stop, in_context, to_tail, sums, total, peaks,
        scale_log2, X, GROUP, DIM, BITS,
    )  # fmt: skip


@gluon.jit
def see_stores() -> None:
    """Lets all lanes of the warp see what each has stored."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def reference_weights(
    normalisers_ptr: gl.tensor,
    row: gl.tensor,
    shift: gl.tensor,
    searches: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
) -> gl.tensor:
    """What weights are relative to, [X] in units of log2: no peak has to be found among coded keys.

    -inf where nothing is searched, and inf for rows that only pad the tile, which weigh nothing.
    """
    n = gl.arange(0, X, layout=OF_ROWS)
    at = normalisers_ptr + row * GROUP + n
    # Past the first-level cache, as cuts are.
    normalisers = gl.load(at, mask=n < GROUP, other=float("inf"), cache_modifier=".cg")
    return gl.where(searches, normalisers - shift, float("-inf"))


@gluon.jit(do_not_specialize=["width", "slots"])
def pass_kernel(  # noqa: PLR0912, PLR0915 - what a program does stands in one place
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    cuts_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    counts_ptr: gl.tensor,
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
    KEY_BITS: gl.constexpr,
    VALUE_BITS: gl.constexpr,
    TILE: gl.constexpr,
    ATTEND: gl.constexpr,
    EXACT: gl.constexpr,
    AHEAD: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (split, row): a share of the row's blocks, as in `coarse_pass.pass_kernel`.

    EXACT, with ATTEND: attends to the listed keys, too, and to a share of sinks, recent window and tail.
    AHEAD: tiles of keys that are on their way. The first ones are so while the launches before still work: what these
    do not write, and what was there before they began, may be read. Values follow: those of a tile are asked for when
    its weights are known, if these are enough, and are attended to AHEAD tiles later.
    """
    ROOMS: gl.constexpr = ATTEND and needs_rooms(X, DIM)
    TILES: gl.constexpr = _BLOCK // TILE
    row = gl.program_id(1)
    b, head = row // HEADS, row % HEADS
    first = number(records_ptr, b, _FIRST).to(gl.int32)
    end = number(records_ptr, b, _END).to(gl.int32)
    keys = number(records_ptr, b, _KEYS)
    keys_ptrs = key_pointers(records_ptr, b, head, keys, DIM, KEY_BITS)
    _, scales_ptr, offsets_ptr = keys_ptrs
    values_ptrs = value_pointers(records_ptr, b, head, keys, DIM, VALUE_BITS)
    first_block, stop = share_of_blocks(first, end)
    apart = gl.num_programs(0)
    start, beyond = first_block * _BLOCK, gl.minimum(stop * _BLOCK, keys.to(gl.int32))
    # A context's last keys are loaded with some before them, which do not count.
    last = beyond - TILE
    prefetch_steps(keys_ptrs, values_ptrs, start, beyond, DIM, ATTEND, CHAINED)
    key_ring = new_ring(TILE, DIM, KEY_BITS, AHEAD)
    value_ring = new_ring(TILE, DIM, VALUE_BITS, AHEAD) if ATTEND else key_ring
    if ROOMS:
        steps_room = new_steps(DIM)
    if stop > first_block:
        if ROOMS:
            copy_steps(steps_room, 0, scales_ptr, offsets_ptr, first_block, DIM)
        for turn in gl.static_range(AHEAD):
            base = gl.minimum(tile_after(start, turn, 0, TILE), last)
            copy_tile(key_ring, turn, keys_ptrs[0], base, TILE, DIM, KEY_BITS, AHEAD)
            end_of_copies()
    queries, units = load_queries(q_ptr, row, X, GROUP, DIM, KEY_BITS)
    units = units * scale_log2
    if ROOMS:
        queries_room = keep_queries(queries, X, DIM)
        sums_room = new_sums(X, DIM)
    wait_alone(CHAINED)
    let_next_begin(CHAINED)
    least, above, draws, shift = movable_cut(cuts_ptr, row)
    peaks = reference_weights(normalisers_ptr, row, shift, end > first, X, GROUP)
    # Of the weight of a tile, all heads together: with less its values are not read.
    even = gl.exp2(shift) * GROUP * TILE / gl.maximum(end - first, 1).to(gl.float32)
    enough = even * _NEGLIGIBLE
    place = row.to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    inner = key_of(gl.arange(0, TILE, layout=OF_KEYS), TILE)
    attended = nothing_yet(TILE, X, DIM)
    coming = no_tiles(TILE, X, first > end, AHEAD)
    count = gl.full([8], 0, gl.int32, layout=OF_KEYS)
    if stop > first_block:
        if not ROOMS:
            steps = load_steps(scales_ptr + first_block * DIM, offsets_ptr + first_block * DIM, DIM, KEY_BITS)
        turns = first_block * 0
        for block in range(first_block, stop, apart):
            next_block = gl.minimum((block + apart) * _BLOCK, beyond)
            prefetch_steps(keys_ptrs, values_ptrs, next_block, beyond, DIM, ATTEND, CHAINED)
            after = gl.minimum(block + apart, stop - 1)
            if ROOMS:  # a block's steps came with the first tile of all, or of the block before
                wait_for_copies(min(TILES, AHEAD) - 1)
                steps = copied_steps(steps_room, turns // TILES, DIM, KEY_BITS)
                folded, added = fold(kept_queries(queries_room, X, DIM), steps, X, DIM, KEY_BITS)
                copy_steps(steps_room, turns // TILES + 1, scales_ptr, offsets_ptr, after, DIM)
            else:
                folded, added = fold(queries, steps, X, DIM, KEY_BITS)
                steps = load_steps(scales_ptr + after * DIM, offsets_ptr + after * DIM, DIM, KEY_BITS)
            bottom = gl.fma(added, units, 0.0 - peaks)
            sums, evens, totals = attended
            # Sums of a block begin anew: what tensor cores drop of them stays small.
            attended = (no_values_yet(X, DIM), evens, totals)
            for pair in range(0, _BLOCK, 2 * TILE):
                for part in gl.static_range(2):
                    within = pair + part * TILE
                    tile, turn = block * _BLOCK + within, turns + within // TILE
                    begin = gl.minimum(tile, last)
                    if ATTEND:  # they come while keys are multiplied
                        steps_of_values = load_value_steps(values_ptrs, begin, TILE)
                    wait_for_copies(AHEAD - 1)
                    words = key_ring.index(turn % (AHEAD + 1)).load(key_layout(TILE, DIM, KEY_BITS))
                    later = gl.minimum(tile_after(tile, AHEAD, within, TILE), last)
                    copy_tile(key_ring, turn + AHEAD, keys_ptrs[0], later, TILE, DIM, KEY_BITS, AHEAD)
                    if ATTEND:
                        attended = attend_tile(
                            attended, coming[0], value_ring, turn + 1, TILE, X, DIM, VALUE_BITS, AHEAD
                        )
                    products = multiply_keys(words, folded, TILE, X, DIM, KEY_BITS)
                    weights = gl.exp2(gl.fma(products, gl.expand_dims(units, 0), gl.expand_dims(bottom, 0)))
                    summed = gl.sum(weights, 1)
                    together, heavy = summed.to(gl.int32, bitcast=True), gl.sum(summed, 0) >= enough
                    whole = (first < tile + 1) & (end >= tile + TILE) & (last >= tile)
                    # Most tiles are searched as a whole, and none of their keys is kept.
                    if not whole or gl.max(together, 0) >= least:
                        key = begin + inner
                        searched = (key >= gl.maximum(first, tile)) & (key < end)
                        kept = kept_keys(together, key, head, searched, least, above, draws)
                        count = list_keys(ids_ptr + place * width, count, kept, key, TILE)
                        weights = gl.where(gl.expand_dims(searched & (kept == 0), 1), weights, 0.0)
                    if ATTEND:
                        scaled = coming[0][1]
                        if heavy:
                            copy_tile(value_ring, turn, values_ptrs[0], begin, TILE, DIM, VALUE_BITS, AHEAD)
                            attended, scaled = weigh_tile(attended, weights, steps_of_values, TILE, X)
                        coming = next_tiles(coming, heavy, scaled)
                    end_of_copies()
            turns += TILES
            if ROOMS:
                add_sums(sums_room, attended[0], X, DIM)
            else:
                attended = (add_planes(sums, attended[0], DIM), attended[1], attended[2])
        wait_for_copies(0)
        if ATTEND:
            sums, evens, totals = attended
            attended = (no_values_yet(X, DIM), evens, totals)
            turn = turns + 1
            for left in gl.static_range(AHEAD):
                attended = attend_tile(
                    attended, coming[left], value_ring, turn + left, TILE, X, DIM, VALUE_BITS, AHEAD
                )
            if ROOMS:
                add_sums(sums_room, attended[0], X, DIM)
            else:
                attended = (add_planes(sums, attended[0], DIM), attended[1], attended[2])
    gl.store(counts_ptr + place, gl.max(count, 0))
    if ATTEND:
        if ROOMS:
            attended = (load_sums(sums_room, X, DIM), attended[1], attended[2])
        sums, total = attention_of(attended, DIM, VALUE_BITS)
        if EXACT:
            see_stores()
            sums, total, peaks = exact_share(
                q_ptr, records_ptr, ids_ptr + place * width, row, b, head, gl.max(count, 0), sums, total, peaks,
                scale_log2, X, GROUP, DIM, VALUE_BITS,
            )  # fmt: skip
        n = gl.arange(0, X, layout=OF_ROWS)
        at = (row.to(gl.int64) * slots + gl.program_id(0)) * GROUP + n
        gl.store(peaks_ptr + at, gl.where(total > 0, peaks, float("-inf")), mask=n < GROUP)
        gl.store(totals_ptr + at, total, mask=n < GROUP)
        store_sums(sums_ptr, sums, at, (n < GROUP) & (total > 0), DIM, VALUE_BITS)
