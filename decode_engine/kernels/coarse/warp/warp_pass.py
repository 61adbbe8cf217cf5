"""The kernel of `coarse_pass` that goes over keys, for one warp each (`value_tiles`).

It scores coded keys, lists those that are kept, and leaves the weights of the others for `warp_values`, tile by tile. A
tile of next to no weight is left out, so that its values are never read. Both launches keep the registers of a warp
few, so that a processor holds many: each waits for nobody, and what it reads next is on its way while it works.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels import border, records
from decode_engine.kernels.coarse.warp.tiles.folding import fold, load_queries, load_steps
from decode_engine.kernels.coarse.warp.tiles.key_tiles import key_of
from decode_engine.kernels.coarse.warp.tiles.operands import OF_ROWS, RESULT
from decode_engine.kernels.coarse.warp.warp_findings import (
    as_float,
    list_keys,
    load_value_steps,
    nothing_listed,
    one_of,
    store_weights,
)
from decode_engine.kernels.coarse.warp.warp_records import (
    key_pointers,
    let_next_begin,
    number,
    prefetch_key_codes,
    prefetch_key_steps,
    prefetch_value_steps,
    value_steps,
    wait_alone,
)
from decode_engine.kernels.coarse.warp.warp_rings import (
    copy_tile,
    end_of_copies,
    new_ring,
    wait_for_copies,
)
from decode_engine.kernels.coarse.warp.warp_scores import (
    by_tiles,
    new_scores,
    score_block,
    scored_keys_layout,
    scored_layout,
    tile_after,
    tiles_together,
)
from index_store.indexes.coarse_rows.parameters import BLOCK

NEGLIGIBLE = 0.005
"""Share of its even share of a row's weight, all heads together, below which a tile's values are not read: that holds
for less than this share of all of them, then."""
_KEYS, _FIRST, _END = (gl.constexpr(field) for field in (records.KEYS, records.FIRST, records.END))
_BLOCK = gl.constexpr(BLOCK)
_DRAW_STEP = gl.constexpr(border.DRAW_STEP.value)
_HEAD_STEP = gl.constexpr(border.HEAD_STEP)
_NEGLIGIBLE = gl.constexpr(NEGLIGIBLE)


@gluon.jit
def load_cut(cuts_ptr: gl.tensor, row: gl.tensor) -> gl.tensor:
    """A row's cut, as `border.load_cut`."""
    least = gl.load(cuts_ptr + row * 3, cache_modifier=".cg")
    above = gl.load(cuts_ptr + row * 3 + 1, cache_modifier=".cg")
    return least, above, gl.load(cuts_ptr + row * 3 + 2, cache_modifier=".cg")


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
def kept_keys(
    together: gl.tensor,
    key: gl.tensor,
    head: gl.tensor,
    searched: gl.tensor,
    least: gl.tensor,
    above: gl.tensor,
    draws: gl.tensor,
) -> gl.tensor:
    """Which keys a cut keeps, as `border.passes` decides, int32, [T, P] as all that is of keys.

    together: bits of their weights, summed over heads.
    """
    drawn = key * _DRAW_STEP + head * _HEAD_STEP
    return ((together >= gl.where(drawn < draws, least, above)) & searched).to(gl.int32)


