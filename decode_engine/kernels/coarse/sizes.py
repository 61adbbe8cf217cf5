"""What the kernels over coarse copies work on: sizes, launch shapes and buffers.

Shape legend: B sequences, H KV heads, R = B * H rows, G query heads per KV head, d head dim, N keys, M sampled keys, S
programs that go over a row's copy (splits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from decode_engine.kernels.families import coarse_refusal
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.parameters import BLOCK

RUN = 16
"""Consecutive keys of a sample, which share scales and offsets. Keys near each other are alike."""

MAX_SPLITS = 256
"""That merge at once what they found."""
CHUNKS, LANES = 16, 32
"""Parts of a sample whose largest weights stand for themselves alone; lanes of a warp, which has a part."""

CUT_PLACES = (127 - 29) << 23, 1 << 28, 10, 1 << 14
"""Where a cut may be: bits of 2^-29 (summed weights are at most 2^4, and less is nothing), and 32 octaves on; halvings
of these, down to 1/32 of one; more than weights of a sample are rounded by, of 2^23 an octave."""

_COLUMNS, _FEW_SUMS = 8, 1024
"""Query rows that products in registers take at once; query rows times channels of a program where four times as many
programs have room on a processor, rather than twice as many."""
_REGISTERS, _FEW_REGISTERS = 168, 128
"""Of each thread, where programs for values and exact rows, and those for keys, are held to few."""
_WAVES = 3
"""Programs that attend to values, where there is room for their results, by those that processors hold."""
_LEAST_TILE, _ROW_BYTES = 16, 64
"""Keys of a tile in registers, at least, and bytes of its rows where it is not halved."""
_MOST_AHEAD = 32
"""Tiles of values whose places a program has at hand (`warp_values`)."""


@dataclass(frozen=True, slots=True)
class CoarseShape:
    """How the work is cut. Results depend on it by their rounding, and by the sample that the cut comes from.

    programs: of which two or four times as many go over copies, of all rows together, a warp each with all that it
    needs in registers. tile: keys that a program holds, half of them where rows are long; ahead, values_ahead: tiles of
    keys, and of values, that are on their way to it meanwhile; early: blocks of keys besides that come near while the
    cut is looked for; exact_share: of so many programs that attend one has exact rows, the others have values.
    samplers, runs: parts of a row's sample, and runs of keys of each; powers of two. At 1 % 82 of 8,192 keys decide how
    many are kept, which then strays by a ninth; at 0.25 % by a fifth. Raises InvalidArgumentError for tiles on their
    way that kernels have no place for, and for samples that lanes of the kernel that cuts cannot share evenly.
    """

    programs: int = 528
    tile: int = 32
    ahead: int = 3
    values_ahead: int = 3
    early: int = 1
    exact_share: int = 6
    samplers: int = 64
    runs: int = 8

    def __post_init__(self) -> None:
        if self.ahead < 1 or not 1 <= self.values_ahead <= _MOST_AHEAD:
            raise InvalidArgumentError(
                f"{self.ahead} tiles of keys ahead and {self.values_ahead} of values, expected 1 or more, and 1 to "
                f"{_MOST_AHEAD}"
            )
        if self.sampled % (LANES * CHUNKS):
            raise InvalidArgumentError(
                f"a sample of {self.sampled} keys, expected a multiple of {LANES * CHUNKS}"
            )

    @property
    def sampled(self) -> int:
        """M: keys of a sample."""
        return self.samplers * self.runs * RUN


def coarse_shape(device: torch.device, max_keys: int) -> CoarseShape:
    """A launch shape for contexts of up to max_keys on a device."""
    if device.type != "cuda":
        return CoarseShape(programs=4, samplers=8, runs=4)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # A sample of a short context would cost what all of its keys do.
    return CoarseShape(programs=4 * processors, samplers=32 if max_keys > 2**15 else 16)


class CoarseConstants(NamedTuple):
    """What kernels over codes are compiled for, with one record for all of their functions.

    HEADS: KV heads. X: query rows of a product, GROUP of them real. P: tiles of keys that share one. Y: columns of
    bytes of weights, for each of GROUPS groups of a value's channels. DIM: channels, in codes of BITS. T: keys of a
    tile, AHEAD of which are on their way.
    """

    HEADS: gl.constexpr
    GROUP: gl.constexpr
    X: gl.constexpr
    P: gl.constexpr
    Y: gl.constexpr
    DIM: gl.constexpr
    BITS: gl.constexpr
    GROUPS: gl.constexpr
    T: gl.constexpr
    AHEAD: gl.constexpr


@dataclass(frozen=True, slots=True)
class CoarseSizes:
    """One layer shape: everything that a kernel is compiled for.

    key_bits, value_bits: 2, 3 or 4. value_groups: of channels of a value with a scale and an offset each. max_keys: the
    longest context of the batch. Raises InvalidArgumentError for sizes outside of what kernels can do.
    """

    kv_heads: int
    group: int
    head_dim: int
    key_bits: int
    value_bits: int
    value_groups: int
    max_keys: int
    shape: CoarseShape = CoarseShape()

    def __post_init__(self) -> None:
        refusal = coarse_refusal(
            self.group, self.head_dim, (self.key_bits, self.value_bits), self.value_groups, self.max_keys
        )
        if refusal is not None:
            raise InvalidArgumentError(refusal)

    @property
    def blocks(self) -> int:
        """Of the longest context."""
        return -(-self.max_keys // BLOCK)

    @property
    def columns(self) -> int:
        """Query rows of a product, padded."""
        return -(-self.group // _COLUMNS) * _COLUMNS

    @property
    def bytes(self) -> int:
        """Of a key's weights, two for each query row of a product; half of them where two tiles share a result."""
        return self.columns if 2 * self.group <= self.columns else 2 * self.columns

    @property
    def tile(self) -> int:
        """Keys that a program holds: eight programs' rings of tiles have room on a processor."""
        row_bytes = _held_bytes(self.head_dim, max(self.key_bits, self.value_bits))
        return self.shape.tile if row_bytes <= _ROW_BYTES else max(_LEAST_TILE, self.shape.tile // 2)

    @property
    def few_registers(self) -> bool:
        """Whether programs are held to few registers."""
        return self.columns * self.head_dim <= _FEW_SUMS

    def splits(self, rows: int) -> int:
        """S."""
        times = 4 if self.few_registers else 2
        return max(1, min(self.blocks, MAX_SPLITS, self.shape.programs * times // rows))

    def slots(self, rows: int) -> int:
        """That a launch fills which attends to everything."""
        return self.exact_programs(rows) + self.value_programs(rows)

    def value_programs(self, rows: int) -> int:
        """That attend to coded values, and the slots that they fill."""
        return self._values_room(rows) - self.exact_programs(rows)

    def exact_programs(self, rows: int) -> int:
        """That attend to exact rows beside those, in slots of their own."""
        return max(1, self._values_room(rows) // self.shape.exact_share)

    def _values_room(self, rows: int) -> int:
        """Programs of a row that attend.

        As many as processors hold at once, or several times as many: rows differ in how many of their values count.
        """
        at_once = self.shape.programs * (3 if self.few_registers else 2) // rows
        most = min(2 * self.blocks, MAX_SPLITS)
        return max(2, min(most, at_once * _WAVES if at_once * _WAVES <= most else at_once))

    def width(self, rows: int) -> int:
        """Keys that one of a row's programs goes over, at most."""
        return -(-self.blocks // self.splits(rows)) * BLOCK

    def constants(self, bits: int, tile: int, ahead: int = 0, together: bool = False) -> CoarseConstants:
        """Of a kernel that goes over codes of so many bits. together: two tiles share a result where one fits twice."""
        tiles = 2 if together and 2 * self.group <= self.columns else 1
        numbers = (
            self.kv_heads, self.group, self.columns, tiles, self.bytes, self.head_dim, bits, self.value_groups, tile,
            ahead,
        )  # fmt: skip
        return CoarseConstants(*map(gl.constexpr, numbers))

    def passes(self, keys: bool) -> CoarseConstants:
        """Of kernels that go over all codes, of keys or of values."""
        if keys:
            return self.constants(self.key_bits, self.tile, self.shape.ahead, together=True)
        return self.constants(self.value_bits, self.tile, self.shape.values_ahead)

    def launch(self, *, keys: bool) -> dict[str, Any]:
        """How kernels are launched that go over the copies, of keys or of values."""
        most = _FEW_REGISTERS if keys else _REGISTERS
        return {"num_warps": 1, "maxnreg": most} if self.few_registers else {"num_warps": 1}


def _held_bytes(head_dim: int, bits: int) -> int:
    """Of a row of codes as programs hold them: third bits are there twice."""
    return head_dim * (2 if bits == 2 else 4) // 8


@dataclass(frozen=True, slots=True)
class CoarseWork:
    """Buffers of one search, made once per batch size; a captured graph keeps using them.

    sampled_RGM: [R, G, M] float32, sampled keys' logits in units of log2, -inf where the sample has no key.
    normalisers_RG: [R, G] float32, log2 of the sum of all searched keys' weights, estimated. cuts_RX: [R, 3] int32, a
    cut (`border`).

    What the pass over keys leaves for the one over values, else empty: weights_RSX: [R, S, W * V * 2 C / 4] int32,
    bytes of the weights of keys of tiles whose values are read, W keys that a program goes over, V value groups, C
    query heads of a product (`warp_pass`); tiles_RSX: [R, S, W / T * 2] int32, first keys of these tiles, T keys
    each, and behind each the bits of what 1 is among its weights; weighed_RS: [R, S] int32, how many there are;
    left_RSG: [R, S, (1 + V) * G] float32, sums of their weights, and of these times offsets.
    """

    sampled_RGM: Tensor
    normalisers_RG: Tensor
    cuts_RX: Tensor
    weights_RSX: Tensor
    tiles_RSX: Tensor
    weighed_RS: Tensor
    left_RSG: Tensor

    @classmethod
    def make(
        cls, sizes: CoarseSizes, size: int, device: torch.device | str, *, attends: bool = True
    ) -> CoarseWork:
        """Buffers for `size` sequences. attends: to keys that are not listed, too, for which weights are left."""
        rows = size * sizes.kv_heads
        left = (rows, sizes.splits(rows)) if attends else (0, 0)
        width = sizes.width(rows)
        return cls(
            torch.empty(rows, sizes.group, sizes.shape.sampled, device=device),
            torch.empty(rows, sizes.group, device=device),
            torch.empty(rows, 3, dtype=torch.int32, device=device),
            torch.empty(
                *left, width * sizes.value_groups * sizes.bytes // 4, dtype=torch.int32, device=device
            ),
            torch.empty(*left, width // sizes.tile * 2, dtype=torch.int32, device=device),
            torch.empty(*left, dtype=torch.int32, device=device),
            torch.empty(*left, (1 + sizes.value_groups) * sizes.group, device=device),
        )
