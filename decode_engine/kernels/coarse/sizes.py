"""What the kernels over coarse copies work on: sizes, launch shapes and buffers.

Shape legend: B sequences, H KV heads, R = B * H rows, G query heads per KV head, d head dim, N keys, M sampled keys, S
programs that go over a row's copy (splits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode_engine.kernels.families import (
    COARSE_IN_REGISTERS,
    GROUPS_IN_REGISTERS,
    LARGEST_GROUP,
    coarse_refusal,
)
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.scalars.row_sizes import BLOCK

RUN = 16
"""Consecutive keys of a sample, which share scales and offsets. Keys near each other are alike."""

MAX_SPLITS = 256
"""That merge at once what they found."""
CHUNKS, LANES = 16, 32
"""Parts of a sample whose largest weights stand for themselves alone; lanes of a warp, which has a part."""

_COLUMNS, _MOST_SUMS, _FEW_SUMS = 8, 2048, 1024
"""Query rows that products in registers take at once; query rows times channels of a program, at most, and where four
times as many programs as others have room on a processor."""
_REGISTERS, _FEW_REGISTERS = 168, 128
"""Of each thread, where programs for values and exact rows, and those for keys, are held to few."""
_WAVES = 3
"""Programs that attend to values, where there is room for their results, by those that processors hold."""
_LEAST_TILE, _ROW_BYTES = 16, 64
"""Keys of a tile in registers, at least, and bytes of its rows where it is not halved."""
_LEAST_CHANNELS = 16
"""That a product takes at least."""
_MOST_AHEAD = 32
"""Tiles of values whose places a program has at hand (`warp_values`)."""


@dataclass(frozen=True, slots=True)
class CoarseShape:
    """How the work is cut. Results depend on it by their rounding, and by the sample that the cut comes from.

    programs: that go over copies, of all rows together. registers: whether two or four times as many programs of one
    warp do, with all that they need in registers (`coarse.warp`), where sizes allow that; tile: keys that such a
    program holds, half of them where rows are long; ahead, values_ahead: tiles of keys, and of values, that are on
    their way to it meanwhile; early: blocks of keys besides that come near while the cut is looked for; exact_share: of
    so many programs that attend one has exact rows, the others have values. warps, stages: of other programs, and
    blocks of which loads are in flight. samplers, runs: programs per row that score a sample,
    and runs of keys of each; powers of two. At 1 % 82 of 8,192 keys decide how many are kept, which
    then strays by a ninth; at 0.25 % by a fifth. Raises InvalidArgumentError for tiles on their way that kernels have
    no place for.
    """

    programs: int = 528
    registers: bool = False
    tile: int = 32
    ahead: int = 3
    values_ahead: int = 3
    early: int = 1
    exact_share: int = 6
    warps: int = 4
    stages: int = 3
    samplers: int = 64
    runs: int = 8

    def __post_init__(self) -> None:
        if self.ahead < 1 or not 1 <= self.values_ahead <= _MOST_AHEAD:
            raise InvalidArgumentError(
                f"{self.ahead} tiles of keys ahead and {self.values_ahead} of values, expected 1 or more, and 1 to "
                f"{_MOST_AHEAD}"
            )

    @property
    def sampled(self) -> int:
        """M: keys of a sample."""
        return self.samplers * self.runs * RUN


def coarse_shape(device: torch.device, max_keys: int) -> CoarseShape:
    """A launch shape for contexts of up to max_keys on a device."""
    if device.type != "cuda":
        return CoarseShape(programs=8, samplers=2, runs=4)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # A sample of a short context would cost what all of its keys do.
    return CoarseShape(programs=4 * processors, registers=True, samplers=32 if max_keys > 2**15 else 16)


@dataclass(frozen=True, slots=True)
class CoarseSizes:
    """One layer shape: everything that a kernel is compiled for.

    key_bits, value_bits: 2, 3 or 4; of product codes 2 or 4. value_groups: of channels of a value with a scale and an
    offset each; 1 of product codes, which have neither. max_keys: the longest context of the batch. product: rows are
    product codes, which are multiplied as numbers, by kernels of several warps, whatever the shape says; otherwise
    scalar ones. Raises InvalidArgumentError for sizes outside of what kernels can do.
    """

    kv_heads: int
    group: int
    head_dim: int
    key_bits: int
    value_bits: int
    value_groups: int
    max_keys: int
    shape: CoarseShape = CoarseShape()
    product: bool = False

    def __post_init__(self) -> None:
        refusal = coarse_refusal(
            self.group,
            self.head_dim,
            (self.key_bits, self.value_bits),
            self.value_groups,
            self.max_keys,
            self.product,
        )
        if refusal is not None:
            raise InvalidArgumentError(refusal)

    @property
    def blocks(self) -> int:
        """Of the longest context."""
        return -(-self.max_keys // BLOCK)

    @property
    def in_registers(self) -> bool:
        """Whether the kernels of `coarse.warp` go over the copies and the sample."""
        taken = COARSE_IN_REGISTERS[self.head_dim]
        coded = {self.key_bits, self.value_bits} <= {*taken} and self.value_groups in GROUPS_IN_REGISTERS
        enough = self.shape.sampled % (LANES * CHUNKS) == 0
        if self.product or not self.shape.registers:
            return False
        return enough and coded and self.columns * self.head_dim <= _MOST_SUMS

    @property
    def warps(self) -> int:
        """Of a program, where it has several. Twice as many have room in registers for codewords of 256 channels."""
        return self.shape.warps * (2 if self.product and self.head_dim > 128 else 1)

    @property
    def stages(self) -> int:
        """Of a program of several warps. Blocks of looked up codewords leave the codebooks no room in a cache."""
        return 1 if self.product else self.shape.stages

    @property
    def columns(self) -> int:
        """Query rows of a product in registers, padded."""
        return -(-self.group // _COLUMNS) * _COLUMNS

    @property
    def bytes(self) -> int:
        """Of a key's weights, two for each query row of a product; half of them where two tiles share a result."""
        return self.columns if 2 * self.group <= self.columns else 2 * self.columns

    @property
    def tile(self) -> int:
        """Keys that a program in registers holds: eight programs' rings of tiles have room on a processor."""
        row_bytes = _held_bytes(self.head_dim, max(self.key_bits, self.value_bits))
        return self.shape.tile if row_bytes <= _ROW_BYTES else max(_LEAST_TILE, self.shape.tile // 2)

    @property
    def few_registers(self) -> bool:
        """Whether programs of one warp are held to few registers."""
        return self.in_registers and self.columns * self.head_dim <= _FEW_SUMS

    def splits(self, rows: int) -> int:
        """S."""
        times = 4 if self.few_registers else 2 if self.in_registers else 1
        return max(1, min(self.blocks, MAX_SPLITS, self.shape.programs * times // rows))

    def slots(self, rows: int) -> int:
        """That a launch fills which attends to everything."""
        return self.exact_programs(rows) + self.value_programs(rows)

    def value_programs(self, rows: int) -> int:
        """That attend to coded values, and the slots that they fill."""
        return self._values_room(rows) - self.exact_programs(rows) if self.in_registers else self.splits(rows)

    def exact_programs(self, rows: int) -> int:
        """That attend to exact rows beside those, in slots of their own."""
        return max(1, self._values_room(rows) // self.shape.exact_share)

    def _values_room(self, rows: int) -> int:
        """Programs of a row that attend, in registers.

        As many as processors hold at once, or several times as many: rows differ in how many of their values count.
        """
        at_once = self.shape.programs * (3 if self.few_registers else 2) // rows
        most = min(2 * self.blocks, MAX_SPLITS)
        return max(2, min(most, at_once * _WAVES if at_once * _WAVES <= most else at_once))

    def width(self, rows: int) -> int:
        """Keys that one of a row's programs goes over, at most."""
        return -(-self.blocks // self.splits(rows)) * BLOCK

    def key_constants(self) -> dict[str, Any]:
        """What kernels that score keys are compiled for."""
        return {
            "HEADS": self.kv_heads,
            "GROUP": self.group,
            "ROWS": LARGEST_GROUP,
            "DIM": self.head_dim,
            "KEY_BITS": self.key_bits,
            "KEY_BYTES": _word_bytes(self.head_dim, self.key_bits, _LEAST_CHANNELS),
            "PRODUCT": self.product,
        }

    def constants_alone(self) -> dict[str, Any]:
        """What all kernels of `coarse.warp` are compiled for."""
        return {
            "HEADS": self.kv_heads,
            "GROUP": self.group,
            "X": self.columns,
            "DIM": self.head_dim,
        }

    def launch_alone(self, *, keys: bool) -> dict[str, Any]:
        """How those are launched that go over the copies, of keys or of values."""
        most = _FEW_REGISTERS if keys else _REGISTERS
        return {"num_warps": 1, "maxnreg": most} if self.few_registers else {"num_warps": 1}

    def value_constants(self) -> dict[str, Any]:
        """What kernels that attend to values are compiled for besides."""
        return {
            "VALUE_BITS": self.value_bits,
            "VALUE_BYTES": _word_bytes(self.head_dim, self.value_bits, 8 * self.warps),
            "VALUE_GROUPS": self.value_groups,
        }


def _word_bytes(head_dim: int, bits: int, least: int) -> int:
    """Bytes of the words that kernels read codes in: two take fewer instructions, but leave planes fewer channels."""
    return 2 if _low_bytes(head_dim, bits) // 2 >= least else 1


def _low_bytes(head_dim: int, bits: int) -> int:
    """Of a row of codes, without third bits."""
    return head_dim * (4 if bits == 4 else 2) // 8


def _held_bytes(head_dim: int, bits: int) -> int:
    """Of a row of codes as programs in registers hold them: third bits are there twice."""
    return head_dim * (2 if bits == 2 else 4) // 8


@dataclass(frozen=True, slots=True)
class CoarseWork:
    """Buffers of one search, made once per batch size; a captured graph keeps using them.

    sampled_RGM: [R, G, M] float32, sampled keys' logits in units of log2, -inf where the sample has no key.
    normalisers_RG: [R, G] float32, log2 of the sum of all searched keys' weights, estimated. cuts_RX: [R, 3] int32, see
    `border.store_cut`. kept_RN: [R, N] uint8, 1 for keys that were listed; of blocks that hold searched keys; empty for
    kernels in registers.

    What those leave between their launches, else empty: weights_RSX: [R, S, W * V * 2 C / 4] int32, bytes of the
    weights of keys of tiles whose values are read, W keys that a program goes over, V value groups, C query heads of a
    product (`warp_findings`); tiles_RSX: [R, S, W / T * 2] int32, first keys of these tiles, T keys each, and behind
    each the bits of what 1 is among its weights; weighed_RS: [R, S] int32, how many there are; left_RSG:
    [R, S, (1 + V) * G] float32, sums of their weights, and of these times offsets.
    """

    sampled_RGM: Tensor
    normalisers_RG: Tensor
    cuts_RX: Tensor
    kept_RN: Tensor
    weights_RSX: Tensor
    tiles_RSX: Tensor
    weighed_RS: Tensor
    left_RSG: Tensor

    @classmethod
    def make(
        cls, sizes: CoarseSizes, size: int, device: torch.device | str, *, attends: bool = True
    ) -> CoarseWork:
        """Buffers for `size` sequences. attends: to keys that are not listed, too, for which weights are left."""
        rows, alone = size * sizes.kv_heads, sizes.in_registers
        left = (rows, sizes.splits(rows)) if alone and attends else (0, 0)
        width = sizes.width(rows)
        return cls(
            torch.empty(rows, sizes.group, sizes.shape.sampled, device=device),
            torch.empty(rows, sizes.group, device=device),
            torch.empty(rows, 3, dtype=torch.int32, device=device),
            torch.empty(rows, 0 if alone else sizes.blocks * BLOCK, dtype=torch.uint8, device=device),
            torch.empty(
                *left, width * sizes.value_groups * sizes.bytes // 4, dtype=torch.int32, device=device
            ),
            torch.empty(*left, width // sizes.tile * 2, dtype=torch.int32, device=device),
            torch.empty(*left, dtype=torch.int32, device=device),
            torch.empty(*left, (1 + sizes.value_groups) * sizes.group, device=device),
        )
