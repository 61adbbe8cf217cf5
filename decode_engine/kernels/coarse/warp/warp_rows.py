"""Exact attention of one warp to listed keys and to its share of those that are always attended.

Entries are a list's keys, then keys of the context outside of the searched range, then the tail's. Their rows are
loaded in the layouts of operands, 16 bytes of a row for each lane and load. Values come in the planes of
`warp_tiles`, so that their sums add to those of coded values in registers. Weights are relative to the same number as
those of coded keys; where that could overflow, everything so far moves to another one.

Shape legend: as in `warp_tiles`; E entries of a tile.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from decode_engine.kernels.coarse.warp.warp_tiles import LEFT, PLANES, RESULT, RIGHT, as_right

TILE = 16
"""E."""
HEADROOM = 64.0
"""Octaves that exact weights may lie above the number that weights are relative to."""

_TILE, _PLANES, _HEADROOM = gl.constexpr(TILE), gl.constexpr(PLANES), gl.constexpr(HEADROOM)
_KEY_ROWS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [], [], [TILE, 128],
    )
)  # fmt: skip
_VALUE_ROWS_4 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 64], [1, 0], [8, 0]],
        [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]], [], [], [TILE, 128],
    )
)  # fmt: skip
_VALUE_ROWS_2 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 32], [0, 64], [1, 0], [8, 0]],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]], [], [], [TILE, 128],
    )
)  # fmt: skip


@gluon.jit
def load_row_queries(q_ptr: gl.tensor, row: gl.tensor, X: gl.constexpr, GROUP: gl.constexpr) -> gl.tensor:
    """Queries [16, X] as they are, of the eight groups of channels in which rows of keys are multiplied."""
    a = gl.arange(0, 16, layout=gl.SliceLayout(1, RIGHT))
    n = gl.arange(0, X, layout=gl.SliceLayout(0, RIGHT))
    own = (a & 1) + (a >> 3) * 2 + ((a >> 1) & 3) * 8
    queries: gl.tensor = ()
    for group in gl.static_range(_PLANES):
        channel = own + (group & 1) * 4 + (group >> 1) * 32
        at = gl.expand_dims((row * GROUP + n) * 128, 0) + gl.expand_dims(channel, 1)
        there = gl.expand_dims(n < GROUP, 0) & gl.expand_dims(channel >= 0, 1)
        queries += (gl.load(q_ptr + at, mask=there, other=0.0),)
    return queries


@gluon.jit
def load_rows(
    rows_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    entry: gl.tensor,
    listed: gl.tensor,
    stop: gl.tensor,
    first: gl.tensor,
    end: gl.tensor,
    context_stop: gl.tensor,
    to_tail: gl.tensor,
    before: gl.tensor,
    LAYOUT: gl.constexpr,
) -> gl.tensor:
    """Rows [E, 128] of entries from rows_ptr on; zeros for those from `stop` on.

    listed: of these many entries ids_ptr has the keys. From there on they are keys 0 .. first - 1 and end and on, those
    from context_stop on the tail's, which begin to_tail elements behind the context's; `before` of these are others'.
    """
    ids = gl.load(ids_ptr + entry, mask=entry < listed, other=0, cache_modifier=".cg")
    always = before + entry - listed
    ids = gl.where(entry < listed, ids, gl.where(always < first, always, end + always - first))
    tail = entry >= gl.maximum(context_stop, listed)
    where = gl.where(tail, to_tail + (entry - context_stop).to(gl.int64) * 256, ids.to(gl.int64) * 256)
    channel = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(where, 1) + gl.expand_dims(channel, 0)
    there = gl.expand_dims(entry < stop, 1) & gl.expand_dims(channel >= 0, 0)
    return gl.load(rows_ptr + at, mask=there, other=0.0)


@gluon.jit
def multiply_rows(rows: gl.tensor, queries: gl.tensor, X: gl.constexpr) -> gl.tensor:
    """Products [E, X] of rows of keys with queries."""
    bits = gl.reshape(
        rows, [_TILE, 2, 2, 2, 2, 2, 2, 2]
    )  # after the entry channels' bits from the highest on
    groups = gl.reshape(gl.permute(bits, [0, 6, 3, 4, 7, 1, 2, 5]), [_TILE, 16, 2, 2, 2])
    products = gl.full([_TILE, X], 0.0, gl.float32, layout=RESULT)
    for group in gl.static_range(_PLANES):
        halves = gl.split(groups)
        quarters = gl.split(halves[group & 1])
        own = gl.split(quarters[(group >> 1) & 1])[group >> 2]
        products = mma_v2(gl.convert_layout(own, LEFT, assert_trivial=True), queries[group], products)
    return products


@gluon.jit
def add_rows(sums: gl.tensor, rows: gl.tensor, weights: gl.tensor, BITS: gl.constexpr) -> gl.tensor:
    """Adds rows of values [E, 128] to the planes [16, X], by weights, a right operand [E, X]."""
    bits = gl.reshape(
        rows, [_TILE, 2, 2, 2, 2, 2, 2, 2]
    )  # after the entry channels' bits from the highest on
    if BITS == 4:  # noqa: SIM108 - one of them is compiled
        planes = gl.permute(bits, [5, 2, 3, 4, 0, 6, 7, 1])
    else:
        planes = gl.permute(bits, [6, 3, 4, 5, 0, 7, 1, 2])
    planes = gl.reshape(planes, [16, _TILE, 2, 2, 2])
    new: gl.tensor = ()
    for plane in gl.static_range(_PLANES):
        halves = gl.split(planes)
        quarters = gl.split(halves[plane & 1])
        own = gl.split(quarters[(plane >> 1) & 1])[plane >> 2]
        new += (mma_v2(gl.convert_layout(own, LEFT, assert_trivial=True), weights, sums[plane]),)
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
    BITS: gl.constexpr,
) -> gl.tensor:
    """Adds what is attended exactly to sums of planes, totals [X] and peaks [X], which weights are relative to.

    listed: keys of ids_ptr. always, stop: the share of the entries that every row attends to, of which the first
    in_context are the context's.
    """
    element: gl.constexpr = q_ptr.dtype.element_ty
    queries = load_row_queries(q_ptr, row, X, GROUP)
    everything = listed + stop - always
    # Entries of the share as if they followed the list: the always-th comes first.
    context_stop = listed + in_context - always
    for tile in range(0, everything, _TILE):
        of_keys = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, _KEY_ROWS))
        keys = load_rows(
            rows_ptr, ids_ptr, of_keys, listed, everything, first, end, context_stop, to_tail, always, _KEY_ROWS
        )  # fmt: skip
        if BITS == 4:
            entry = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, _VALUE_ROWS_4))
            values = load_rows(
                rows_ptr + 128, ids_ptr, entry, listed, everything, first, end, context_stop, to_tail, always,
                _VALUE_ROWS_4,
            )  # fmt: skip
        else:
            entry = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, _VALUE_ROWS_2))
            values = load_rows(
                rows_ptr + 128, ids_ptr, entry, listed, everything, first, end, context_stop, to_tail, always,
                _VALUE_ROWS_2,
            )  # fmt: skip
        logits = multiply_rows(keys, queries, X) * scale_log2
        there = tile + gl.arange(0, _TILE, layout=gl.SliceLayout(1, RESULT)) < everything
        logits = gl.where(gl.expand_dims(there, 1), logits, float("-inf"))
        higher = gl.maximum(peaks, gl.max(logits, 0) - _HEADROOM)
        shrink = gl.exp2(peaks - higher)
        peaks = higher
        weights = gl.exp2(logits - gl.expand_dims(peaks, 0))
        totals = totals * shrink + gl.sum(weights, 0)
        shrunk: gl.tensor = ()
        for plane in gl.static_range(_PLANES):
            shrunk += (sums[plane] * gl.expand_dims(shrink, 0),)
        sums = add_rows(shrunk, values, as_right(weights.to(element), _TILE, X), BITS)
    return sums, totals, peaks
