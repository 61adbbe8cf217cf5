"""The kernels of `warp_pass` and `warp_values` in one: a program attends to all of its share of a row at once.

It goes over its keys, then over the values of those that count, then over the exact rows of those that it has listed,
which have come near meanwhile. So no program waits until all others have ended, and while some go over one of these the
memory is read by others. What a query attends to exactly lies together: programs' shares of exact rows differ.

Shape legend: as in `coarse.sizes`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels import records
from decode_engine.kernels.coarse.warp.warp_findings import LANES
from decode_engine.kernels.coarse.warp.warp_pass import pass_over_keys
from decode_engine.kernels.coarse.warp.warp_records import meet_lanes, number, value_codes
from decode_engine.kernels.coarse.warp.warp_rows import attend_rows, load_row_queries
from decode_engine.kernels.coarse.warp.warp_values import (
    ROWS_TILE,
    always_attended,
    attend_tiles,
    context_of,
    store_state,
)

_KEYS = gl.constexpr(records.KEYS)


@gluon.jit(do_not_specialize=["width"])
def together_kernel(
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
    KEY_BITS: gl.constexpr,
    VALUE_BITS: gl.constexpr,
    VALUE_GROUPS: gl.constexpr,
    TILE: gl.constexpr,
    AHEAD: gl.constexpr,
    VALUES_AHEAD: gl.constexpr,
    EARLY: gl.constexpr,
    CHAINED: gl.constexpr,
) -> None:
    """Program (split, row): a share of the row's blocks, and every so many tiles of what is always attended."""
    split, row = gl.program_id(0), gl.program_id(1)
    b, head = row // HEADS, row % HEADS
    element: gl.constexpr = q_ptr.dtype.element_ty
    BYTES: gl.constexpr = element.primitive_bitwidth // 8
    context, always = context_of(records_ptr, b, head, element)
    count, weighed, peaks = pass_over_keys(
        q_ptr, records_ptr, normalisers_ptr, cuts_ptr, ids_ptr, weights_ptr, tiles_ptr, context[0], scale_log2, width,
        HEADS, GROUP, X, DIM, KEY_BITS, VALUE_GROUPS, TILE, True, AHEAD, EARLY, 2 * DIM * BYTES, CHAINED,
    )  # fmt: skip
    place = row * gl.num_programs(0) + split
    gl.store(counts_ptr + place, count)
    gl.store(weighed_ptr + place, weighed)
    meet_lanes()
    codes_ptr = value_codes(records_ptr, b, head, number(records_ptr, b, _KEYS), DIM, VALUE_BITS)
    sums, total = attend_tiles(
        codes_ptr, weights_ptr, tiles_ptr, None, place, weighed * 0, weighed, width,
        TILE, X, GROUP, DIM, VALUE_BITS, VALUE_GROUPS, 0, VALUES_AHEAD,
    )  # fmt: skip
    # Nothing was weighed where nothing is searched.
    state = (sums, total, gl.where(total > 0, peaks, float("-inf")))
    queries = load_row_queries(q_ptr, row, X, GROUP, DIM)
    entry = gl.arange(0, ROWS_TILE, layout=LANES)
    own_ptr = ids_ptr + place.to(gl.int64) * width
    for begin in range(0, count, ROWS_TILE):
        ids = gl.load(own_ptr + begin + entry, mask=begin + entry < count, other=0, cache_modifier=".cg")
        state = attend_rows(queries, ids, count - begin, context, state, scale_log2, X, DIM, VALUE_BITS)
    for begin in range(split * ROWS_TILE, always, gl.num_programs(0) * ROWS_TILE):
        keys = always_attended(begin + entry, context)
        state = attend_rows(queries, keys, always - begin, context, state, scale_log2, X, DIM, VALUE_BITS)
    store_state(
        sums_ptr, peaks_ptr, totals_ptr, state, row.to(gl.int64) * slots + split, X, GROUP, DIM, VALUE_BITS
    )