@gluon.jit
def reference_weights(
    normalisers_ptr: gl.tensor,
    row: gl.tensor,
    searches: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    TIMES: gl.constexpr,
) -> gl.tensor:
    """What weights are relative to, [X] in units of log2: no peak has to be found among coded keys.

    -inf where nothing is searched, and inf for rows that only pad the tile, which weigh nothing. TIMES: that all rows
    stand beside each other.
    """
    n = gl.arange(0, X, layout=OF_ROWS) % (X // TIMES)
    at = normalisers_ptr + row * GROUP + n
    # Past the first-level cache, as cuts are.
    normalisers = gl.load(at, mask=n < GROUP, other=float("inf"), cache_modifier=".cg")
    return gl.where(searches, normalisers, float("-inf"))


@gluon.jit
def over_eights(numbers: gl.tensor, T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """Sums over a lane's keys, [8, P, C], of [T, P, C]."""
    summed = gl.sum(gl.reshape(numbers, [T // 8, 8, P, X // P]), 0)
    return gl.convert_layout(summed, scored_layout(8, X, P), assert_trivial=True)


@gluon.jit
def leave_weights(
    ptrs: gl.tensor,
    left: gl.tensor,
    weights: gl.tensor,
    of_tiles: gl.tensor,
    enough: gl.tensor,
    above: gl.tensor,
    begins: gl.tensor,
    steps: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUPS: gl.constexpr,
    P: gl.constexpr,
) -> gl.tensor:
    """Leaves weights [T, P, C] of those of P tiles whose values are read, in `ptrs`: to weights, and to tiles.

    left: how many tiles there were, what 1 was among their weights, and sums over what is read, [8, P, C]: of weights,
    and of these times the offsets of each group of channels; what these are now. of_tiles: the weight of each tile,
    [P], of which some is enough. above: bits of a number that weights are below, mostly. begins: first key of each
    tile. steps: scales and offsets of the values, as loaded.
    """
    weighed, unit, sums = left
    LAYOUT: gl.constexpr = scored_keys_layout(T, X, P)
    part_of = gl.arange(0, P, layout=gl.SliceLayout(0, LAYOUT))
    heavy: gl.tensor = ()
    for part in gl.static_range(P):
        own = gl.max(gl.where(part_of == part, of_tiles, 0.0), 0)
        heavy += ((own >= enough).to(gl.int32),)
    many = heavy[0] + (heavy[1] if P == 2 else 0)
    if many > 0:
        scales: gl.tensor = ()
        for group in gl.static_range(GROUPS):
            scales += (as_float(steps[group]),)
        unit = store_weights(ptrs[0], weighed, weights, heavy, scales, unit, above, T, X, P)
        into = ptrs[1] + 2 * weighed
        for part in gl.static_range(P):
            gl.store(into, begins[part], mask=heavy[part] > 0)
            gl.store(into + 1, unit.to(gl.int32, bitcast=True), mask=heavy[part] > 0)
            into += 2 * heavy[part]
        parts = gl.arange(0, P, layout=gl.SliceLayout(0, gl.SliceLayout(2, scored_layout(8, X, P))))
        counts = gl.expand_dims(gl.expand_dims(gl.where(parts > 0, heavy[P - 1], heavy[0]) > 0, 0), 2)
        new: gl.tensor = (sums[0] + gl.where(counts, over_eights(weights, T, X, P), 0.0),)
        for group in gl.static_range(GROUPS):
            offsets = as_float(steps[GROUPS + group])
            more = over_eights(weights * gl.expand_dims(offsets, 2), T, X, P)
            new += (sums[1 + group] + gl.where(counts, more, 0.0),)
        sums = new
        weighed += many
    return weighed, unit, sums


@gluon.jit
def no_sums_left(X: gl.constexpr, P: gl.constexpr, COUNT: gl.constexpr) -> gl.tensor:
    """COUNT sums [8, P, C]."""
    zero = gl.full([8, P, X // P], 0.0, gl.float32, layout=scored_layout(8, X, P))
    sums: gl.tensor = ()
    for _ in gl.static_range(COUNT):
        sums += (zero,)
    return sums


@gluon.jit
def store_left(
    ptr: gl.tensor, sums: gl.tensor, X: gl.constexpr, GROUP: gl.constexpr, P: gl.constexpr
) -> None:
    """Writes sums [8, P, C], over lanes' keys and tiles, of GROUP query heads each."""
    n = gl.arange(0, X // P, layout=gl.SliceLayout(0, gl.SliceLayout(0, scored_layout(8, X, P))))
    for kind in gl.static_range(len(sums)):
        own = gl.sum(gl.sum(sums[kind], 0), 0)
        gl.store(ptr + kind * GROUP + n, own, mask=n < GROUP)


@gluon.jit(do_not_specialize=["width"])
def pass_kernel(  # noqa: PLR0912, PLR0915 - what a program does stands in one place
    q_ptr: gl.tensor,
    records_ptr: gl.tensor,
    normalisers_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    counts_ptr: gl.tensor,
    weights_ptr: gl.tensor,
    tiles_ptr: gl.tensor,
    weighed_ptr: gl.tensor,
    left_ptr: gl.tensor,
    cuts_ptr: gl.tensor,
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
    CHAINED: gl.constexpr,
) -> None:
    """Program (split, row): a share of the row's blocks. Lists the keys that are kept.

    WEIGH: leaves the weights of the others, which tiles they are of, and what needs no values. AHEAD: tiles of
    keys that are on their way. A program scores its first block while the launches before still look for the cut, and
    EARLY more come into the second-level cache meanwhile. What these launches do not write, and what was there before
    they began, may be read.
    """
    TILES: gl.constexpr = _BLOCK // TILE
    P: gl.constexpr = tiles_together(X, GROUP)
    KEYS: gl.constexpr = scored_keys_layout(TILE, X, P)
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
    ring, scores = new_ring(TILE, DIM, KEY_BITS, AHEAD), new_scores(TILE, X, P)
    if searches:
        for turn in gl.static_range(AHEAD):
            base = tile_after(top * _BLOCK, turn, 0, TILE)
            there = (base >= start) & (base < beyond)
            copy_tile(ring, turn, keys_ptrs[0], gl.minimum(base, last), there, TILE, DIM, KEY_BITS, AHEAD)
            end_of_copies()
    queries, units = load_queries(q_ptr, row, X, GROUP, DIM, KEY_BITS, P)
    units = units * scale_log2
    place = row.to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    inner = key_of(gl.arange(0, TILE, layout=gl.SliceLayout(1, KEYS)), TILE)
    part_of_keys = gl.arange(0, P, layout=gl.SliceLayout(0, KEYS))
    ptrs = (
        weights_ptr.to(gl.pointer_type(gl.int8)) + place * width * (2 * X // P * VALUE_GROUPS),
        tiles_ptr + place * (2 * (width // TILE)),
    )
    count = nothing_listed(X, P)
    turns = gl.where(searches, (top - lowest) // apart + 2, 0)
    left = (first * 0, scale_log2 * 0, no_sums_left(X, P, 1 + VALUE_GROUPS if WEIGH else 0))
    least, above, draws = row * 0, row * 0, row * 0
    enough, peaks = scale_log2 * 0, gl.full([X], 0.0, gl.float32, layout=OF_ROWS)
    for turn in range(0, turns):
        block = top - turn * apart
        steps = load_steps(keys_ptrs, gl.maximum(block, lowest), DIM, KEY_BITS)
        if turn == 1:
            # The memory would be idle while this waits.
            for more in gl.static_range(EARLY):
                lower = (block - more * apart) * _BLOCK
                end_of_lower = gl.where(lower >= start, beyond, lower)
                prefetch_key_codes(keys_ptrs, lower, end_of_lower, DIM, KEY_BITS, CHAINED)
            wait_alone(CHAINED)
            let_next_begin(CHAINED)
            least, above, draws = load_cut(cuts_ptr, row)
            peaks = reference_weights(normalisers_ptr, row, searches, X, GROUP, P)
            # Of the weight of a tile, all heads together: with less its values are not read.
            enough = _NEGLIGIBLE * GROUP * TILE / gl.maximum(end - first, 1).to(gl.float32)
        if turn > 0:  # the block that was scored last
            for result in range(0, TILES // P):
                tile = (block + apart) * _BLOCK + result * (P * TILE)
                begins: gl.tensor = ()
                for part in gl.static_range(P):
                    begins += (gl.minimum(tile + part * TILE, last),)
                begin = gl.where(part_of_keys > 0, begins[P - 1], begins[0])
                key = gl.expand_dims(begin, 0) + gl.expand_dims(inner, 1)
                own_steps: gl.tensor = ()
                if WEIGH:  # what belongs to values comes while weights are found
                    own_steps = load_value_steps(steps_ptrs, key, VALUE_GROUPS)
                logits = scores.index(result).load(RESULT)
                weights = by_tiles(gl.exp2(logits - gl.expand_dims(peaks, 0)), TILE, X, P)
                summed = gl.sum(weights, 2)
                together, of_tiles = summed.to(gl.int32, bitcast=True), gl.sum(summed, 0)
                whole = (first < tile + 1) & (end >= tile + P * TILE) & (last >= tile + (P - 1) * TILE)
                # Most tiles are searched as a whole, and none of their keys is kept.
                if not whole or gl.max(gl.max(together, 1), 0) >= least:
                    from_on = gl.maximum(first, tile + part_of_keys * TILE)
                    searched = (key >= gl.expand_dims(from_on, 0)) & (key < end)
                    kept = kept_keys(together, key, head, searched, least, above, draws)
                    count = list_keys(ids_ptr + place * width, count, kept, key, TILE, X, P)
                    weights = gl.where(gl.expand_dims(searched & (kept == 0), 2), weights, 0.0)
                if WEIGH:
                    left = leave_weights(
                        ptrs, left, weights, of_tiles, enough, above, begins, own_steps, TILE, X, VALUE_GROUPS, P
                    )  # fmt: skip
        if turn < turns - 1:
            lower = (block - apart) * _BLOCK
            prefetch_key_steps(keys_ptrs, lower, gl.where(lower >= start, beyond, lower), DIM, CHAINED)
            prefetch_value_steps(steps_ptrs, block * _BLOCK, beyond, VALUE_GROUPS, WEIGH and CHAINED)
            folded, steps_units, added = fold(queries, steps, X, DIM, KEY_BITS)
            score_block(
                scores, ring, turn * TILES, keys_ptrs[0], block, (start, beyond, last),
                folded, steps_units * units, added * units, TILE, X, P, DIM, KEY_BITS, AHEAD,
            )  # fmt: skip
    if searches:
        wait_for_copies(0)
    else:
        wait_alone(CHAINED)
        let_next_begin(CHAINED)
    gl.store(counts_ptr + place, one_of(count))
    if WEIGH:
        gl.store(weighed_ptr + place, left[0])
        store_left(left_ptr + place * ((1 + VALUE_GROUPS) * GROUP), left[2], X, GROUP, P)
