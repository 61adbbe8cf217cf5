"""Weights of coded keys between two launches of one warp each: as tensor cores take them, so that nothing is turned.

A tile's weights are those of GROUP query heads, T of each, in the order in which a lane holds them.

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.warp_places import bits_of
from decode_engine.kernels.coarse.warp.warp_tiles import RIGHT


@gluon.constexpr_function
def lanes_layout(T: int, X: int) -> gl.DistributedLinearLayout:
    """Of a right operand [T, X] by lanes, [4 X, T / 4]: a lane's numbers lie side by side."""
    own = [[0, 1 << bit] for bit in range(bits_of(T) - 2)]
    more = [[32, 0]] if X > 8 else []
    return gl.DistributedLinearLayout(
        [*own, *more], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [], [], [4 * X, T // 4]
    )


@gluon.jit
def _places(T: gl.constexpr, X: gl.constexpr, GROUP: gl.constexpr) -> gl.tensor:
    """Where a tile's weights lie, and which of them are a query head's, [4 X, T / 4]."""
    LANES: gl.constexpr = lanes_layout(T, X)
    lane = gl.arange(0, 4 * X, layout=gl.SliceLayout(1, LANES))
    own = gl.arange(0, T // 4, layout=gl.SliceLayout(0, LANES))
    there = gl.expand_dims(lane < 4 * GROUP, 1) & gl.expand_dims(own >= 0, 0)
    return gl.expand_dims(lane * (T // 4), 1) + gl.expand_dims(own, 0), there


@gluon.jit
def store_weights(
    ptr: gl.tensor, tile: gl.tensor, weights: gl.tensor, T: gl.constexpr, X: gl.constexpr, GROUP: gl.constexpr
) -> None:
    """Leaves a right operand [T, X] float16 as the tile-th of those from ptr on, which is a multiple of 16 bytes."""
    at, there = _places(T, X, GROUP)
    by_lanes = gl.permute(gl.reshape(weights, [T // 8, 4, 2, X]), [3, 1, 0, 2])
    own = gl.convert_layout(gl.reshape(by_lanes, [4 * X, T // 4]), lanes_layout(T, X), assert_trivial=True)
    # Here, so that the store is known to be aligned.
    ptr = gl.multiple_of(ptr + tile * (T * GROUP), 16)
    gl.store(ptr + at, own, mask=there)


@gluon.jit
def load_weights(
    ptr: gl.tensor, tile: gl.tensor, T: gl.constexpr, X: gl.constexpr, GROUP: gl.constexpr
) -> gl.tensor:
    """As they were left, by lanes, past the first-level cache."""
    at, there = _places(T, X, GROUP)
    ptr = gl.multiple_of(ptr + tile * (T * GROUP), 16)
    return gl.load(ptr + at, mask=there, other=0.0, cache_modifier=".cg")


@gluon.jit
def as_operand(loaded: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Loaded weights as a right operand [T, X]."""
    turned = gl.permute(gl.reshape(loaded, [X, 4, T // 8, 2]), [2, 1, 3, 0])
    return gl.convert_layout(gl.reshape(turned, [T, X]), RIGHT, assert_trivial=True)
