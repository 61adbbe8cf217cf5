"""Exact attention of one warp to listed keys and to its share of those that are always attended.

Entries are a list's keys, then keys of the context outside of the searched range, then the tail's. Their rows are
loaded in the layouts of operands, 16 bytes of a row for each lane and load. Values come in the planes of coded ones, so
that their sums add to those in registers; where rows of codes have 8 words, that makes 8 bytes for each lane and load.
Weights are relative to the same number as those of coded keys; where that could overflow, everything so far moves to
another one.

Shape legend: as in `warp_tiles`; E entries of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.coarse.warp.warp_places import (
    as_planes,
    channels_of,
    key_row_layout,
    plane_count,
    row_places,
    value_places,
    value_row_layout,
)
from decode_engine.kernels.coarse.warp.warp_tiles import LEFT, RESULT, RIGHT, as_right

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
def places_of(
    ids_ptr: gl.tensor,
    tile: gl.tensor,
    listed: gl.tensor,
    first: gl.tensor,
    end: gl.tensor,
    context_stop: gl.tensor,
    to_tail: gl.tensor,
    before: gl.tensor,
    DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Where the rows of a tile's entries begin, [E].

    listed: of these many entries ids_ptr has the keys. From there on they are keys 0 .. first - 1 and end and on, those
    from context_stop on the tail's, which begin to_tail elements behind the context's; `before` of these are others'.
    """
    entry = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    ids = gl.load(ids_ptr + entry, mask=entry < listed, other=0, cache_modifier=".cg")
    always = before + entry - listed
    ids = gl.where(entry < listed, ids, gl.where(always < first, always, end + always - first))
    tail = entry >= gl.maximum(context_stop, listed)
    both: gl.constexpr = 2 * DIM  # elements of a key and its value
    return gl.where(tail, to_tail + (entry - context_stop).to(gl.int64) * both, ids.to(gl.int64) * both)


@gluon.jit
def load_rows(
    rows_ptr: gl.tensor,
    tile: gl.tensor,
    where: gl.tensor,
    stop: gl.tensor,
    DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Rows [E, DIM] of a tile's entries, which begin `where` [E] from rows_ptr on; zeros for those from `stop` on."""
    entry = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(where, 1) + gl.expand_dims(channel, 0)
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
    q_ptr: gl.tensor,
    rows_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    row: gl.tensor,
    listed: gl.tensor,
    first: gl.tensor,
    end: gl.tensor,
    always: gl.tensor,
    stop: gl.tensor,
    in_context: gl.tensor,
    to_tail: gl.tensor,
    sums: gl.tensor,
    totals: gl.tensor,
    peaks: gl.tensor,
    scale_log2: gl.tensor,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds what is attended exactly to sums of planes, totals [X] and peaks [X], which weights are relative to.

    listed: keys of ids_ptr. always, stop: the share of the entries that every row attends to, of which the first
    in_context are the context's.
    """
    element: gl.constexpr = q_ptr.dtype.element_ty
    KEY_ROWS: gl.constexpr = key_row_layout(_TILE, DIM)
    VALUE_ROWS: gl.constexpr = value_row_layout(_TILE, DIM, BITS)
    queries = load_row_queries(q_ptr, row, X, GROUP, DIM)
    everything = listed + stop - always
    # Entries of the share as if they followed the list: the always-th comes first.
    context_stop = listed + in_context - always
    keys_at = places_of(ids_ptr, 0, listed, first, end, context_stop, to_tail, always, DIM, KEY_ROWS)
    values_at = places_of(ids_ptr, 0, listed, first, end, context_stop, to_tail, always, DIM, VALUE_ROWS)
    for tile in range(0, everything, _TILE):
        keys = load_rows(rows_ptr, tile, keys_at, everything, DIM, KEY_ROWS)
        values = load_rows(rows_ptr + DIM, tile, values_at, everything, DIM, VALUE_ROWS)
        # Where the next rows are is on its way while these are.
        after = tile + _TILE
        keys_at = places_of(ids_ptr, after, listed, first, end, context_stop, to_tail, always, DIM, KEY_ROWS)
        values_at = places_of(
            ids_ptr, after, listed, first, end, context_stop, to_tail, always, DIM, VALUE_ROWS
        )
        logits = multiply_rows(keys, queries, X, DIM) * scale_log2
        there = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, RESULT)) < everything
        logits = gl.where(gl.expand_dims(there, 1), logits, float("-inf"))
        higher = gl.maximum(peaks, gl.max(logits, 0) - _HEADROOM)
        shrink = gl.exp2(peaks - higher)
        peaks = higher
        weights = gl.exp2(logits - gl.expand_dims(peaks, 0))
        totals = totals * shrink + gl.sum(weights, 0)
        shrunk: gl.tensor = ()
        for plane in gl.static_range(plane_count(DIM)):
            shrunk += (sums[plane] * gl.expand_dims(shrink, 0),)
        sums = add_rows(shrunk, values, as_right(weights.to(element), _TILE, X), DIM, BITS)
    return sums, totals, peaks
