"""Exact attention of one warp to tiles of keys, of a context and of the tail behind it.

Their rows are loaded in the layouts of operands, 16 bytes of a row for each lane and load. Values come in the planes of
coded ones, so that their sums add to those in registers; where rows of codes have 8 words, that makes 8 bytes for each
lane and load. Weights are relative to a number far below the largest logit so far; only where they could overflow
everything so far moves to another one.

Shape legend: as in `value_tiles`; E entries of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.coarse.warp.tiles.channel_places import (
    as_planes,
    channels_of,
    key_row_layout,
    plane_count,
    row_places,
    value_places,
    value_row_layout,
)
from decode_engine.kernels.coarse.warp.tiles.operands import LEFT, RESULT, RIGHT, as_right

TILE = 16
"""E."""
HEADROOM = 64.0
"""Octaves that exact weights may lie above the number that weights are relative to."""

_TILE, _HEADROOM = gl.constexpr(TILE), gl.constexpr(HEADROOM)


@gluon.jit
def load_row_queries(
    q_ptr: gl.tensor, row: gl.tensor, X: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr
) -> gl.tensor:
    """Queries [16, X] as they are, of the planes in which rows of keys are multiplied."""
    PLACES: gl.constexpr = row_places(DIM)
    a = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
    n = gl.arange(0, X, layout=gl.SliceLayout(0, RIGHT))
    queries: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        channel = channels_of(plane, a, PLACES)
        at = gl.expand_dims((row * GROUP + n) * DIM, 0) + gl.expand_dims(channel, 1)
        there = gl.expand_dims(n < GROUP, 0) & gl.expand_dims(channel >= 0, 1)
        queries += (gl.load(q_ptr + at, mask=there, other=0.0),)
    return queries


@gluon.jit
def places_of(keys: gl.tensor, context: gl.tensor, DIM: gl.constexpr) -> gl.tensor:
    """Where the rows of keys begin; from -1 downwards those of the tail."""
    both: gl.constexpr = 2 * DIM  # elements of a key and its value
    own = gl.where(keys >= 0, keys, -1 - keys).to(gl.int64) * both
    return gl.where(keys >= 0, own, own + context[4])


@gluon.jit
def load_rows(
    rows_ptr: gl.tensor,
    keys: gl.tensor,
    stop: gl.tensor,
    context: gl.tensor,
    DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Rows [E, DIM] of keys (`places_of`), from rows_ptr on; zeros for those from `stop` on."""
    keys = gl.convert_layout(keys, gl.SliceLayout(1, LAYOUT))
    entry = gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(places_of(keys, context, DIM), 1) + gl.expand_dims(channel, 0)
    there = gl.expand_dims(entry < stop, 1) & gl.expand_dims(channel >= 0, 0)
    return gl.load(rows_ptr + at, mask=there, other=0.0)


@gluon.jit
def multiply_rows(rows: gl.tensor, queries: gl.tensor, X: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Products [E, X] of rows of keys with queries."""
    PLACES: gl.constexpr = row_places(DIM)
    planes = as_planes(rows, _TILE, DIM, PLACES)
    products = gl.full([_TILE, X], 0.0, gl.float32, layout=RESULT)
    for plane in gl.static_range(plane_count(DIM)):
        own = gl.convert_layout(gl.permute(planes[plane], [1, 0]), LEFT, assert_trivial=True)
        products = mma_v2(own, queries[plane], products)
    return products


@gluon.jit
def add_rows(
    sums: gl.tensor, rows: gl.tensor, weights: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """Adds rows of values [E, DIM] to the planes [16, X], by weights, a right operand [E, X]."""
    PLACES: gl.constexpr = value_places(DIM, BITS)
    planes = as_planes(rows, _TILE, DIM, PLACES)
    new: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
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
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds a tile of keys to a state: sums of planes, sums of weights [X], and what these are relative to.

    keys: [E] int32, from -1 downwards those of the tail; those before `stop` are there. context: where rows begin,
    first and end of the searched range, how many others there are, and elements from rows to the tail's.
    """
    KEY_ROWS: gl.constexpr = key_row_layout(_TILE, DIM)
    VALUE_ROWS: gl.constexpr = value_row_layout(_TILE, DIM, BITS)
    rows_ptr = context[0]
    element: gl.constexpr = rows_ptr.dtype.element_ty
    sums, totals, peaks = state
    keys_ED = load_rows(rows_ptr, keys, stop, context, DIM, KEY_ROWS)
    values_ED = load_rows(rows_ptr + DIM, keys, stop, context, DIM, VALUE_ROWS)
    logits = multiply_rows(keys_ED, queries, X, DIM) * scale_log2
    there = gl.arange(0, _TILE, layout=gl.SliceLayout(1, RESULT)) < stop
    logits = gl.where(gl.expand_dims(there, 1), logits, float("-inf"))
    higher = gl.maximum(peaks, gl.max(logits, 0) - _HEADROOM)
    shrink = gl.exp2(peaks - higher)
    weights = gl.exp2(logits - gl.expand_dims(higher, 0))
    shrunk: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        shrunk += (sums[plane] * gl.expand_dims(shrink, 0),)
    sums = add_rows(shrunk, values_ED, as_right(weights.to(element), _TILE, X), DIM, BITS)
    return sums, totals * shrink + gl.sum(weights, 0), higher
