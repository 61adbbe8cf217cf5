"""Weights of coded keys between two launches of one warp each: as tensor cores take them, so that nothing is turned.

A tile's weights are those of GROUP query heads, T of each, in the order in which a lane holds them; behind them lie the
scales and the offsets of its values, T of each. So all of them are copied ahead, past the registers: a number that is
loaded ahead into one is waited for where it is passed on to another.

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.coarse.warp.warp_places import bits_of
from decode_engine.kernels.coarse.warp.warp_tiles import RIGHT

_LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_EIGHTS = gl.constexpr(gl.BlockedLayout([8], [32], [1], [0]))


@gluon.constexpr_function
def lanes_layout(T: int, X: int) -> gl.DistributedLinearLayout:
    """Of a right operand [T, X] by lanes, [4 X, T / 4]: a lane's numbers lie side by side."""
    own = [[0, 1 << bit] for bit in range(bits_of(T) - 2)]
    more = [[32, 0]] if X > 8 else []
    return gl.DistributedLinearLayout(
        [*own, *more], [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [], [], [4 * X, T // 4]
    )


@gluon.constexpr_function
def step_layout(T: int) -> gl.DistributedLinearLayout:
    """Of numbers of keys as they lie, [T], for lanes that have operands' keys: as `key_of` has them."""
    own, base = [], 1
    while base <= T // 8:
        own.append([base])
        base *= 2
    return gl.DistributedLinearLayout(own, [[T // 4], [T // 2], [0], [0], [0]], [], [], [T])


@gluon.jit
def _places(T: gl.constexpr, X: gl.constexpr, GROUP: gl.constexpr) -> gl.tensor:
    """Where a tile's weights lie, and which of them are a query head's, [4 X, T / 4]."""
    LANES: gl.constexpr = lanes_layout(T, X)
    lane = gl.arange(0, 4 * X, layout=gl.SliceLayout(1, LANES))
    own = gl.arange(0, T // 4, layout=gl.SliceLayout(0, LANES))
    there = gl.expand_dims(lane < 4 * GROUP, 1) & gl.expand_dims(own >= 0, 0)
    return gl.expand_dims(lane * (T // 4), 1) + gl.expand_dims(own, 0), there


@gluon.jit
def load_bits(ptr: gl.tensor, base: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Bits of T float16 numbers, [T] int32, a lane each: halves of registers would be put together, and waited for."""
    key = gl.arange(0, T, layout=_LANES)
    return gl.inline_asm_elementwise(
        "ld.global.nc.u16 $0, [$1];", "=r,l", [(ptr + base + key).to(gl.int64)], dtype=gl.int32, is_pure=True, pack=1
    )  # fmt: skip


@gluon.jit
def store_weights(
    ptr: gl.tensor,
    tile: gl.tensor,
    weights: gl.tensor,
    steps: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
) -> None:
    """Leaves a right operand [T, X] float16 as the tile-th of those from ptr on, which is a multiple of 16 bytes.

    steps: bits of the scales and of the offsets of the tile's values, as loaded.
    """
    at, there = _places(T, X, GROUP)
    by_lanes = gl.permute(gl.reshape(weights, [T // 8, 4, 2, X]), [3, 1, 0, 2])
    own = gl.convert_layout(gl.reshape(by_lanes, [4 * X, T // 4]), lanes_layout(T, X), assert_trivial=True)
    # Here, so that the store is known to be aligned.
    ptr = gl.multiple_of(ptr + tile * (T * (GROUP + 2)), 16)
    gl.store(ptr + at, own, mask=there)
    key = gl.arange(0, T, layout=_LANES)
    for part in gl.static_range(2):
        number = steps[part].to(gl.int16).to(gl.float16, bitcast=True)
        gl.store(ptr + (GROUP + part) * T + key, number)


@gluon.jit
def new_weights_rings(T: gl.constexpr, X: gl.constexpr, AHEAD: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the weights of a tile and of AHEAD that are on their way; and for their scales and offsets."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    weights = gl.allocate_shared_memory(gl.float16, [AHEAD + 1, 4 * X, T // 4], rows)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return weights, gl.allocate_shared_memory(gl.float16, [2 * (AHEAD + 1), T], numbers)


@gluon.jit
def copy_weights(
    rings: gl.tensor,
    turn: gl.tensor,
    ptr: gl.tensor,
    tile: gl.tensor,
    there: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    GROUP: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Has what belongs to the tile-th tile from ptr on copied as the turn-th, if there is any.

    Weights of rows that only pad the tile are no numbers: their sums are nobody's.
    """
    at, own = _places(T, X, GROUP)
    ptr = gl.multiple_of(ptr + tile.to(gl.int64) * (T * (GROUP + 2)), 16)
    slot = turn % (AHEAD + 1)
    async_copy.async_copy_global_to_shared(rings[0].index(slot), ptr + at, mask=own & there)
    key = gl.arange(0, T, layout=_EIGHTS)
    for part in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            rings[1].index(2 * slot + part), ptr + (GROUP + part) * T + key, mask=there
        )


@gluon.jit
def copied_weights(
    rings: gl.tensor,
    turn: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    AHEAD: gl.constexpr,
) -> gl.tensor:
    """As they were copied: weights by lanes, scales and offsets [T]; their copy has been waited for."""
    slot = turn % (AHEAD + 1)
    scales, offsets = rings[1].index(2 * slot), rings[1].index(2 * slot + 1)
    weights = rings[0].index(slot).load(lanes_layout(T, X))
    return weights, scales.load(step_layout(T)), offsets.load(step_layout(T))


@gluon.jit
def in_order_of_rows(numbers: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Numbers of keys [T] in the order of a tile's rows, for the lanes of operands."""
    return gl.reshape(gl.permute(gl.reshape(numbers, [8, T // 8]), [1, 0]), [T])


@gluon.jit
def as_operand(loaded: gl.tensor, T: gl.constexpr, X: gl.constexpr) -> gl.tensor:
    """Weights by lanes as a right operand [T, X]."""
    turned = gl.permute(gl.reshape(loaded, [X, 4, T // 8, 2]), [2, 1, 3, 0])
    return gl.convert_layout(gl.reshape(turned, [T, X]), RIGHT, assert_trivial=True)
