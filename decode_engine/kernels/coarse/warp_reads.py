"""What kernels of one warp read: a step's records, and tiles of codes on their way into shared memory.

A warp keeps a ring of tiles: while it works on one, the next ones are copied, past its registers. A copy passes through
the second-level cache once. (Codes that are first brought there, and loaded from there later, pass it twice, and it is
that cache which is short then.)

Shape legend: as in `value_tiles`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from decode_engine.kernels.coarse.key_tiles import word_pointers
from decode_engine.kernels.coarse.registers import bits_of, held_words, row_words
from decode_engine.kernels.record_fields import (
    KEY_CODES,
    KEY_OFFSETS,
    KEY_SCALES,
    VALUE_CODES,
    VALUE_OFFSETS,
    VALUE_SCALES,
    aligned_pointer,
)
from index_store.indexes.coarse_rows.parameters import BLOCK

_BLOCK = gl.constexpr(BLOCK)


@gluon.jit
def key_pointers(
    records_ptr: gl.tensor, b: gl.tensor, head: gl.tensor, keys: gl.tensor, K: gl.constexpr
) -> gl.tensor:
    """As `fields.key_pointers`, codes in words."""
    blocks = (keys + _BLOCK - 1) // _BLOCK
    return (
        aligned_pointer(records_ptr, b, head * keys * row_words(K.DIM, K.BITS), KEY_CODES, gl.int32),
        aligned_pointer(records_ptr, b, head * blocks * K.DIM, KEY_SCALES, gl.float16),
        aligned_pointer(records_ptr, b, head * blocks * K.DIM, KEY_OFFSETS, gl.float16),
    )


@gluon.jit
def value_codes(
    records_ptr: gl.tensor, b: gl.tensor, head: gl.tensor, keys: gl.tensor, K: gl.constexpr
) -> gl.tensor:
    """To codes of values, in words."""
    return aligned_pointer(records_ptr, b, head * keys * row_words(K.DIM, K.BITS), VALUE_CODES, gl.int32)


@gluon.jit
def value_steps(
    records_ptr: gl.tensor, b: gl.tensor, head: gl.tensor, keys: gl.tensor, K: gl.constexpr
) -> gl.tensor:
    """To scales and offsets of values, GROUPS of each for a key."""
    return (
        aligned_pointer(records_ptr, b, head * keys * K.GROUPS, VALUE_SCALES, gl.float16),
        aligned_pointer(records_ptr, b, head * keys * K.GROUPS, VALUE_OFFSETS, gl.float16),
    )


@gluon.jit
def prefetch(ptr: gl.tensor, count: gl.tensor, BYTES: gl.constexpr, CHAINED: gl.constexpr) -> None:
    """Has `count` elements of so many bytes brought into the second-level cache; nothing waits for that.

    Whole sixteens of bytes: some of the first may be before ptr, and the last ones may be left out. Devices whose
    launches are not CHAINED cannot do that.
    """
    if CHAINED:
        gl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 a; .reg .b32 n; .reg .b32 l; mov.u32 l, %laneid; cvt.u32.u64 n, $1; "
            "and.b32 n, n, 15; add.u32 n, n, $2; and.b32 n, n, 0xfffffff0; and.b64 a, $1, 0xfffffffffffffff0; "
            "setp.eq.u32 p, l, 0; setp.gt.and.s32 p, n, 0, p; @p cp.async.bulk.prefetch.L2.global [a], n; "
            "mov.b32 $0, 0; }",
            "=r,l,r", [ptr.to(gl.int64), (count * BYTES).to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def prefetch_key_codes(
    keys_ptrs: gl.tensor, start: gl.tensor, stop: gl.tensor, K: gl.constexpr, CHAINED: gl.constexpr
) -> None:
    """Has the codes of a block of keys, those before `stop`, brought into the second-level cache."""
    ROW: gl.constexpr = row_words(K.DIM, K.BITS)
    words = gl.minimum(gl.maximum(stop - start, 0), _BLOCK) * ROW
    prefetch(keys_ptrs[0] + gl.minimum(start, stop).to(gl.int64) * ROW, words, 4, CHAINED)


@gluon.jit
def prefetch_value_steps(
    steps_ptrs: gl.tensor, start: gl.tensor, stop: gl.tensor, K: gl.constexpr, CHAINED: gl.constexpr
) -> None:
    """Has the scales and offsets of a block of values, those before `stop`, brought into the second-level cache."""
    count = gl.minimum(gl.maximum(stop - start, 0), _BLOCK) * K.GROUPS
    for part in gl.static_range(2):
        prefetch(steps_ptrs[part] + gl.minimum(start, stop) * K.GROUPS, count, 2, CHAINED)


@gluon.jit
def prefetch_key_steps(
    keys_ptrs: gl.tensor, start: gl.tensor, stop: gl.tensor, K: gl.constexpr, CHAINED: gl.constexpr
) -> None:
    """Has the scales and offsets of a block of keys brought into the second-level cache."""
    channels = gl.where(start < stop, K.DIM, 0)
    prefetch(keys_ptrs[1] + start // _BLOCK * K.DIM, channels, 2, CHAINED)
    prefetch(keys_ptrs[2] + start // _BLOCK * K.DIM, channels, 2, CHAINED)


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
def new_ring(K: gl.constexpr) -> gl.shared_memory_descriptor:
    """Room for the tile that is worked on and AHEAD that are on their way, [AHEAD + 1, T, words as they come]."""
    W: gl.constexpr = held_words(K.DIM, K.BITS)
    return gl.allocate_shared_memory(gl.int32, [K.AHEAD + 1, K.T, W], ring_layout(W))


@gluon.jit
def copy_tile(
    ring: gl.shared_memory_descriptor,
    turn: gl.tensor,
    ptr: gl.tensor,
    base: gl.tensor,
    there: gl.tensor,
    K: gl.constexpr,
) -> None:
    """Has T rows of codes from `base` on copied as the turn-th tile, in the order of `key_of`, if they are there.

    Behind a program's last tile there is none: what all would copy then, the same rows, kept others from theirs.
    """
    words = word_pointers(ptr, base, K, copy_layout(K.T, K.DIM, K.BITS))
    async_copy.async_copy_global_to_shared(ring.index(turn % (K.AHEAD + 1)), words, mask=there)


@gluon.jit
def end_of_copies() -> None:
    """Those since the last call are waited for together."""
    async_copy.commit_group()


@gluon.jit
def wait_for_copies(LATER: gl.constexpr) -> None:
    """Waits for all copies but the LATER last groups of them."""
    async_copy.wait_group(LATER)
