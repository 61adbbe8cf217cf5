"""Tiles of codes on their way into shared memory, for kernels of one warp.

A warp keeps a ring of tiles: while it works on one, the next ones are copied, past its registers. A copy passes through
the second-level cache once. (Codes that are first brought there, and loaded from there later, pass it twice, and it is
that cache which is short then.)

Shape legend: as in `value_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.coarse.warp.tiles.channel_places import (
    bits_of,
    held_words,
    row_words,
)
from decode_engine.kernels.coarse.warp.tiles.key_tiles import word_pointers


@gluon.constexpr_function
def ring_layout(W: int) -> gl.SwizzledSharedLayout:
    """Of rows of W words.

    Those of 16 words change halves every other pair of rows, those of 32 order their sixteens of bytes anew in each of
    eight, so that lanes find free banks.
    """
    if W == 32:
        return gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[1, 0])
    return gl.SwizzledSharedLayout(vec=min(8, W), per_phase=2, max_phase=2 if W > 8 else 1, order=[1, 0])


@gluon.constexpr_function
def copy_layout(T: int, DIM: int, BITS: int) -> gl.DistributedLayout:
    """Of a tile's words while they are copied, 16 bytes of a row by each lane.

    Memory is read in 32 bytes, which rows of 12 words do not fill: those of neighbouring keys are copied together.
    """
    held = held_words(DIM, BITS)
    if row_words(DIM, BITS) % 8 == 0:
        return gl.BlockedLayout([1, 4], [128 // held, held // 4], [1, 1], [1, 0])
    chunks = [[0, 4 << bit] for bit in range(bits_of(held) - 2)]
    neighbours = [8 << bit for bit in range(bits_of(T) - 3)]
    rows = [[row, 0] for row in (1, *neighbours, 2, 4)]
    lanes = 5 - len(chunks)
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *rows[lanes:]], [*chunks, *rows[:lanes]], [], [], [T, held]
    )


@gluon.jit
def new_ring(
    T: gl.constexpr, DIM: gl.constexpr, BITS: gl.constexpr, AHEAD: gl.constexpr
) -> gl.shared_memory_descriptor:
    """Room for the tile that is worked on and AHEAD that are on their way, [AHEAD + 1, T, words as they come]."""
    W: gl.constexpr = held_words(DIM, BITS)
    return gl.allocate_shared_memory(gl.int32, [AHEAD + 1, T, W], ring_layout(W))


@gluon.jit
def copy_tile(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    ptr: gl.tensor,
    base: gl.tensor,
    there: gl.tensor,
    T: gl.constexpr,
    DIM: gl.constexpr,
    BITS: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Has T rows of codes from `base` on copied as the turn-th tile, in the order of `key_of`, if they are there.

    Behind a program's last tile there is none: what all would copy then, the same rows, kept others from theirs.
    """
    words = word_pointers(ptr, base, T, DIM, BITS, copy_layout(T, DIM, BITS))
    async_copy.async_copy_global_to_shared(ring.index(turn % (AHEAD + 1)), words, mask=there)


@gluon.jit
def end_of_copies() -> None:
    """Those since the last call are waited for together."""
    async_copy.commit_group()


@gluon.jit
def wait_for_copies(LATER: gl.constexpr) -> None:
    """Waits for all copies but the LATER last groups of them."""
    async_copy.wait_group(LATER)
