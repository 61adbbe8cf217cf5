"""Weights of coded keys between two launches of one warp each: as tensor cores take them, so that nothing is turned.

A tile's weights are those of GROUP query heads, T of each, in the order in which a lane holds them.

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

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
def new_weights_ring(T: gl.constexpr, X: gl.constexpr, AHEAD: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the weights of a tile and of AHEAD that are on their way."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.float16, [AHEAD + 1, 4 * X, T // 4], rows)


@gluon.jit
def copy_weights(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    ptr: gl.tensor,
    tile: gl.tensor,
    there: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Has the weights of the tile-th tile from ptr on copied as the turn-th, if there are any.

    Those of rows that only pad the tile are no numbers: their sums are nobody's.
    """
    at, own = _places(T, X, GROUP)
    ptr = gl.multiple_of(ptr + tile.to(gl.int64) * (T * GROUP), 16)
    async_copy.async_copy_global_to_shared(ring.index(turn % (AHEAD + 1)), ptr + at, mask=own & there)


@gluon.jit
def copied_weights(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """As they were copied, by lanes; their copy has been waited for."""
    return ring.index(turn % (AHEAD + 1)).load(lanes_layout(T, X))


@gluon.jit
def as_operand(loaded: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Weights by lanes as a right operand [T, X]."""
    turned = gl.permute(gl.reshape(loaded, [X, 4, T // 8, 2]), [2, 1, 3, 0])
    return gl.convert_layout(gl.reshape(turned, [T, X]), RIGHT, assert_trivial=True)
