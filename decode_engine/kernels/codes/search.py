"""Kernels that search product codes: from queries, codebooks and codes to lists of kept keys.

*Lookup tables* hold products of the queries' slices with every codeword, a byte for each head. One lookup per key and
subspace serves four heads of a group, because their entries share a 32-bit word. How many lookups shared memory serves
per clock is what limits the search, so entries are as small as a selection allows: 7 bits, which leave room to add two
of them in a byte. They are counted from the largest entry of their subspace downwards, which a softmax does not notice.
The step is one of 127 in twice the widest range that a few codewords of each subspace span; what lies deeper makes no
difference, and is cut. That is finer than what a code leaves of a key.

Keys are ranked as `ProductCodes.rank` ranks them: by the sum over a group's heads of the softmax of the estimated
logits. `sample_kernel` scores a sample of the keys; a row's last program finds the softmaxes' normalisers, and the
weight from which on keys are kept. `keep_kernel` scores all keys, before it waits for that, and lists those above it,
and a share of those that are at it (`border`).
Keys are never sorted, their scores never leave the multiprocessor, and about as many are kept as wanted.

The floor is lookups, not bytes: a warp's 32 lookups of a word at random take shared memory 3.5 clocks (the fullest of
32 banks), so 131,072 keys of 8 subspaces and 8 KV heads cost 4 us on 132 multiprocessors, where reading them costs 2.

Shape legend: B sequences, H KV heads, R = B * H rows, G query heads per KV head, d head dim, N keys, M subspaces, W
codewords of a subspace, E = d/M slice width, O words of four heads, P tiles of keys, S sampling programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.border import load_cut, moved, passes, store_cut, stretch_of
from decode_engine.kernels.families import PRODUCT_CODES
from decode_engine.kernels.launches import arrives_last, chained, wait_for_launch
from decode_engine.kernels.record_fields import (
    CODEBOOKS,
    CODES,
    END,
    KEEP,
    KEYS,
    aligned_pointer,
    field,
    searched_keys,
)
from decode_engine.kernels.weight_bytes import of_half, to_half
from index_store.errors import InvalidArgumentError

BLOCK = 256
"""Tiles begin at a multiple of so many keys."""

RUN = 16
"""Consecutive keys of a sample, whose codes travel together. Keys near each other are alike: long runs say little."""

WORD_HEADS = 4
"""Query heads whose table entries share a 32-bit word."""


@dataclass(frozen=True, slots=True)
class CodeShape:
    """How the work is cut; results do not depend on it, but for the sample that cut and normalisers come from.

    tile_keys: keys that one program scores and lists, a power of two and a multiple of BLOCK; warps: of such a program.
    samplers, sample_keys: programs per row that score a sample, and keys of each; powers of two. Half of the sample
    gives the cut. How far the number of kept keys strays depends on that alone, not on the context: of 4,096 keys at
    1 %, 41 decide, which makes a sixth. sample_warps: of those programs. registers, sample_registers: of a thread, at
    most, so that five and four programs share a multiprocessor; 0 leaves the choice to the compiler.
    """

    tile_keys: int = 2048
    warps: int = 4
    samplers: int = 4
    sample_keys: int = 2048
    sample_warps: int = 8
    registers: int = 0
    sample_registers: int = 0

    def options(self) -> dict[str, int]:
        """Launch options of programs that list keys."""
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})

    def sample_options(self) -> dict[str, int]:
        """Launch options of programs that score a sample."""
        limit = {"maxnreg": self.sample_registers} if self.sample_registers else {}
        return {"num_warps": self.sample_warps} | limit


def code_shape(max_keys: int, subspaces: int, group: int) -> CodeShape:
    """A launch shape for contexts of up to max_keys.

    A thread looks up no more than it has registers for: with more subspaces or two words of heads, fewer keys.
    """
    fewer = max(1, subspaces * -(-group // WORD_HEADS) // 8)
    tile = max(BLOCK, min(2048 // fewer, triton.next_power_of_2(max_keys)))
    if fewer == 1:
        return CodeShape(tile_keys=tile, registers=104, sample_registers=64)
    return CodeShape(tile_keys=tile, samplers=4 * fewer, sample_keys=2048 // fewer)


@dataclass(frozen=True, slots=True)
class CodeSizes:
    """One layer shape: everything that a kernel is compiled for.

    max_keys: the longest context of the batch. strided: dimensions of subspace b are those with i mod M = b, otherwise
    a slice. Raises InvalidArgumentError for sizes outside of what kernels can do.
    """

    kv_heads: int
    group: int
    head_dim: int
    subspaces: int
    codewords: int
    max_keys: int
    strided: bool = True
    shape: CodeShape = CodeShape()

    def __post_init__(self) -> None:
        PRODUCT_CODES.check(self.group, self.head_dim, self.max_keys, (self.subspaces, self.codewords))
        tile = self.shape.tile_keys
        if tile % BLOCK or tile & (tile - 1):
            raise InvalidArgumentError(f"tile of {tile} keys, expected a power of two from {BLOCK} keys on")

    @property
    def scale(self) -> float:
        """Of the logits."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def words(self) -> int:
        """O: 32-bit words that hold a byte for every head of a group."""
        return -(-self.group // WORD_HEADS)

    @property
    def word_heads(self) -> int:
        """Heads in a word: a power of two."""
        return min(WORD_HEADS, int(triton.next_power_of_2(self.group)))

    @property
    def tiles(self) -> int:
        """P: tiles of the longest context."""
        return -(-self.max_keys // self.shape.tile_keys)


class CodeConstants(NamedTuple):
    """What kernels are compiled for: letters as in the legend, words of heads, codewords that tell how wide entries
    spread, samplers and keys of each, keys of a tile, and columns in which these are listed."""

    HEADS: tl.constexpr
    GROUP: tl.constexpr
    DIM: tl.constexpr
    M: tl.constexpr
    W: tl.constexpr
    WORDS: tl.constexpr
    WORD_HEADS: tl.constexpr
    FEW: tl.constexpr
    STRIDED: tl.constexpr
    SAMPLERS: tl.constexpr
    SAMPLE: tl.constexpr
    BK: tl.constexpr
    COLUMNS: tl.constexpr

    @classmethod
    def of(cls, sizes: CodeSizes) -> CodeConstants:
        shape = sizes.shape
        numbers = (
            sizes.kv_heads, sizes.group, sizes.head_dim, sizes.subspaces, sizes.codewords, sizes.words,
            sizes.word_heads, min(_FEW, sizes.codewords), sizes.strided, shape.samplers, shape.sample_keys,
            shape.tile_keys, 32 * shape.warps,
        )  # fmt: skip
        return cls(*map(tl.constexpr, numbers))


@dataclass(frozen=True, slots=True)
class CodeWork:
    """Buffers of one search, made once per batch size; a captured graph keeps using them.

    tables_ROX: [R, O, M * W] int32, a byte for each of four heads: how far q_b . c is above the bottom of its table, in
    units of units_RG [R, G] float32, which are logits in log2. sampled_RPX: [R, group / 2, S * sample_keys / 2] int32,
    the group rounded up to whole words: 16 bits for each of two heads, exp(logit) of half of the sampled keys relative
    to the program's largest (5 exponent and 11 mantissa bits). peaks_RSG, masses_RSG: [R, S, G] float32: log2 of a
    program's largest weight, and the sum of its weights relative to it; sampled_RSC: [R, S, 2] int32: how many keys
    those are, and how many of them in the first half. normalisers_RG: [R, G] float32: log2 of the sum of all keys'
    weights, estimated. cuts_RX: [R, 3] int32: keys are kept whose weights, normalised and summed over heads, reach the
    second, as bits of a float32 number; and those that reach the first and draw less than the third (`border`).
    arrivals_R: [R] int32: counters, zero between steps. ids_RPK: [R, P, tile_keys] int32 and counts_RP: [R, P] int32:
    the kept keys of every tile.
    """

    tables_ROX: Tensor
    units_RG: Tensor
    sampled_RPX: Tensor
    peaks_RSG: Tensor
    masses_RSG: Tensor
    sampled_RSC: Tensor
    normalisers_RG: Tensor
    cuts_RX: Tensor
    arrivals_R: Tensor
    ids_RPK: Tensor
    counts_RP: Tensor

    @classmethod
    def make(cls, sizes: CodeSizes, size: int, device: torch.device | str) -> CodeWork:
        """Buffers for `size` sequences."""
        rows, group, shape = size * sizes.kv_heads, sizes.group, sizes.shape
        samplers = shape.samplers

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        i32, f32 = torch.int32, torch.float32
        return cls(
            tables_ROX=empty(i32, sizes.words, sizes.subspaces * sizes.codewords),
            units_RG=empty(f32, group),
            sampled_RPX=empty(
                i32, -(-sizes.words * sizes.word_heads // 2), samplers * shape.sample_keys // 2
            ),
            peaks_RSG=empty(f32, samplers, group),
            masses_RSG=empty(f32, samplers, group),
            sampled_RSC=empty(i32, samplers, 2),
            normalisers_RG=empty(f32, group),
            cuts_RX=empty(i32, 3),
            arrivals_R=torch.zeros(rows, dtype=i32, device=device),
            ids_RPK=empty(i32, sizes.tiles, shape.tile_keys),
            counts_RP=empty(i32, sizes.tiles),
        )


_LEVELS = 127
_FEW = 16  # codewords of each subspace that tell how wide its entries spread
_DEPTH = 2.0
_LEVELS_F = tl.constexpr(float(_LEVELS))
_DEPTH_F = tl.constexpr(_DEPTH)


@triton.jit
def tables_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    tables: tl.tensor,
    scale_log2: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (s, row): one subspace. Rows that search nothing are left as they are."""
    tables_ptr, units_ptr = tables
    own = tl.program_id(0)
    row = tl.program_id(1)
    b = row // K.HEADS
    E: tl.constexpr = K.DIM // K.M
    s = tl.arange(0, K.M)
    e = tl.arange(0, E)
    w = tl.arange(0, K.W)
    few = tl.arange(0, K.FEW)
    # Before the wait: nobody writes codebooks, and records are written long before.
    first, end = searched_keys(records_ptr, b)
    searches = end > first
    books_ptr = aligned_pointer(records_ptr, b, (row % K.HEADS) * (K.M * K.W * E), CODEBOOKS, tl.float32)
    some_ptrs = books_ptr + (s[:, None, None] * K.W + few[None, :, None]) * E + e[None, None, :]
    some = tl.load(some_ptrs, mask=searches, other=0.0)
    book = tl.load(books_ptr + (own * K.W + w[:, None]) * E + e[None, :], mask=searches, other=0.0)
    wait_for_launch(CHAINED)
    if searches:
        dims = e[None, :] * K.M + s[:, None] if K.STRIDED else s[:, None] * E + e[None, :]
        own_dims = e * K.M + own if K.STRIDED else own * E + e
        i = tl.arange(0, K.WORD_HEADS)
        for n in tl.static_range(K.WORDS):
            of_few: tl.tensor = ()
            of_all: tl.tensor = ()
            for head in tl.static_range(n * K.WORD_HEADS, (n + 1) * K.WORD_HEADS):
                head_ptr = q_ptr + (row * K.GROUP + head) * K.DIM
                q = tl.load(head_ptr + dims, mask=head < K.GROUP, other=0.0).to(tl.float32)
                of_few += (tl.sum(some * q[:, None, :], 2),)
                q = tl.load(head_ptr + own_dims, mask=head < K.GROUP, other=0.0).to(tl.float32)
                of_all += (tl.sum(book * q[None, :], 1),)
            spread = tl.reshape(stack(of_few), [K.M, K.FEW, K.WORD_HEADS])
            span = tl.max(tl.max(spread, 1) - tl.min(spread, 1), 0) * _DEPTH_F
            factor = _LEVELS_F / tl.maximum(span, 1e-30)
            products = tl.reshape(stack(of_all), [K.W, K.WORD_HEADS])
            above = (products - tl.max(products, 0)[None, :]) * factor[None, :]
            levels = tl.maximum(above + _LEVELS_F + 0.5, 0.0).to(tl.int32)
            at = (row * K.WORDS + n) * (K.M * K.W) + own * K.W + w
            tl.store(tables_ptr + at, tl.sum(levels << (8 * i)[None, :], 1))
            if own == 0:
                g = n * K.WORD_HEADS + i
                tl.store(units_ptr + row * K.GROUP + g, span * (scale_log2 / _LEVELS_F), mask=g < K.GROUP)


@triton.jit
def stack(parts: tl.tensor) -> tl.tensor:
    """One, two or four tensors side by side, in one or two new dimensions at the end."""
    if len(parts) == 1:
        stacked = parts[0]
    elif len(parts) == 2:
        stacked = tl.join(parts[0], parts[1])
    else:
        stacked = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return stacked


def make_tables(q_BHGD: Tensor, records_BF: Tensor, sizes: CodeSizes, work: CodeWork) -> None:
    """Fills tables and units of `work` for one step's queries [B, H, G, d], contiguous, unscaled."""
    tables_kernel[(sizes.subspaces, q_BHGD.shape[0] * sizes.kv_heads)](
        q_BHGD,
        records_BF,
        (work.tables_ROX, work.units_RG),
        sizes.scale * LOG2E,
        K=CodeConstants.of(sizes),
        num_warps=8 if sizes.codewords == PRODUCT_CODES.parts["codewords"][1] else 4,
        **chained(q_BHGD.device),
    )


def make_tables_reference(q_GD: Tensor, codebooks_MWE: Tensor, sizes: CodeSizes) -> tuple[Tensor, Tensor]:
    """The same for one row: words [O, M * W] int32 and units [G] float32."""
    if sizes.strided:
        slices_GME = q_GD.float().view(sizes.group, -1, sizes.subspaces).transpose(1, 2)
    else:
        slices_GME = q_GD.float().view(sizes.group, sizes.subspaces, -1)
    products_GMW = torch.einsum("gme,mwe->gmw", slices_GME, codebooks_MWE.float())
    few_GMW = products_GMW[:, :, :_FEW]
    span_G = (few_GMW.amax(-1) - few_GMW.amin(-1)).amax(-1) * _DEPTH
    factor_G = _LEVELS / span_G.clamp(min=1e-30)
    below_GMW = (products_GMW.amax(-1, keepdim=True) - products_GMW) * factor_G[:, None, None]
    levels = (_LEVELS + 0.5 - below_GMW).clamp(min=0).to(torch.int32)
    words = torch.zeros(sizes.words, sizes.subspaces * sizes.codewords, dtype=torch.int32, device=q_GD.device)
    for g, level in enumerate(levels.flatten(1)):
        words[g // WORD_HEADS] |= level << (8 * (g % WORD_HEADS))
    return words, span_G * (sizes.scale * LOG2E / _LEVELS)


_BLOCK, _RUN = tl.constexpr(BLOCK), tl.constexpr(RUN)
_PAIR = tl.constexpr(0x00FF00FF)
_LOW = tl.constexpr(0xFFFF)
_TWO_23 = tl.constexpr(0x4B000000)  # as float32, the number whose mantissa counts in ones
_TWO_23_F = tl.constexpr(8388608.0)


@triton.jit
def load_codes(records_ptr: tl.tensor, row: tl.tensor, key: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Codes of keys before END, four in a word, a key's words adjacent; key: [K * M / 4] int32, what a word is of."""
    b = row // K.HEADS
    before = (row % K.HEADS) * field(records_ptr, b, KEYS) * (K.M // 4)
    codes_ptr = aligned_pointer(records_ptr, b, before, CODES, tl.int32)
    at = key * (K.M // 4) + tl.arange(0, key.shape[0]) % (K.M // 4)
    return tl.load(codes_ptr + at, mask=key < field(records_ptr, b, END).to(tl.int32), other=0)


@triton.jit
def logit_sums(tables_ptr: tl.tensor, codes: tl.tensor, row_word: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Looks up words of codes and adds the entries over the subspaces, for a word's heads: [COUNT, WORD_HEADS] float32.

    The table is read past the first-level cache, which may hold an earlier layer's: a kernel may come here before the
    launch that it waits for has ended, as long as the one that made the tables has.
    """
    COUNT: tl.constexpr = codes.shape[0] * 4 // K.M
    at = tables_ptr + row_word * (K.M * K.W) + tl.arange(0, K.M * K.W)
    table = tl.load(at, cache_modifier=".cg")
    c0, c1, c2, c3 = codes & 255, (codes >> 8) & 255, (codes >> 16) & 255, (codes >> 24) & 255
    code = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [COUNT * K.M])
    entry = code + (tl.arange(0, COUNT * K.M) % K.M) * K.W
    # Two entries of 7 bits fit a byte.
    pairs = tl.sum(tl.reshape(tl.gather(table, entry, 0), [COUNT, K.M // 2, 2]), 2)
    even = tl.sum(pairs & _PAIR, 1)
    if K.WORD_HEADS == 1:
        sums = tl.expand_dims(even, 1)
    else:
        # Each shifted pair is its odd bytes and, between them, the upper even one.
        odd = tl.sum((pairs.to(tl.uint32) >> 8).to(tl.int32), 1) - (even >> 16) * 256
        if K.WORD_HEADS == 2:
            sums = tl.join(even, odd)
        else:
            sums = tl.join(tl.join(even & _LOW, even >> 16), tl.join(odd & _LOW, odd >> 16))
            sums = tl.reshape(sums, [COUNT, 4])
    # Converted without the conversion unit, which has a quarter of the others' rate.
    return (sums | _TWO_23).to(tl.float32, bitcast=True) - _TWO_23_F


@triton.jit
def sample_kernel(
    records_ptr: tl.tensor,
    tables: tl.tensor,
    found: tl.tensor,
    cuts: tl.tensor,
    arrivals_ptr: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (s, row): evenly spread runs of the searched keys, or all of them where they are few."""
    tables_ptr, units_ptr = tables
    sampled_ptr, peaks_ptr, masses_ptr, counts_ptr = found
    row = tl.program_id(1)
    b = row // K.HEADS
    first, end = searched_keys(records_ptr, b)
    base = first // _BLOCK * _BLOCK
    # Before the wait: nobody writes codes, and the tables are still being made.
    sampled = sampled_keys(base, end, tl.arange(0, K.SAMPLE * K.M // 4) // (K.M // 4), K)
    codes = load_codes(records_ptr, row, sampled, K)
    wait_for_launch(CHAINED)
    if end > first:
        place = row * K.SAMPLERS + tl.program_id(0)
        j = tl.arange(0, K.SAMPLE)
        key = sampled_keys(base, end, j, K)
        there = (key >= first) & (key < end)
        tl.store(counts_ptr + place * 2, tl.sum(there.to(tl.int32), 0))
        tl.store(counts_ptr + place * 2 + 1, tl.sum((there & (j < K.SAMPLE // 2)).to(tl.int32), 0))
        i = tl.arange(0, K.WORD_HEADS)
        pair: tl.constexpr = min(2, K.WORD_HEADS)
        pairs: tl.constexpr = K.WORD_HEADS // pair
        for n in tl.static_range(K.WORDS):
            g = n * K.WORD_HEADS + i
            unit = tl.load(units_ptr + row * K.GROUP + g, mask=g < K.GROUP, other=0.0, cache_modifier=".cg")
            sums = logit_sums(tables_ptr, codes, row * K.WORDS + n, K)
            logits = tl.where(there[:, None], sums * unit[None, :], float("-inf"))
            peak = tl.max(logits, 0)
            weights = tl.exp2(logits - tl.where(peak == float("-inf"), 0.0, peak)[None, :])
            halves = tl.reshape(to_half(weights), [K.SAMPLE, pairs, pair])
            halves = tl.sum(halves << (16 * tl.arange(0, pair))[None, None, :], 2)
            own = (row * K.WORDS + n) * pairs + tl.arange(0, pairs)
            at = (own[None, :] * K.SAMPLERS + tl.program_id(0)) * (K.SAMPLE // 2) + j[:, None]
            tl.store(sampled_ptr + at, halves, mask=(j < K.SAMPLE // 2)[:, None])
            tl.store(peaks_ptr + place * K.GROUP + g, peak, mask=g < K.GROUP)
            tl.store(masses_ptr + place * K.GROUP + g, tl.sum(weights, 0), mask=g < K.GROUP)
        if arrives_last(arrivals_ptr, row):
            find_cut(
                found, cuts, row, end - first,
                field(records_ptr, b, KEEP).to(tl.int32), K
            )  # fmt: skip


@triton.jit
def sampled_keys(base: tl.tensor, end: tl.tensor, j: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """The keys that a program samples, by their number: spread runs from `base` on.

    The first halves of all programs are spread too, and hold every key where there is room for that. Where there are
    too few keys for a sample, the others are not below `end`.
    """
    runs = tl.cdiv(end - base, _RUN)
    half: tl.constexpr = K.SAMPLE // _RUN // 2
    taken: tl.constexpr = 2 * K.SAMPLERS * half
    run = j // _RUN
    slot = tl.program_id(0) * half + run % half
    stretch = stretch_of(slot, taken // 2)
    other = (run // half + stretch) % 2  # which of two neighbours, in every stretch another
    turn = tl.where(runs > taken // 2, 2 * slot + other, slot + run // half * (taken // 2))
    run = tl.where(runs > taken, moved(turn, taken, runs, stretch), turn)
    return base + run * _RUN + j % _RUN


@triton.jit
def find_cut(
    found: tl.tensor, cuts: tl.tensor, row: tl.tensor, searched: tl.tensor, keep: tl.tensor, K: tl.constexpr
) -> None:
    """Estimates the normalisers from the sampled keys, and from half of these what a kept key's weight has to reach.

    A few keys may hold most of a softmax. So each program's largest weight stands for itself alone, and its others for
    the keys that were not sampled.
    """
    normalisers_ptr, cuts_ptr = cuts
    sampled_ptr, peaks_ptr, masses_ptr, counts_ptr = found
    s = tl.arange(0, K.SAMPLERS)
    sampled = tl.sum(tl.load(counts_ptr + (row * K.SAMPLERS + s) * 2, cache_modifier=".cg"), 0)
    counted = tl.sum(tl.load(counts_ptr + (row * K.SAMPLERS + s) * 2 + 1, cache_modifier=".cg"), 0)
    stands_for = searched.to(tl.float32) / sampled.to(tl.float32)
    # All that other programs wrote is asked for before anything is written: loads do not pass stores.
    j = tl.arange(0, K.SAMPLE // 2)
    peaks: tl.tensor = ()
    masses: tl.tensor = ()
    words: tl.tensor = ()
    pair: tl.constexpr = min(2, K.WORD_HEADS)
    for g in tl.static_range(K.GROUP):
        peaks += (tl.load(peaks_ptr + (row * K.SAMPLERS + s) * K.GROUP + g, cache_modifier=".cg"),)
        masses += (tl.load(masses_ptr + (row * K.SAMPLERS + s) * K.GROUP + g, cache_modifier=".cg"),)
    for n in tl.static_range(K.WORDS * K.WORD_HEADS // pair):
        at = ((row * (K.WORDS * K.WORD_HEADS // pair) + n) * K.SAMPLERS + s)[:, None] * (K.SAMPLE // 2) + j[
            None, :
        ]
        words += (tl.load(sampled_ptr + at, cache_modifier=".cg"),)
    total = tl.zeros([K.SAMPLERS, K.SAMPLE // 2], tl.float32)
    for g in tl.static_range(K.GROUP):
        highest = tl.max(peaks[g], 0)
        estimates = tl.maximum(masses[g] - 1.0, 0.0) * stands_for + 1.0
        normaliser = highest + tl.log2(tl.sum(estimates * tl.exp2(peaks[g] - highest), 0))
        tl.store(normalisers_ptr + row * K.GROUP + g, normaliser)
        weights = of_half(words[g // pair], g - g // pair * pair)
        total += weights * tl.exp2(peaks[g] - normaliser)[:, None]
    # Halving the range of weights is faster than a histogram, whose time grows with its bins. Positive numbers are
    # ordered as their bits are. Places of the sample without a key are all but 0, and so below every cut.
    bits = tl.reshape(total, [K.SAMPLERS * K.SAMPLE // 2]).to(tl.int32, bitcast=True)
    wanted = keep.to(tl.float32) * counted.to(tl.float32) / searched.to(tl.float32)
    store_cut(cuts_ptr + row * 3, bits, counted, wanted, keep, searched)


@triton.jit
def keep_kernel(
    records_ptr: tl.tensor,
    tables: tl.tensor,
    cuts: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    K: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (tile, row): lists the tile's keys whose weights, summed over the heads, are at the cut or above."""
    tables_ptr, units_ptr = tables
    normalisers_ptr, cuts_ptr = cuts
    tile = tl.program_id(0)
    row = tl.program_id(1)
    b = row // K.HEADS
    place = row * tl.num_programs(0) + tile
    first, end = searched_keys(records_ptr, b)
    base = first // _BLOCK * _BLOCK
    tiles = tl.where(end > first, tl.cdiv(end - base, K.BK), 0)
    count = 0
    if tile >= tiles:
        wait_for_launch(CHAINED)
    else:
        # Before the wait: the launch before is still looking for the cut, and it waited for the tables.
        base += tile * K.BK
        codes = load_codes(records_ptr, row, base + tl.arange(0, K.BK * K.M // 4) // (K.M // 4), K)
        i = tl.arange(0, K.WORD_HEADS)
        logits: tl.tensor = ()
        for n in tl.static_range(K.WORDS):
            g = n * K.WORD_HEADS + i
            unit = tl.load(units_ptr + row * K.GROUP + g, mask=g < K.GROUP, other=0.0, cache_modifier=".cg")
            logits += (logit_sums(tables_ptr, codes, row * K.WORDS + n, K) * unit[None, :],)
        wait_for_launch(CHAINED)
        weight = tl.zeros([K.BK], tl.float32)
        for n in tl.static_range(K.WORDS):
            g = n * K.WORD_HEADS + i
            at = normalisers_ptr + row * K.GROUP + g
            normaliser = tl.load(at, mask=g < K.GROUP, other=float("inf"), cache_modifier=".cg")
            weight += tl.sum(tl.exp2(logits[n] - normaliser[None, :]), 1)
        key = base + tl.arange(0, K.BK)
        there = (key - first).to(tl.uint32) < (end - first).to(tl.uint32)
        least, above, draws = load_cut(cuts_ptr + row * 3)
        kept = (passes(weight, key, row % K.HEADS, least, above, draws) & there).to(tl.int32)
        # Listed column by column: then only the columns' totals have to be added up across threads.
        square = tl.reshape(kept, [K.BK // K.COLUMNS, K.COLUMNS])
        of_column = tl.sum(square, 0)
        before = (tl.cumsum(of_column, 0) - of_column)[None, :] + tl.cumsum(square, 0)
        count = tl.sum(of_column, 0)
        at = place.to(tl.int64) * K.BK + tl.reshape(before, [K.BK]) - kept
        tl.store(ids_ptr + at, key, mask=kept > 0)
    tl.store(counts_ptr + place, count)


@triton.jit
def join_kernel(
    own_ids_ptr: tl.tensor,
    own_counts_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    width: tl.tensor,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (tile, row): copies a tile's keys to where those of the tiles before it end in the row's one list."""
    wait_for_launch(CHAINED)
    tile = tl.program_id(0)
    row = tl.program_id(1)
    tiles = tl.num_programs(0)
    t = tl.arange(0, TILES)
    counts = tl.load(own_counts_ptr + row * tiles + t, mask=t < tiles, other=0)
    before = tl.sum(tl.where(t < tile, counts, 0), 0)
    count = tl.sum(tl.where(t == tile, counts, 0), 0)
    if tile == 0:
        tl.store(counts_ptr + row, tl.sum(counts, 0))
    from_ptr = own_ids_ptr + (row * tiles + tile).to(tl.int64) * BK
    to_ptr = ids_ptr + row.to(tl.int64) * width + before
    for start in range(0, count, AT_ONCE):
        n = start + tl.arange(0, AT_ONCE)
        tl.store(to_ptr + n, tl.load(from_ptr + n, mask=n < count, other=0), mask=n < count)


def search_codes(
    q_BHGD: Tensor, records_BF: Tensor, sizes: CodeSizes, work: CodeWork, lists: KeyLists
) -> None:
    """Launches the search of one step, which fills `lists`: one segment of sizes.max_keys for each of B * H rows.

    q_BHGD: [B, H, G, d] contiguous, unscaled, fp16, bf16 or float32. records_BF: [B, RECORD_FIELDS] int64. Does not
    wait for the device and may be captured in a CUDA graph.
    """
    make_tables(q_BHGD, records_BF, sizes, work)
    rows, shape = q_BHGD.shape[0] * sizes.kv_heads, sizes.shape
    options = {"K": CodeConstants.of(sizes), **chained(q_BHGD.device)}
    tables, cuts = (work.tables_ROX, work.units_RG), (work.normalisers_RG, work.cuts_RX)
    found = (work.sampled_RPX, work.peaks_RSG, work.masses_RSG, work.sampled_RSC)
    sample_kernel[(shape.samplers, rows)](
        records_BF, tables, found, cuts, work.arrivals_R, **shape.sample_options(), **options
    )
    keep_kernel[(sizes.tiles, rows)](
        records_BF, tables, cuts, work.ids_RPK, work.counts_RP, **shape.options(), **options
    )
    join_kernel[(sizes.tiles, rows)](
        work.ids_RPK, work.counts_RP, lists.ids_RPW, lists.counts_RP, sizes.max_keys, BK=shape.tile_keys,
        TILES=triton.next_power_of_2(sizes.tiles), AT_ONCE=128, num_warps=1 if sizes.tiles <= 64 else 4,
        **chained(q_BHGD.device),
    )  # fmt: skip
