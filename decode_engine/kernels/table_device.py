"""Functions that the query-table kernels are made of: pick rows, add them up, find keys, read the threshold.

A table row is read as 32-bit words of four keys. Programs take strided blocks of 64 words, so that neighbouring keys,
which tend to be kept together, are spread over programs. Rows are added by `dp4a`: weights are rounded to 8 bits
relative to the largest, which is finer than the tables themselves, and the sum is exact.

Suffix free names are scalars; `*_ptr` are addresses of the buffers in `Workspace` and of `TableBatch.records_BF`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.kernels import table_batch

FIELDS = tl.constexpr(table_batch.RECORD_FIELDS)
KV = tl.constexpr(table_batch.KV)
KV_HEAD = tl.constexpr(table_batch.KV_HEAD)
TABLES = tl.constexpr(table_batch.TABLES)
TABLE_ROW = tl.constexpr(table_batch.TABLE_ROW)
CENTROIDS = tl.constexpr(table_batch.CENTROIDS)
SCALES = tl.constexpr(table_batch.SCALES)
TAIL = tl.constexpr(table_batch.TAIL)
TAIL_HEAD = tl.constexpr(table_batch.TAIL_HEAD)
KEYS = tl.constexpr(table_batch.KEYS)
FIRST = tl.constexpr(table_batch.FIRST)
END = tl.constexpr(table_batch.END)
TAIL_KEYS = tl.constexpr(table_batch.TAIL_KEYS)
KEEP = tl.constexpr(table_batch.KEEP)
BINS = tl.constexpr(table_batch.BINS)
MINI_WORDS = tl.constexpr(table_batch.MINI_KEYS // 4)

SAMPLE_WORDS = tl.constexpr(256)  # of one program that samples
SAMPLE_RUN = tl.constexpr(16)  # consecutive words of a sample

LOG2E = tl.constexpr(1.4426950408889634)
BYTE_SHIFT = tl.constexpr(
    20
)  # a weight's byte: 5 exponent and 3 mantissa bits of its float32, from 2^-31 to 1
BYTE_HALF = tl.constexpr(1 << 19)
BYTE_MASK = tl.constexpr(255 << 20)
BYTE_BASE = tl.constexpr(768)
BYTE_LEAST = tl.constexpr(768 << 20)
BIN_STEPS = tl.constexpr(8.0)  # bins per octave of a summed weight
BIN_FLOOR = tl.constexpr(
    29.0
)  # octaves below 1 where the bins begin; the sum of eight softmaxes is at most 2^3

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
def wait_for_predecessor(DEPENDENT: tl.constexpr) -> None:
    """With dependent launches: waits until the kernel before has ended and what it wrote is visible."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def let_successor_start(DEPENDENT: tl.constexpr) -> None:
    """With dependent launches: the next kernel's programs may take the places of those that end.

    Called late: programs that come early only wait, and that costs up to a tenth (measured on an H200).
    """
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def field(records_ptr: tl.tensor, b: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """One int64 of a sequence's record."""
    return tl.load(records_ptr + b * FIELDS + index)


@triton.jit
def pick_rows(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    units_ptr: tl.tensor,
    b: tl.tensor,
    h: tl.tensor,
    query: tl.tensor,
    scale: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
    STRIDED: tl.constexpr,
    POOLED: tl.constexpr,
) -> None:
    """Writes the nearest centroid's row of every subspace with its weight max(0, q_b . c_b) * table scale."""
    W: tl.constexpr = D // M
    L: tl.constexpr = 1 if POOLED else G
    s = tl.arange(0, M)
    c = tl.arange(0, CP)
    i = tl.arange(0, W)
    cen_ptr = field(records_ptr, b, CENTROIDS).to(tl.pointer_type(tl.float32))
    cen_ptr = tl.multiple_of(cen_ptr, 16)
    inside = (c < C)[None, :]
    offsets = ((h * M + s)[:, None] * C + c[None, :]) * W
    cen = tl.load(cen_ptr + offsets[:, :, None] + i[None, None, :], mask=inside[:, :, None], other=0.0)
    scales_ptr = field(records_ptr, b, SCALES).to(tl.pointer_type(tl.float32))
    scales = tl.load(
        scales_ptr + h * M + s, mask=s < M, other=0.0
    )  # early: its latency hides behind the centroids'
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    heads_ptr = q_ptr + (b * H + h) * (G * D)
    # Read as it lies and rearranged afterwards: gathered by subspace, it would take more loads than the centroids.
    if POOLED:
        heads = tl.load(heads_ptr + g[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
        q = tl.sum(heads.to(tl.float32), 0) * (scale / G)
    else:
        q = tl.load(heads_ptr + query * D + d).to(tl.float32) * scale
    q = tl.trans(tl.reshape(q, [W, M])) if STRIDED else tl.reshape(q, [M, W])
    products = tl.sum(cen * q[:, None, :], 2)
    products = tl.where(c[None, :] < C, products, float("-inf"))
    nearest = tl.argmax(products, 1).to(tl.int32)
    weights = tl.maximum(tl.max(products, 1), 0.0) * scales
    largest = tl.max(weights, 0)
    small = tl.floor(weights * tl.where(largest > 0.0, 255.0 / largest, 0.0) + 0.5).to(tl.int32)
    slot = (b * H + h) * L + query
    rows = s * C + nearest
    tl.store(rows_ptr + slot * M + s, rows)
    in_head = (h * (M * C) + rows).to(tl.int64) * field(records_ptr, b, TABLE_ROW)
    tl.store(addresses_ptr + slot * M + s, field(records_ptr, b, TABLES) + in_head)
    k = tl.arange(0, M // 4)
    packed = tl.sum(tl.reshape(small, [M // 4, 4]) << (8 * tl.arange(0, 4))[None, :], 1)
    tl.store(weights_ptr + slot * (M // 4) + k, packed)
    tl.store(units_ptr + slot * 2, largest / 255.0)
    tl.store(units_ptr + slot * 2 + 1, 127.0 * tl.sum(small, 0).to(tl.float32))


@triton.jit
def signed_byte(words: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """Byte `index` of 32-bit words, sign-extended."""
    return (words << (24 - 8 * index)) >> 24


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
        w0, w1, w2, w3 = w & 255, (w >> 8) & 255, (w >> 16) & 255, (w >> 24) & 255
        a0 += (
            w0 * signed_byte(x0, 0)
            + w1 * signed_byte(x1, 0)
            + w2 * signed_byte(x2, 0)
            + w3 * signed_byte(x3, 0)
        )
        a1 += (
            w0 * signed_byte(x0, 1)
            + w1 * signed_byte(x1, 1)
            + w2 * signed_byte(x2, 1)
            + w3 * signed_byte(x3, 1)
        )
        a2 += (
            w0 * signed_byte(x0, 2)
            + w1 * signed_byte(x1, 2)
            + w2 * signed_byte(x2, 2)
            + w3 * signed_byte(x3, 2)
        )
        a3 += (
            w0 * signed_byte(x0, 3)
            + w1 * signed_byte(x1, 3)
            + w2 * signed_byte(x2, 3)
            + w3 * signed_byte(x3, 3)
        )
    return a0, a1, a2, a3


@triton.jit
def sum_rows(
    addresses_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slot: tl.tensor,
    word: tl.tensor,
    mask: tl.tensor,
    J: tl.constexpr,
    ASSEMBLY: tl.constexpr,
) -> tl.tensor:
    """Weighted sums of the picked rows for the four keys of every word, int32."""
    zero = tl.zeros_like(word)
    a = (zero, zero, zero, zero)
    for j in tl.static_range(0, J, 4):
        x0 = load_row(addresses_ptr + slot * J + j, word, mask)
        x1 = load_row(addresses_ptr + slot * J + j + 1, word, mask)
        x2 = load_row(addresses_ptr + slot * J + j + 2, word, mask)
        x3 = load_row(addresses_ptr + slot * J + j + 3, word, mask)
        w = tl.load(weights_ptr + slot * (J // 4) + j // 4)
        a = add_four_rows(x0, x1, x2, x3, w, a, ASSEMBLY)
    return a


@triton.jit
def load_row(address_ptr: tl.tensor, word: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Words of the table row at an address."""
    row_ptr = tl.multiple_of(tl.load(address_ptr).to(tl.pointer_type(tl.int32)), 16)
    return tl.load(row_ptr + word, mask=mask, other=0)


@triton.jit
def tile_words(records_ptr: tl.tensor, b: tl.tensor, tile: tl.tensor, BW: tl.constexpr) -> tl.tensor:
    """Words of a tile, and which of them exist: blocks tile, tile + T, tile + 2T, ... of the sequence's T tiles."""
    blocks = tl.cdiv(field(records_ptr, b, KEYS).to(tl.int32), 4 * MINI_WORDS)
    tiles = tl.cdiv(blocks, BW // MINI_WORDS)
    j = tl.arange(0, BW)
    block = (j // MINI_WORDS) * tiles + tile
    return block * MINI_WORDS + j % MINI_WORDS, block < blocks


@triton.jit
def tile_count(records_ptr: tl.tensor, b: tl.tensor, BW: tl.constexpr) -> tl.tensor:
    """Tiles of a sequence."""
    return tl.cdiv(tl.cdiv(field(records_ptr, b, KEYS).to(tl.int32), 4 * MINI_WORDS), BW // MINI_WORDS)


@triton.jit
def searched_range(records_ptr: tl.tensor, b: tl.tensor) -> tl.tensor:
    """The first searched key, and how many there are."""
    first = field(records_ptr, b, FIRST).to(tl.int32)
    return first, (field(records_ptr, b, END).to(tl.int32) - first).to(tl.uint32)


@triton.jit
def searched(word: tl.tensor, index: tl.constexpr, first: tl.tensor, span: tl.tensor) -> tl.tensor:
    """Whether key `index` of every word is in the searched range: one comparison, keys before it wrap around."""
    return (word * 4 + (index - first)).to(tl.uint32) < span


@triton.jit
def linear_position(sums: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """Where a sum lies among the bins, which cover everything from -reach to reach; sums are below 2^24."""
    return (sums.to(tl.float32) + reach) * (BINS / (2.0 * reach))


@triton.jit
def linear_cut(limit: tl.tensor, reach: tl.tensor) -> tl.tensor:
    """The least sum at position `limit`."""
    return tl.ceil(limit * (2.0 * reach / BINS) - reach).to(tl.int32)


@triton.jit
def bin_or_none(position: tl.tensor, there: tl.tensor) -> tl.tensor:
    """The bin of a position; -1 for a key that is not there."""
    return tl.where(there, tl.minimum(tl.maximum(position, 0.0), BINS - 1.0).to(tl.int32), -1)


@triton.jit
def store_histogram(
    b0: tl.tensor,
    b1: tl.tensor,
    b2: tl.tensor,
    b3: tl.tensor,
    histograms_ptr: tl.tensor,
    bh: tl.tensor,
    WORDS: tl.constexpr,
) -> None:
    """Stores how many of the four keys of WORDS words are in each bin, as this program's histogram."""
    bins = tl.reshape(tl.join(tl.join(b0, b1), tl.join(b2, b3)), [4 * WORDS])
    counts = tl.histogram(tl.maximum(bins, 0), BINS, mask=bins >= 0)
    place = bh * tl.num_programs(0) + tl.program_id(0)
    tl.store(histograms_ptr + place * BINS + tl.arange(0, BINS), counts)


@triton.jit
def load_histograms(histograms_ptr: tl.tensor, count: tl.tensor, NH: tl.constexpr) -> tl.tensor:
    """The `count` histograms of a head, [NH, BINS]."""
    n = tl.arange(0, NH)
    places = n[:, None] * BINS + tl.arange(0, BINS)[None, :]
    return tl.load(histograms_ptr + places, mask=(n < count)[:, None], other=0, cache_modifier=".cg")


@triton.jit
def threshold(records_ptr: tl.tensor, histograms: tl.tensor, b: tl.tensor) -> tl.tensor:
    """Where among the bins the keys begin that are kept, so that about `keep` are; 0.0 keeps all.

    It is read from the histograms of a sample of the keys; inside a bin they are taken to lie evenly. Bin 0 holds
    everything too small to matter and is kept only where every key is.
    """
    bins = tl.arange(0, BINS)
    counts = tl.sum(histograms, 0)
    total = tl.sum(counts, 0)
    at_least = (total - tl.cumsum(counts, 0) + counts).to(tl.float32)
    keep = field(records_ptr, b, KEEP).to(tl.int32).to(tl.float32)
    available = (field(records_ptr, b, END) - field(records_ptr, b, FIRST)).to(tl.int32).to(tl.float32)
    wanted = keep * total.to(tl.float32) / tl.maximum(available, 1.0)
    border = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    above = tl.sum(tl.where(bins == border, at_least, 0.0), 0)
    inside = tl.sum(tl.where(bins == border, counts, 0), 0).to(tl.float32)
    limit = border.to(tl.float32) + (above - wanted) / tl.maximum(inside, 1.0)
    limit = tl.where(wanted > 0.0, tl.maximum(limit, 1.0), BINS + 0.0)
    return tl.where(keep >= available, 0.0, limit)


@triton.jit
def finish_early(
    records_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    limits_ptr: tl.tensor,
    b: tl.tensor,
    bh: tl.tensor,
    NH: tl.constexpr,
) -> None:
    """The last of a head's programs to come here writes the threshold, so that no later program has to find it."""
    tl.debug_barrier()
    before = tl.atomic_add(arrivals_ptr + bh, 1, sem="acq_rel")
    if before == tl.num_programs(0) - 1:
        own_ptr = histograms_ptr + bh * tl.num_programs(0) * BINS
        histograms = load_histograms(own_ptr, tl.num_programs(0), NH)
        tl.store(limits_ptr + bh, threshold(records_ptr, histograms, b))
        tl.store(arrivals_ptr + bh, 0)
