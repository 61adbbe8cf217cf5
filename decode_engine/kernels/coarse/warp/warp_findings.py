"""What a pass of one warp over keys leaves behind: lists of those that are kept, and weights of the others.

A warp appends to a list without memory that lanes share. Weights are times their values' scales, as integers of 15
bits for tensor cores that take bytes: of each column T upper bytes, one for each key, and behind all columns as many
lower ones. What weights add up to, and times the values' offsets, needs no values: it is left for all tiles of a
program together.

Shape legend: as in `warp_scores`; GROUPS groups of channels of a value, 1 or 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels import border
from decode_engine.kernels.coarse.warp.tiles.channel_places import bits_of
from decode_engine.kernels.coarse.warp.tiles.key_tiles import key_of
from decode_engine.kernels.coarse.warp.warp_scores import scored_keys_layout

LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
"""Of numbers that come a lane each."""
_INFINITE = gl.constexpr(border.INFINITE)
_MOST = gl.constexpr(32766.0)
"""That weights are, in units: integers of 15 bits, also where they are rounded up."""
_LEAST = gl.constexpr(1e-30)
"""Of units times 32768: where all scales are 0 nothing is divided by that."""
_WHOLE = gl.constexpr(2.0**15)
"""A float32 number, to which smaller ones are added so that their integers are in its second and third byte."""


@gluon.constexpr_function
def bytes_layout(T: int, X: int, P: int) -> gl.DistributedLinearLayout:
    """Of numbers of tiles' keys, [8, T / 8, P, C]: a lane's neighbouring keys are in neighbouring registers."""
    own = [[0, 1 << bit, 0, 0] for bit in range(bits_of(T) - 3)]
    more = [[0, 0, 0, 8]] if X > 8 else []
    columns = [[0, 0, 0, 2], [0, 0, 0, 4] if P == 1 else [0, 0, 1, 0]]
    lanes = [*columns, [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout([*own, [0, 0, 0, 1], *more], lanes, [], [], [8, T // 8, P, X // P])


@gluon.jit
def load_value_steps(steps_ptrs: gl.tensor, key: gl.tensor, GROUPS: gl.constexpr) -> gl.tensor:
    """Bits of the scales of keys' values, by groups of channels, and then of their offsets; each as many as keys.

    Halves of registers would be put together, and waited for.
    """
    loaded: gl.tensor = ()
    for part in gl.static_range(2):
        for group in gl.static_range(GROUPS):
            loaded += (
                gl.inline_asm_elementwise(
                    "ld.global.nc.u16 $0, [$1];", "=r,l", [(steps_ptrs[part] + (key * GROUPS + group)).to(gl.int64)],
                    dtype=gl.int32, is_pure=True, pack=1,
                ),
            )  # fmt: skip
    return loaded


@gluon.jit
def as_float(bits: gl.tensor) -> gl.tensor:
    """Of float16 numbers in lower halves."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l; .reg .b16 h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
        "=r,r", [bits], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def two_bytes(numbers: gl.tensor) -> gl.tensor:
    """The second and the third byte of int32 numbers, int8."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 x; .reg .b32 y; prmt.b32 x, $2, $3, 0x6251; prmt.b32 y, $4, $5, 0x6251; "
        "prmt.b32 $0, x, y, 0x5410; prmt.b32 $1, x, y, 0x7632; }",
        "=r,=r,r,r,r,r", [numbers], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.constexpr_function
def shape_by_registers(T: int, X: int, P: int) -> list[int]:
    """Of numbers [T, P, C] with axes for what a lane has."""
    return [T // 8, 8, P, max(X // 8 // P, 1), min(X // P, 8) // 2, 2]


@gluon.jit
def largest_of_lanes(numbers: gl.tensor, T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """Bits of the largest numbers, which are not negative, of each of 32 lanes, [8, P, 4 / P] int32."""
    bits = gl.reshape(numbers.to(gl.int32, bitcast=True), shape_by_registers(T, X, P))
    return gl.max(gl.max(gl.max(bits, 5), 3), 0)


@gluon.jit
def largest_of_all(bits: gl.tensor, heavy: gl.tensor, P: gl.constexpr) -> gl.tensor:
    """The largest float32 number of heavy tiles. bits: by lanes."""
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [],
        [[0, 0, 1], [0, 0, 2] if P == 1 else [0, 1, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [],
        [8, P, 4 // P],
    )
    part = gl.arange(0, P, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    there = gl.expand_dims(gl.expand_dims(gl.where(part > 0, heavy[P - 1], heavy[0]) > 0, 0), 2)
    bits = gl.where(there, gl.convert_layout(bits, LAYOUT, assert_trivial=True), 0)
    return gl.max(gl.reshape(bits, [32]), 0).to(gl.float32, bitcast=True)


@gluon.jit
def unit_above(number: gl.tensor) -> gl.tensor:
    """A power of two, of which a number is at most _MOST."""
    bits = gl.maximum(number * 1.001, _LEAST).to(gl.int32, bitcast=True) & 0x7F800000
    return (bits - (14 << 23)).to(gl.float32, bitcast=True)


@gluon.jit
def thresholds(T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """From which part of one on weights of a tile's keys are rounded up, beside _WHOLE: 1 - this, evenly spread, [T].

    All weights far below a unit would be rounded down, and those of a flat context are many.
    """
    key = key_of(gl.arange(0, T, layout=gl.SliceLayout(1, scored_keys_layout(T, X, P))), T)
    turned = (key & 1) << 4 | (key & 2) << 2 | (key & 4) | (key & 8) >> 2 | (key & 16) >> 4
    return _WHOLE + (turned.to(gl.float32) + max(16 / T, 0.5)) * (1 / 32)


@gluon.jit
def store_weights(
    ptr: gl.tensor,
    tile: gl.tensor,
    weights: gl.tensor,
    heavy: gl.tensor,
    scales: gl.tensor,
    unit: gl.tensor,
    above: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    P: gl.constexpr,
) -> gl.tensor:
    """Leaves those of P tiles that are heavy (int32, 0 or 1), as the tile-th and the next of all from ptr on.

    ptr: to int8. weights: [T, P, C] float32; scales: float32, of the tiles' values, [T, P] for each group of channels.
    unit: what 1 was among weights of the tiles before; what it is now. It changes where weights would have more than 15
    bits: before the first tile, and where scales are larger than they were. above: bits of a number that weights are
    below, mostly.
    """
    LAYOUT: gl.constexpr = bytes_layout(T, X, P)
    C: gl.constexpr = X // P
    EACH: gl.constexpr = 2 * C * T * len(scales)
    products: gl.tensor = ()
    for group in gl.static_range(len(scales)):
        products += (weights * gl.expand_dims(scales[group], 2),)
    lanes = largest_of_lanes(products[0], T, X, P)
    for group in gl.static_range(1, len(scales)):
        lanes = gl.maximum(lanes, largest_of_lanes(products[group], T, X, P))
    largest = largest_of_all(lanes, heavy, P)
    if largest > unit * _MOST:
        bound = gl.where((above > 0) & (above < _INFINITE), above, 0).to(gl.float32, bitcast=True)
        at_most = largest
        for group in gl.static_range(len(scales)):
            by_lanes = largest_of_lanes(gl.expand_dims(scales[group], 2) + weights * 0.0, T, X, P)
            at_most = gl.maximum(at_most, largest_of_all(by_lanes, heavy, P) * bound)
        unit = unit_above(at_most)
    inverse = (0x7F000000 - unit.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)
    r = gl.arange(0, 8, layout=_axis(0, LAYOUT))
    own = gl.arange(0, T // 8, layout=_axis(1, LAYOUT))
    part = gl.arange(0, P, layout=_axis(2, LAYOUT))
    column = gl.arange(0, C, layout=_axis(3, LAYOUT))
    key = _along(r * (T // 8), 0) + _along(own, 1)
    behind = gl.where(part > 0, heavy[0] * EACH, 0)
    there = gl.where(part > 0, heavy[P - 1], heavy[0]) > 0
    mask = _along(there, 2) & (key >= 0) & (_along(column, 3) >= 0)
    # Here, so that the store is known to be aligned.
    ptr = gl.multiple_of(ptr + tile * EACH, 16)
    rounding = gl.expand_dims(gl.expand_dims(thresholds(T, X, P), 1), 2)
    for group in gl.static_range(len(scales)):
        bits = (products[group] * inverse + rounding).to(gl.int32, bitcast=True)
        by_keys = gl.permute(gl.reshape(bits, [T // 8, 8, P, C]), [1, 0, 2, 3])
        lower, upper = two_bytes(gl.convert_layout(by_keys, LAYOUT))
        into = ptr + (_along(behind, 2) + (_along(column, 3) + 2 * group * C) * T + key)
        gl.store(into, upper, mask=mask)
        gl.store(into + C * T, lower, mask=mask)
    return unit


@gluon.constexpr_function
def _axis(axis: int, layout: gl.DistributedLinearLayout) -> gl.SliceLayout:
    """Of numbers along one of four axes."""
    sliced = layout
    for other in reversed([each for each in range(4) if each != axis]):
        sliced = gl.SliceLayout(other, sliced)
    return sliced


@gluon.jit
def _along(numbers: gl.tensor, AXIS: gl.constexpr) -> gl.tensor:
    """Numbers along one of four axes, [.., n, ..]."""
    for other in gl.static_range(4):
        if other != AXIS:
            numbers = gl.expand_dims(numbers, other)
    return numbers


@gluon.constexpr_function
def copied_layout(T: int, Y: int) -> gl.BlockedLayout:
    """Of words of four keys' weights while they are copied, [Y, T / 4]."""
    each = min(4, max(1, Y * T // 128))
    return gl.BlockedLayout([1, each], [128 * each // T, T // 4 // each], [1, 1], [1, 0])


@gluon.jit
def new_weights_ring(T: gl.constexpr, Y: gl.constexpr, AHEAD: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the weights of a tile and of AHEAD that are on their way, in words of four keys."""
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return gl.allocate_shared_memory(gl.int32, [AHEAD + 1, Y, T // 4], rows)


@gluon.jit
def copy_weights(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    ptr: gl.tensor,
    tile: gl.tensor,
    there: gl.tensor,
    T: gl.constexpr,
    Y: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Has the weights of the tile-th tile from ptr on, in words, copied as the turn-th, if there are any.

    Y: columns of bytes, of all groups of channels.
    """
    LAYOUT: gl.constexpr = copied_layout(T, Y)
    row = gl.expand_dims(gl.arange(0, Y, layout=gl.SliceLayout(1, LAYOUT)), 1)
    word = gl.expand_dims(gl.arange(0, T // 4, layout=gl.SliceLayout(0, LAYOUT)), 0)
    ptr = gl.multiple_of(ptr + tile.to(gl.int64) * (Y * T // 4), 16)
    async_copy.async_copy_global_to_shared(
        ring.index(turn % (AHEAD + 1)), ptr + (row * (T // 4) + word), mask=there
    )


@gluon.jit
def by_registers(numbers: gl.tensor, T: gl.constexpr, X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """Numbers of tiles' keys, [T, P], as [8, P] for each register of a lane."""
    if T == 8:
        return (gl.convert_layout(numbers, scored_keys_layout(8, X, P)),)
    else:  # noqa: RET505 - the other branch is not compiled
        low, high = gl.split(gl.permute(gl.reshape(numbers, [2, T // 2, P]), [1, 2, 0]))
        return by_registers(low, T // 2, X, P) + by_registers(high, T // 2, X, P)


@gluon.constexpr_function
def ballot(P: int) -> str:
    """PTX that asks all lanes, and leaves a bit for the first of those that have a key."""
    first = "0x11111111" if P == 1 else "0x55555555"
    return (
        "{ .reg .pred p; .reg .b32 t; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 t, p, 0xffffffff; "
        f"and.b32 $0, t, {first}; }}"
    )


@gluon.jit
def voted(kept: gl.tensor, P: gl.constexpr) -> gl.tensor:
    """Which lanes' keys are kept, [8, P] int32: bits for the lanes that have a key, 2 p + 4 k."""
    return gl.inline_asm_elementwise(ballot(P), "=r,r", [kept], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def counted(votes: gl.tensor) -> gl.tensor:
    """Set bits, [8, P] int32."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [votes], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def nothing_listed(X: gl.constexpr, P: gl.constexpr) -> gl.tensor:
    """How many keys are listed, [8, P] int32 of one number."""
    return gl.full([8, P], 0, gl.int32, layout=scored_keys_layout(8, X, P))


@gluon.jit
def one_of(numbers: gl.tensor) -> gl.tensor:
    """The largest of [8, P]."""
    return gl.max(gl.max(numbers, 1), 0)


@gluon.jit
def list_keys(
    ids_ptr: gl.tensor,
    count: gl.tensor,
    kept: gl.tensor,
    key: gl.tensor,
    T: gl.constexpr,
    X: gl.constexpr,
    P: gl.constexpr,
) -> gl.tensor:
    """Appends P tiles' keys that are kept (int32, 0 or 1) to a list, ascending; the new count, [8, P] of one."""
    LAYOUT: gl.constexpr = scored_keys_layout(8, X, P)
    marks, ids = by_registers(kept, T, X, P), by_registers(key, T, X, P)
    half = gl.expand_dims(gl.arange(0, P, layout=gl.SliceLayout(0, LAYOUT)), 0)
    lane = gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT)), 1) * 4 + half * 2
    earlier = (gl.full([8, P], 1, gl.int32, layout=LAYOUT) << lane) - 1
    earlier = earlier & (gl.full([8, P], 0x11111111, gl.int32, layout=LAYOUT) << (lane & 2))
    place, total = count, count
    for part in gl.static_range(T // 8):  # a lane's keys follow one another
        votes = voted(marks[part], P)
        place += counted(votes & earlier)
        total += counted(votes)
        if P == 2:
            place += gl.where((lane & 2) > 0, counted(votes & 0x11111111), 0)
    for part in gl.static_range(T // 8):
        gl.store(ids_ptr + place, ids[part], mask=marks[part] > 0)
        place += marks[part]
    return total
