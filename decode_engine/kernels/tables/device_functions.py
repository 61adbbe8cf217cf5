"""Functions that the query-table kernels are made of: pick rows, add them up, find keys.

A table row is read as 32-bit words of four keys. Programs take strided blocks of 64 words, so that neighbouring keys,
which tend to be kept together, are spread over programs. Rows are added by `dp4a`: weights are rounded to 8 bits
relative to the largest, which is finer than the tables themselves, and the sum is exact.

Suffix free names are scalars; `*_ptr` are addresses of the buffers in `TableWork` and of the records.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decode_engine.kernels.attention import online_softmax
from decode_engine.kernels.border import moved, stretch_of
from decode_engine.kernels.launches import wait_alone
from decode_engine.kernels.record_fields import (
    CENTROIDS,
    KEEP,
    KEYS,
    SCALES,
    TABLE_ROW,
    TABLES,
    aligned_pointer,
    field,
    searched_keys,
)
from decode_engine.kernels.tables import sizes as table_sizes

LOG2E = tl.constexpr(online_softmax.LOG2E)
MINI_WORDS = tl.constexpr(table_sizes.MINI_KEYS // 4)
SAMPLE_WORDS = tl.constexpr(table_sizes.SAMPLE_KEYS // 4)
SAMPLE_RUN = tl.constexpr(table_sizes.SAMPLE_RUN_KEYS // 4)  # words
_PICK_SIZE = tl.constexpr(8192)  # centroid values that are compared at once

# Four words of table rows, keys 0..3 in bytes 0..3, are transposed into four words of a key each, and multiplied with
# four weights at once.
_ADD_FOUR_ROWS = tl.constexpr(
    """{
    .reg .b32 t0, t1, u0, u1, k0, k1, k2, k3;
    prmt.b32 t0, $4, $5, 0x5140;
    prmt.b32 t1, $4, $5, 0x7362;
    prmt.b32 u0, $6, $7, 0x5140;
    prmt.b32 u1, $6, $7, 0x7362;
    prmt.b32 k0, t0, u0, 0x5410;
    prmt.b32 k1, t0, u0, 0x7632;
    prmt.b32 k2, t1, u1, 0x5410;
    prmt.b32 k3, t1, u1, 0x7632;
    dp4a.s32.u32 $0, k0, $8, $9;
    dp4a.s32.u32 $1, k1, $8, $10;
    dp4a.s32.u32 $2, k2, $8, $11;
    dp4a.s32.u32 $3, k3, $8, $12;
    }"""
)
_ADD_FOUR_OPERANDS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r,r")


@triton.jit
def load_centroids(
    records_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    first: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CB: tl.constexpr,
    W: tl.constexpr,
) -> tl.tensor:
    """CB centroids of every subspace, from `first` on: [M, CB, W]."""
    c = first + tl.arange(0, CB)
    offsets = ((h * M + tl.arange(0, M))[:, None] * C + c[None, :]) * W
    places = offsets[:, :, None] + tl.arange(0, W)[None, None, :]
    places_ptr = aligned_pointer(records_ptr, b, places, CENTROIDS, tl.float32)
    return tl.load(places_ptr, mask=(c < C)[None, :, None], other=0.0)


@triton.jit
def load_query(
    q_ptr: tl.tensor,
    slot: tl.tensor,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    STRIDED: tl.constexpr,
    POOLED: tl.constexpr,
) -> tl.tensor:
    """A searched query by subspaces, [M, W] float32: a head's, or the sum of the group's heads.

    Read as it lies and rearranged afterwards: gathered by subspace, it would take more loads than the centroids. The
    sum, also over a single head, keeps the compiler from gathering.
    """
    W: tl.constexpr = D // M
    HEADS: tl.constexpr = G if POOLED else 1
    g = tl.arange(0, GP if POOLED else 2)
    places = (slot * HEADS + g)[:, None] * D + tl.arange(0, D)[None, :]
    q = tl.sum(tl.load(q_ptr + places, mask=(g < HEADS)[:, None], other=0.0).to(tl.float32), 0)
    return tl.trans(tl.reshape(q, [W, M])) if STRIDED else tl.reshape(q, [M, W])


@triton.jit
def pick_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    slot: tl.tensor,
    scale: tl.tensor,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    STRIDED: tl.constexpr,
    POOLED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Writes where the nearest centroid's row of every subspace begins, and its weight max(0, q_b . c_b) * table scale.

    Of equals the first is nearest. Kernels add four rows at a time: where there are fewer, the others are the same ones
    again, with weight 0. What does not depend on the launch before is read before it has ended.
    """
    W: tl.constexpr = D // M
    J: tl.constexpr = max(4, M)
    CB: tl.constexpr = min(CP, _PICK_SIZE // D)
    s = tl.arange(0, M)
    row_blocks = (field(records_ptr, b, TABLE_ROW) // (4 * MINI_WORDS)).to(tl.int32)
    scales_ptr = field(records_ptr, b, SCALES).to(tl.pointer_type(tl.float32))
    scales = tl.load(scales_ptr + h * M + s) * scale
    centroids = load_centroids(records_ptr, b, h, 0, M, C, CB, W)
    wait_alone(CHAINED)
    q = load_query(q_ptr, slot, G, GP, D, M, STRIDED, POOLED)
    best = tl.full([M], float("-inf"), tl.float32)
    nearest = tl.zeros([M], tl.int32)
    for first in tl.static_range(0, CP, CB):
        if first > 0:
            centroids = load_centroids(records_ptr, b, h, first, M, C, CB, W)
        products = tl.sum(centroids * q[:, None, :], 2)
        products = tl.where((first + tl.arange(0, CB) < C)[None, :], products, float("-inf"))
        largest = tl.max(products, 1)
        nearest = tl.where(largest > best, first + tl.argmax(products, 1).to(tl.int32), nearest)
        best = tl.maximum(best, largest)
    weights = tl.maximum(best, 0.0) * scales
    largest = tl.max(weights, 0)
    small = tl.floor(weights * tl.where(largest > 0.0, 255.0 / largest, 0.0) + 0.5).to(tl.int32)
    rows = (h * (M * C) + s * C + nearest) * row_blocks
    for repeat in tl.static_range(J // M):
        tl.store(rows_ptr + slot * J + repeat * M + s, rows)
    if M < 4:
        tl.store(weights_ptr + slot, tl.sum(small << (8 * s), 0))
    else:
        k = tl.arange(0, J // 4)
        packed = tl.sum(tl.reshape(small, [J // 4, 4]) << (8 * tl.arange(0, 4))[None, :], 1)
        tl.store(weights_ptr + slot * (J // 4) + k, packed)
    tl.store(units_ptr + slot * 2, largest / 255.0)
    tl.store(units_ptr + slot * 2 + 1, 127.0 * tl.sum(small, 0).to(tl.float32))


@triton.jit
def signed_byte(words: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Byte `index` of 32-bit words, sign-extended."""
    return (words << (24 - 8 * index)) >> 24


@triton.jit
def weighted_bytes(
    x0: tl.tensor, x1: tl.tensor, x2: tl.tensor, x3: tl.tensor, w: tl.tensor, index: tl.constexpr
) -> tl.tensor:
    """Byte `index` of four rows' words, added up by the four weights of 8 bits in w."""
    upper = (w & 255) * signed_byte(x0, index) + ((w >> 8) & 255) * signed_byte(x1, index)
    lower = ((w >> 16) & 255) * signed_byte(x2, index) + ((w >> 24) & 255) * signed_byte(x3, index)
    return upper + lower


@triton.jit
def add_four_rows(
    x0: tl.tensor,
    x1: tl.tensor,
    x2: tl.tensor,
    x3: tl.tensor,
    w: tl.tensor,
    a: tl.tensor,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:
    """Adds four weighted rows to the sums of a word's four keys; w holds four weights of 8 bits."""
    a0, a1, a2, a3 = a
    if ASSEMBLY:
        a0, a1, a2, a3 = tl.inline_asm_elementwise(
            _ADD_FOUR_ROWS,
            _ADD_FOUR_OPERANDS,
            [x0, x1, x2, x3, w, a0, a1, a2, a3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        a0 += weighted_bytes(x0, x1, x2, x3, w, 0)
        a1 += weighted_bytes(x0, x1, x2, x3, w, 1)
        a2 += weighted_bytes(x0, x1, x2, x3, w, 2)
        a3 += weighted_bytes(x0, x1, x2, x3, w, 3)
    return a0, a1, a2, a3


@triton.jit
def sum_rows(
    sequence: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slot: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    J: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:
    """Weighted sums of a query's picked rows for the four keys of every word, int32."""
    _, _, _, _, tables = sequence
    # All of these loads are under way before the first row's: one by one they would cost most of a step.
    rows = ()
    weights = ()
    for j in tl.static_range(J):
        rows += (tl.load(rows_ptr + slot * J + j),)  # type: ignore[assignment]
    for j in tl.static_range(J // 4):
        weights += (tl.load(weights_ptr + slot * (J // 4) + j),)  # type: ignore[assignment]
    zero = tl.zeros_like(word)
    a = (zero, zero, zero, zero)
    for j in tl.static_range(0, J, 4):
        x0 = load_row(tables, rows[j], word, mask)
        x1 = load_row(tables, rows[j + 1], word, mask)
        x2 = load_row(tables, rows[j + 2], word, mask)
        x3 = load_row(tables, rows[j + 3], word, mask)
        a = add_four_rows(x0, x1, x2, x3, weights[j // 4], a, ASSEMBLY)
    return a


@triton.jit
def load_row(tables: tl.tensor, row: tl.tensor, word: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Words of a table row."""
    row_ptr = (tables + row.to(tl.int64) * (4 * MINI_WORDS)).to(tl.pointer_type(tl.int32))
    return tl.load(tl.multiple_of(row_ptr, 16) + word, mask=mask, other=0)


@triton.jit
def load_sequence(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """What a record says about the search: keys of a table row, the first searched key, how many are searched, how many
    of them to keep, and where the tables are.

    Keys are 0 where none is searched, for then no row is picked. No launch of a step writes records, so they are read
    before the launch before has ended.
    """
    first, end = searched_keys(records_ptr, b)
    span = end - first
    keys = tl.where(span > 0, field(records_ptr, b, KEYS), 0).to(tl.int32)
    return keys, first, span, field(records_ptr, b, KEEP).to(tl.int32), field(records_ptr, b, TABLES)


@triton.jit
def tile_words(sequence: tl.tensor, tile: tl.tensor, BW: tl.constexpr) -> tl.tensor:
    """Words of a tile, and which of them exist: blocks tile, tile + T, tile + 2T, ... of the sequence's T tiles."""
    keys, _, _, _, _ = sequence
    blocks = tl.cdiv(keys, 4 * MINI_WORDS)
    tiles = tl.cdiv(blocks, BW // MINI_WORDS)
    j = tl.arange(0, BW)
    block = (j // MINI_WORDS) * tiles + tile
    return block * MINI_WORDS + j % MINI_WORDS, block < blocks


@triton.jit
def tile_count(sequence: tl.tensor, BW: tl.constexpr) -> tl.tensor:
    """Tiles of a sequence."""
    keys, _, _, _, _ = sequence
    return tl.cdiv(tl.cdiv(keys, 4 * MINI_WORDS), BW // MINI_WORDS)


@triton.jit
def sampled_words(sequence: tl.tensor, S: tl.constexpr) -> tl.tensor:
    """Words that this one of S sampling programs scores, and which of them exist: spread runs, or all."""
    keys, _, _, _, _ = sequence
    runs = tl.cdiv(keys, 4 * SAMPLE_RUN)
    sampled = S * (SAMPLE_WORDS // SAMPLE_RUN)
    j = tl.arange(0, SAMPLE_WORDS)
    turn = tl.program_id(0) * (SAMPLE_WORDS // SAMPLE_RUN) + j // SAMPLE_RUN
    run = tl.where(runs > sampled, moved(turn, sampled, runs, stretch_of(turn, sampled)), turn)
    return run * SAMPLE_RUN + j % SAMPLE_RUN, run < runs


@triton.jit
def searched(word: tl.tensor, index: tl.constexpr, sequence: tl.tensor) -> tl.tensor:
    """Whether key `index` of every word is in the searched range: one comparison, keys before it wrap around."""
    _, first, span, _, _ = sequence
    return (word * 4 + (index - first)).to(tl.uint32) < span.to(tl.uint32)
