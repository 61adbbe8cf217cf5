"""The kernel of `coarse_pass` for one warp each, where tensor cores and registers suffice (`warp_tiles`): its keys.

It scores coded keys, lists those that are kept, and leaves the weights of the others for `warp_values`, tile by tile. A
tile of next to no weight is left out, so that its values are never read. Both launches keep the registers of a warp
few, so that a processor holds many: each waits for nobody, and what it reads next is on its way while it works.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels import border, records
from decode_engine.kernels.coarse.warp.warp_codes import key_layout
from decode_engine.kernels.coarse.warp.warp_findings import list_keys, load_value_steps, store_weights
from decode_engine.kernels.coarse.warp.warp_records import (
    key_pointers,
    let_next_begin,
    number,
    prefetch_key_codes,
    prefetch_key_steps,
    prefetch_value_steps,
    value_steps,
    wait_alone,
    wait_for_lanes,
)
from decode_engine.kernels.coarse.warp.warp_rings import (
    copy_tile,
    end_of_copies,
    new_ring,
    wait_for_copies,
)
from decode_engine.kernels.coarse.warp.warp_tiles import (
    OF_KEYS,
    OF_ROWS,
    as_right,
    fold,
    key_of,
    load_queries,
    load_steps,
    multiply_keys,
)
from index_store.indexes.coarse_rows.scalars import scalar_rows

NEGLIGIBLE = 0.005
"""Share of its even share of a row's weight, all heads together, below which a tile's values are not read: that holds
for less than this share of all of them, then."""
_KEYS, _FIRST, _END = (gl.constexpr(field) for field in (records.KEYS, records.FIRST, records.END))
_BLOCK = gl.constexpr(scalar_rows.BLOCK)
_DRAW_STEP = gl.constexpr(border.DRAW_STEP.value)
_HEAD_STEP = gl.constexpr(border.HEAD_STEP)
_INFINITE = gl.constexpr(border.INFINITE)
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
    """A program's first block, its last one, and where all of a row's end; its own are num_programs blocks apart.

    What a query attends to lies together, at the end of a context above all. So neighbours are different programs', and
    each goes from its last block to its first: what is kept is known early.
    """
    base = first // _BLOCK
    stop = gl.where(end > first, (end + _BLOCK - 1) // _BLOCK, base)
    lowest = base + gl.program_id(0)
    others = gl.maximum(stop - 1 - lowest, 0) // gl.num_programs(0)
    return lowest, lowest + others * gl.num_programs(0), stop


@gluon.jit
def tile_after(tile: gl.tensor, TILES: gl.constexpr, inner: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """First key of a program's tile that comes TILES tiles after that which begins with key `tile`, the key `inner` of
    its block."""
    blocks = (inner + TILES * T) // _BLOCK
    return tile + TILES * T - blocks * ((gl.num_programs(0) + 1) * _BLOCK)


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


@gluon.jit(do_not_specialize=["width"])
def pass_kernel(  # noqa: PLR0915 - what a program does stands in one place
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    cuts_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    counts_ptr: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    weighed_ptr: gl.tensor,
    cells_ptr: gl.tensor,
    told_ptr: gl.tensor,
    scale_log2: gl.tensor,
    width: gl.tensor,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    KEY_BITS: gl.constexpr,
    VALUE_GROUPS: gl.constexpr,
    TILE: gl.constexpr,
    WEIGH: gl.constexpr,
    AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    QUEUES: gl.constexpr,
    CELLS: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (split, row): a share of the row's blocks. Lists the keys that are kept.

    WEIGH: leaves the weights of the others, what their values' codes mean, and which tiles they are of. AHEAD: tiles of
    keys that are on their way. The first ones are so while the launches before still work, and EARLY more blocks come
    into the second-level cache: the memory would be idle. What these launches do not write, and what was there before
    they began, may be read. CELLS: of each of the QUEUES in which kept keys are announced at once, 0 for none.
    """
    TILES: gl.constexpr = _BLOCK // TILE
    row = gl.program_id(1)
    b, head = row // HEADS, row % HEADS
    first = number(records_ptr, b, _FIRST).to(gl.int32)
    end = number(records_ptr, b, _END).to(gl.int32)
    keys = number(records_ptr, b, _KEYS)
    keys_ptrs = key_pointers(records_ptr, b, head, keys, DIM, KEY_BITS)
    lowest, top, stop = share_of_blocks(first, end)
    apart = gl.num_programs(0)
    start, beyond = lowest * _BLOCK, gl.minimum(stop * _BLOCK, keys.to(gl.int32))
    # A context's last keys are loaded with some before them, which do not count.
    last = beyond - TILE
    searches = stop > lowest
    steps_ptrs = value_steps(records_ptr, b, head, keys, VALUE_GROUPS)
    ring = new_ring(TILE, DIM, KEY_BITS, AHEAD)
    if searches:
        for turn in gl.static_range(AHEAD):
            base = tile_after(top * _BLOCK, turn, 0, TILE)
            there = (base >= start) & (base < beyond)
            copy_tile(ring, turn, keys_ptrs[0], gl.minimum(base, last), there, TILE, DIM, KEY_BITS, AHEAD)
            end_of_copies()
    steps = load_steps(keys_ptrs, top, searches, DIM, KEY_BITS)
    prefetch_value_steps(steps_ptrs, top * _BLOCK, beyond, VALUE_GROUPS, WEIGH and CHAINED)
    for more in gl.static_range(1, EARLY + 1):
        lower = (top - more * apart) * _BLOCK
        end_of_lower = gl.where(lower >= start, beyond, lower)
        prefetch_key_codes(keys_ptrs, lower, end_of_lower, DIM, KEY_BITS, CHAINED)
        prefetch_key_steps(keys_ptrs, lower, end_of_lower, DIM, CHAINED)
    queries, units = load_queries(q_ptr, row, X, GROUP, DIM, KEY_BITS)
    units = units * scale_log2
    folded, added = fold(queries, steps, X, DIM, KEY_BITS)
    wait_alone(CHAINED)
    let_next_begin(CHAINED)
    least, above, draws, shift = movable_cut(cuts_ptr, row)
    peaks = reference_weights(normalisers_ptr, row, shift, end > first, X, GROUP)
    # Of the weight of a tile, all heads together: with less its values are not read.
    even = gl.exp2(shift) * GROUP * TILE / gl.maximum(end - first, 1).to(gl.float32)
    enough = even * _NEGLIGIBLE
    place = row.to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    inner = key_of(gl.arange(0, TILE, layout=OF_KEYS), TILE)
    count = gl.full([8], 0, gl.int32, layout=OF_KEYS)
    weighed = first * 0
    if searches:
        turns = lowest * 0
        bottom = gl.fma(added, units, 0.0 - peaks)
        for below in range(0, top - lowest + 1, apart):
            block = top - below
            lower = (block - apart) * _BLOCK
            end_of_lower = gl.where(lower >= start, beyond, lower)
            prefetch_value_steps(steps_ptrs, lower, end_of_lower, VALUE_GROUPS, WEIGH and CHAINED)
            steps = load_steps(keys_ptrs, gl.maximum(block - apart, lowest), None, DIM, KEY_BITS)
            for within in range(0, _BLOCK, TILE):
                tile, turn = block * _BLOCK + within, turns + within // TILE
                begin = gl.minimum(tile, last)
                wait_for_copies(AHEAD - 1)
                if WEIGH:  # what belongs to values comes while keys are multiplied
                    own_steps = load_value_steps(steps_ptrs, begin, TILE, VALUE_GROUPS)
                words = ring.index(turn % (AHEAD + 1)).load(key_layout(TILE, DIM, KEY_BITS))
                later = tile_after(tile, AHEAD, within, TILE)
                copy_tile(
                    ring, turn + AHEAD, keys_ptrs[0], gl.minimum(later, last),
                    (later >= start) & (later < beyond),
                    TILE, DIM, KEY_BITS, AHEAD,
                )  # fmt: skip
                end_of_copies()
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
                    count = list_keys(
                        ids_ptr + place * width, count, kept, key, tile, row,
                        (cells_ptr, told_ptr), TILE, HEADS, QUEUES, CELLS,
                    )  # fmt: skip
                    weights = gl.where(gl.expand_dims(searched & (kept == 0), 1), weights, 0.0)
                if WEIGH:  # noqa: SIM102 - decided when the kernel is compiled
                    if heavy:
                        right = as_right(weights.to(gl.float16), TILE, X)
                        into = weights_ptr + place * width * (GROUP + 2 * VALUE_GROUPS)
                        store_weights(into, weighed, right, own_steps, TILE, X, GROUP)
                        gl.store(tiles_ptr + place * (width // TILE) + weighed, begin)
                        weighed += 1
            folded, added = fold(queries, steps, X, DIM, KEY_BITS)
            bottom = gl.fma(added, units, 0.0 - peaks)
            turns += TILES
        wait_for_copies(0)
    gl.store(counts_ptr + place, gl.max(count, 0))
    if CELLS > 0:
        wait_for_lanes()  # what all lanes have announced is there for those who see this
        gl.atomic_add(told_ptr + QUEUES, 1, sem="release")
    if WEIGH:
        gl.store(weighed_ptr + place, weighed)
