"""Attention of one warp to tiles of coded values, which come later than their keys.

Whether values are read at all is known when weights are. So they are asked for then, and attended to some tiles later;
what their scales and offsets add is added at once, and what their codes are multiplied with waits in registers.

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.warp_codes import value_layout
from decode_engine.kernels.coarse.warp.warp_tiles import (
    RESULT,
    RIGHT,
    add_values,
    as_right,
    key_numbers,
    load_key_numbers,
    no_values_yet,
    values_of,
)


@gluon.jit
def load_value_steps(ptrs: gl.tensor, base: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Scales and offsets of T values."""
    return load_key_numbers(ptrs[1], base, T), load_key_numbers(ptrs[2], base, T)


@gluon.jit
def nothing_yet(T: gl.constexpr, X: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Of values: sums of planes, what adds to all channels, and weights."""
    zero = gl.full([T, X], 0.0, gl.float32, layout=RESULT)
    return no_values_yet(X, DIM), zero, zero


@gluon.jit
def weigh_tile(
    attended: gl.tensor, weights: gl.tensor, steps: gl.tensor, T: gl.constexpr, X: gl.constexpr
) -> gl.tensor:
    """Adds weights [T, X], 0 for keys that do not count, and all of their values but the codes.

    Also returns what the codes are multiplied with, a right operand.
    """
    sums, evens, totals = attended
    scales, starts = key_numbers(steps[0], T), key_numbers(steps[1], T)
    evens = gl.fma(weights, gl.expand_dims(starts, 1), evens)
    scaled = as_right((weights * gl.expand_dims(scales, 1)).to(gl.float16), T, X)
    return (sums, evens, totals + weights), scaled


@gluon.jit
def attend_tile(
    attended: gl.tensor,
    tile: gl.tensor,
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """Adds the codes of the turn-th tile's values, which have come, if they were asked for.

    tile: whether they were, and what they are multiplied with.
    """
    asked, scaled = tile
    if asked:
        words = ring.index(turn % (AHEAD + 1)).load(value_layout(T, DIM, BITS, False))
        sums, evens, totals = attended
        attended = (add_values(sums, words, scaled, T, DIM, BITS), evens, totals)
    return attended


@gluon.jit
def next_tiles(tiles: gl.tensor, asked: gl.tensor, scaled: gl.tensor) -> gl.tensor:
    """Tiles whose values are on their way, without the first of them, and with one more."""
    later: gl.tensor = ()
    for following in gl.static_range(1, len(tiles)):
        later += (tiles[following],)
    later += ((asked, scaled),)
    return later


@gluon.jit
def no_tiles(T: gl.constexpr, X: gl.constexpr, asked: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """COUNT of which none was asked for."""
    scaled = gl.full([T, X], 0.0, gl.float16, layout=RIGHT)
    tiles: gl.tensor = ()
    for _ in gl.static_range(COUNT):
        tiles += ((asked, scaled),)
    return tiles


@gluon.jit
def attention_of(attended: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr) -> gl.tensor:
    """Sums of values by planes, and of weights [X]."""
    sums, evens, totals = attended
    return values_of(sums, gl.sum(evens, 0), DIM, BITS), gl.sum(totals, 0)
