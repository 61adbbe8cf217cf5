"""Sums of values in bytes (`value_tiles`), and the values that they are of.

Shape legend: as in `value_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.tiles.channel_places import group_of, plane_count
from decode_engine.kernels.coarse.warp.tiles.operands import RESULT
from decode_engine.kernels.coarse.warp.tiles.registers import (
    REGISTER,
    as_rows,
    beside,
    code_count,
    factor_of,
    level_codes,
)
from decode_engine.kernels.coarse.warp.tiles.value_tiles import first_level

_UPPER = gl.constexpr(256.0)
"""What an upper byte counts."""


@gluon.jit
def no_sums_yet(Y: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Sums of bytes, before the first tile: four registers for each plane and for each eight columns of query rows."""
    zero = gl.full([8, 4], 0.0, gl.float32, layout=REGISTER)
    EIGHTS: gl.constexpr = max(Y // 16, 1)
    sums: gl.tensor = ()
    for _ in gl.static_range(plane_count(DIM) * EIGHTS):
        sums += ((zero, zero, zero, zero),)
    return sums


@gluon.jit
def nothing_pending(Y: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Integers that are still to be added to sums, where both bytes are in eight columns: four registers a plane."""
    zero = gl.full([8, 4], 0, gl.int32, layout=REGISTER)
    pending: gl.tensor = ()
    for _ in gl.static_range(plane_count(DIM) if Y == 8 else 0):
        pending += ((zero, zero, zero, zero),)
    return pending


@gluon.jit
def add_pending(sums: gl.tensor, pending: gl.tensor, unit: gl.tensor) -> gl.tensor:
    """Adds integers in units of a number to the sums."""
    # Upper bytes are the first four of eight columns, two lanes'.
    lower = gl.arange(0, 4, layout=gl.SliceLayout(0, REGISTER)) // 2
    nothing = gl.full([8, 4], 0.0, gl.float32, layout=REGISTER)
    units = nothing + gl.expand_dims(gl.where(lower > 0, unit, unit * _UPPER), 0)
    if len(pending) == 0:
        return sums
    else:  # noqa: RET505 - the other branch is not compiled
        new: gl.tensor = ()
        for plane in gl.static_range(len(pending)):
            more: gl.tensor = ()
            for part in gl.static_range(4):
                more += (gl.fma(pending[plane][part].to(gl.float32), units, sums[plane][part]),)
            new += (more,)
        return new


@gluon.jit
def bytes_as_rows(sums: gl.tensor, plane: gl.constexpr, X: gl.constexpr, Y: gl.constexpr) -> gl.tensor:
    """A plane's sums of bytes, [16, X]."""
    if Y == 8:
        apart = gl.reshape(as_rows(sums[plane]), [16, 2, 4])
        both = gl.expand_dims(gl.sum(apart, 1), 1)
        _, both = gl.broadcast(apart, both)
        return gl.convert_layout(gl.reshape(both, [16, 8]), RESULT)
    else:  # noqa: RET505 - the other branch is not compiled
        EIGHTS: gl.constexpr = X // 8
        parts: gl.tensor = ()
        for eight in gl.static_range(EIGHTS):
            parts += (as_rows(sums[plane * EIGHTS + eight]),)
        return beside(parts, 16, X)


@gluon.jit
def of_code_alone(
    found: gl.tensor, plane: gl.constexpr, BITS: gl.constexpr, GROUPS: gl.constexpr
) -> gl.tensor:
    """A plane's sums without what codes below its own in a byte have added. found: those of all planes."""
    SETS: gl.constexpr = len(level_codes(BITS)[0])
    # The lowest bits of a plane's number say which code it is of.
    LEVEL: gl.constexpr = plane % code_count(BITS) // SETS
    own = found[plane]
    if first_level(LEVEL, BITS, GROUPS) < LEVEL:
        own -= found[plane - SETS]
    return own * (1.0 / factor_of(BITS) ** LEVEL)


@gluon.jit
def values_of(
    sums: gl.tensor,
    evens: gl.tensor,
    X: gl.constexpr,
    Y: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
) -> gl.tensor:
    """Sums of values, by planes [16, X], of those of bytes; evens: add to all channels of each group, [X]."""
    found: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        found += (bytes_as_rows(sums, plane, X, Y),)
    plain: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        even = evens[group_of(plane, DIM, BITS, len(evens))]
        plain += (of_code_alone(found, plane, BITS, len(evens)) + gl.expand_dims(even, 0),)
    return plain
