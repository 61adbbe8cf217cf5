"""Tiles of codes on their way into shared memory, for kernels of one warp.

A warp keeps a ring of tiles: while it works on one, the next ones are copied, past its registers. A copy passes through
the second-level cache once. (Codes that are first brought there, and loaded from there later, pass it twice, and it is
that cache which is short then.)

Shape legend: as in `warp_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.coarse.warp.warp_tiles import key_of


@gluon.constexpr_function
def ring_layout(W: int) -> gl.SwizzledSharedLayout:
    """Of a tile [T, W]: rows of 16 words change halves every other pair of rows, so that lanes find free banks."""
    return gl.SwizzledSharedLayout(vec=min(8, W), per_phase=2, max_phase=2 if W > 8 else 1, order=[1, 0])


@gluon.jit
def new_ring(T: gl.constexpr, W: gl.constexpr, AHEAD: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the tile that is worked on and AHEAD that are on their way, [AHEAD + 1, T, W] words."""
    return gl.allocate_shared_memory(gl.int32, [AHEAD + 1, T, W], ring_layout(W))


@gluon.jit
def copy_tile(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    ptr: gl.tensor,
    base: gl.tensor,
    T: gl.constexpr,
    W: gl.constexpr,
    AHEAD: gl.constexpr,
) -> None:
    """Has T rows of codes from `base` on copied as the turn-th tile, in the order of `key_of`."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [128 // W, W // 4], [1, 1], [1, 0])
    key = key_of(gl.arange(0, T, layout=gl.SliceLayout(1, LANES)), T)
    word = gl.arange(0, W, layout=gl.SliceLayout(0, LANES))
    ptr = gl.multiple_of(ptr + base.to(gl.int64) * W, 16)
    source = ptr + (gl.expand_dims(key * W, 1) + gl.expand_dims(word, 0))
    async_copy.async_copy_global_to_shared(ring.index(turn % (AHEAD + 1)), source)


@gluon.jit
def end_of_copies() -> None:
    """Those since the last call are waited for together."""
    async_copy.commit_group()


@gluon.jit
def wait_for_copies(LATER: gl.constexpr) -> None:
    """Waits for all copies but the LATER last groups of them."""
    async_copy.wait_group(LATER)
