"""Shared memory for what a warp needs once in each block of keys, where its registers do not suffice for all.

Sums of values of the blocks before, queries as they are, and scales and offsets of the next block: where there are
more than 32 sums for each lane, they would be half of the registers. Sums of the block that is worked on stay there.

Shape legend: as in `warp_tiles`; P planes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.coarse.warp.warp_places import (
    apart,
    bits_of,
    channel_layout,
    plane_count,
    shape_by_planes,
)
from decode_engine.kernels.coarse.warp.warp_tiles import RESULT, RIGHT, add_planes, no_values_yet


@gluon.constexpr_function
def needs_rooms(X: int, DIM: int) -> bool:
    """Whether a lane has more than 32 sums."""
    return X * DIM > 32 * 32


@gluon.constexpr_function
def room_layout(X: int, DIM: int, order: tuple[int, int]) -> gl.SwizzledSharedLayout:
    """Of [16, X] with axes for the bits of P behind. order: of the two, first the one along which lanes have pairs."""
    planes = reversed(range(2, len(shape_by_planes(X, DIM))))
    return gl.SwizzledSharedLayout(1, 1, 1, [*order, *planes])


@gluon.constexpr_function
def planes_layout(
    X: int, DIM: int, pairs: tuple[int, int], lanes: tuple[int, int]
) -> gl.DistributedLinearLayout:
    """Of [16, X] with axes for the bits of P behind, which a lane has all of.

    pairs: the base of a lane's pairs in [16, X]. lanes: that of the four lanes that have such pairs side by side.
    """
    more = bits_of(plane_count(DIM))
    others = [base for base in ((1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (0, 4)) if not _along(base, pairs)]
    own = [pairs, (8, 0), *([(0, 8)] if X > 8 else [])]
    of_lanes = [lanes, (2 * lanes[0], 2 * lanes[1]), *others]
    registers = [[*base, *[0] * more] for base in own]
    planes = [[0, 0, *(int(axis == plane) for axis in range(more))] for plane in reversed(range(more))]
    return gl.DistributedLinearLayout(
        [*registers, *planes], [[*base, *[0] * more] for base in of_lanes], [], [], shape_by_planes(X, DIM)
    )


@gluon.constexpr_function
def _along(base: tuple[int, int], other: tuple[int, int]) -> bool:
    return (base[0] > 0) == (other[0] > 0)


@gluon.jit
def together(planes: gl.tensor, COUNT: gl.constexpr) -> gl.tensor:
    """COUNT tensors [x, y] as [x, y, 2, 2, ...], in the order of `apart`."""
    if COUNT == 1:
        return planes[0]
    else:  # noqa: RET505 - the other branch is not compiled
        even: gl.tensor = ()
        odd: gl.tensor = ()
        for pair in gl.static_range(COUNT // 2):
            even += (planes[2 * pair],)
            odd += (planes[2 * pair + 1],)
        return gl.join(together(even, COUNT // 2), together(odd, COUNT // 2))


@gluon.jit
def new_sums(X: gl.constexpr, DIM: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for sums of planes [16, X], all 0."""
    LAYOUT: gl.constexpr = room_layout(X, DIM, (1, 0))
    room = gl.allocate_shared_memory(gl.float32, shape_by_planes(X, DIM), LAYOUT)
    room.store(together(no_values_yet(X, DIM), plane_count(DIM)))
    return room


@gluon.jit
def load_sums(room: gl.shared_memory_descriptor, X: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """Sums of planes, in registers."""
    found = apart(room.load(planes_layout(X, DIM, (0, 1), (0, 2))), plane_count(DIM))
    sums: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        sums += (gl.convert_layout(found[plane], RESULT, assert_trivial=True),)
    return sums


@gluon.jit
def add_sums(room: gl.shared_memory_descriptor, more: gl.tensor, X: gl.constexpr, DIM: gl.constexpr) -> None:
    """Adds sums of planes to those in a room."""
    room.store(together(add_planes(load_sums(room, X, DIM), more, DIM), plane_count(DIM)))


@gluon.jit
def keep_queries(queries: gl.tensor, X: gl.constexpr, DIM: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room with queries [16, X] of planes."""
    LAYOUT: gl.constexpr = room_layout(X, DIM, (0, 1))
    room = gl.allocate_shared_memory(gl.float16, shape_by_planes(X, DIM), LAYOUT)
    room.store(together(queries, plane_count(DIM)))
    return room


@gluon.jit
def kept_queries(room: gl.shared_memory_descriptor, X: gl.constexpr, DIM: gl.constexpr) -> gl.tensor:
    """As they were kept."""
    found = apart(room.load(planes_layout(X, DIM, (1, 0), (2, 0))), plane_count(DIM))
    queries: gl.tensor = ()
    for plane in gl.static_range(plane_count(DIM)):
        queries += (gl.convert_layout(found[plane], RIGHT, assert_trivial=True),)
    return queries


@gluon.jit
def new_steps(DIM: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for scales and offsets of two blocks of keys."""
    return gl.allocate_shared_memory(gl.float16, [4, DIM], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def copy_steps(
    room: gl.shared_memory_descriptor,
    turn: gl.tensor,
    scales_ptr: gl.tensor,
    offsets_ptr: gl.tensor,
    block: gl.tensor,
    DIM: gl.constexpr,
) -> None:
    """Has those of a block, a program's turn-th, copied, among the copies that are waited for together next."""
    channel = gl.arange(0, DIM, layout=gl.BlockedLayout([8], [32], [1], [0]))
    scales_ptr += block * DIM
    offsets_ptr += block * DIM
    async_copy.async_copy_global_to_shared(room.index(turn % 2 * 2), scales_ptr + channel)
    async_copy.async_copy_global_to_shared(room.index(turn % 2 * 2 + 1), offsets_ptr + channel)


@gluon.jit
def copied_steps(
    room: gl.shared_memory_descriptor, turn: gl.tensor, DIM: gl.constexpr, BITS: gl.constexpr
) -> gl.tensor:
    """As `warp_tiles.load_steps`."""
    LAYOUT: gl.constexpr = channel_layout(DIM, BITS)
    return room.index(turn % 2 * 2).load(LAYOUT), room.index(turn % 2 * 2 + 1).load(LAYOUT)
