"""Lists of the keys of a tile that are kept, which a warp appends to without memory that lanes share.

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from decode_engine.kernels.coarse.warp.warp_tiles import OF_KEYS


@gluon.jit
def by_registers(numbers: gl.tensor, T: gl.constexpr) -> gl.tensor:
    """Numbers of a tile's keys, [T], as [8] for each register of a lane."""
    if T == 8:
        return (gl.convert_layout(numbers, OF_KEYS),)
    else:  # noqa: RET505 - the other branch is not compiled
        low, high = gl.split(gl.permute(gl.reshape(numbers, [2, T // 2]), [1, 0]))
        return by_registers(low, T // 2) + by_registers(high, T // 2)


@gluon.jit
def voted(kept: gl.tensor) -> gl.tensor:
    """Which lanes' keys are kept, [8] int32: a bit for the first of the four lanes that have a key."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 t, p, 0xffffffff; "
        "and.b32 $0, t, 0x11111111; }",
        "=r,r", [kept], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def counted(votes: gl.tensor) -> gl.tensor:
    """Set bits, [8] int32."""
    return gl.inline_asm_elementwise(
        "popc.b32 $0, $1;", "=r,r", [votes], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def list_keys(
    ids_ptr: gl.tensor, count: gl.tensor, kept: gl.tensor, key: gl.tensor, T: gl.constexpr
) -> gl.tensor:
    """Appends those of a tile's keys that are kept (int32, 0 or 1) to a list, ascending; the new count, [8] of one."""
    marks, ids = by_registers(kept, T), by_registers(key, T)
    earlier_lanes = (gl.full([8], 1, gl.int32, layout=OF_KEYS) << (gl.arange(0, 8, layout=OF_KEYS) * 4)) - 1
    place, total = count, count
    for part in gl.static_range(T // 8):  # a lane's keys follow one another
        votes = voted(marks[part])
        place += counted(votes & earlier_lanes)
        total += counted(votes)
    for part in gl.static_range(T // 8):
        gl.store(ids_ptr + place, ids[part], mask=marks[part] > 0)
        place += marks[part]
    return total
