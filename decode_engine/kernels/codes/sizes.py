"""What the product-code kernels work on: sizes, launch shapes and buffers.

Shape legend: B sequences, H KV heads, R = B * H rows, G query heads per KV head, d head dim, N keys, M subspaces, W
codewords of a subspace, E = d/M slice width, O words of four heads, P tiles of keys, S sampling programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from decode_engine.kernels.families import PRODUCT_CODES
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
