"""Copies rows between addresses: from host memory that a kernel reads in place, into device memory.

PCIe is busy with a few programs of one warp each, and the others of a device's places stay free for whatever runs
beside. What limits them is how many bytes are under way: every program has `CopyShape.tile` rows of its own in flight,
16 bytes per thread. Rows should be listed in the order in which they lie.

Shape legend: C copies that there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.launches import chained, wait_for_launch
from index_store.errors import InvalidArgumentError

_ALIGNMENT = 16
WORD = 4
"""Bytes that kernels count rows in."""


@dataclass(frozen=True, slots=True)
class CopyShape:
    """Of a launch: programs, rows that each has in flight, warps per program; tile and warps are powers of two."""

    programs: int = 33
    tile: int = 16
    warps: int = 1


@dataclass(frozen=True, slots=True)
class RowCopies:
    """Copies to make, listed on the device.

    sources_C, targets_C: [C] int64 addresses of rows, multiples of 16; where the target is 0 nothing is copied.
    count_1: [1] int32, entries that count.

    Raises InvalidArgumentError for other types and shapes.
    """

    sources_C: Tensor
    targets_C: Tensor
    count_1: Tensor

    def __post_init__(self) -> None:
        for name, tensor, dtype in (
            ("sources", self.sources_C, torch.int64),
            ("targets", self.targets_C, torch.int64),
            ("count", self.count_1, torch.int32),
        ):
            if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
                raise InvalidArgumentError(
                    f"{name} are {tensor.dtype} of shape {tuple(tensor.shape)}, expected {dtype} in one "
                    "contiguous dimension"
                )
        if self.sources_C.shape != self.targets_C.shape or len(self.count_1) != 1:
            raise InvalidArgumentError(
                f"{len(self.sources_C)} sources, {len(self.targets_C)} targets and {len(self.count_1)} counts, "
                "expected as many sources as targets and one count"
            )


def copy_rows(copies: RowCopies, row_bytes: int, shape: CopyShape | None = None) -> None:
    """Makes the copies. The sources may be page-locked host memory, the targets are on the device.

    row_bytes: of every row, a power of two of at least 16.
    Raises InvalidArgumentError for another row size or shape of the launch.
    """
    shape = shape or CopyShape()
    check_shape(row_bytes, shape)
    copy_kernel[(shape.programs,)](
        copies.sources_C,
        copies.targets_C,
        copies.count_1,
        len(copies.sources_C),
        WORDS=row_bytes // WORD,
        TILE=shape.tile,
        num_warps=shape.warps,
        **chained(copies.sources_C.device),
    )


def check_shape(row_bytes: int, shape: CopyShape) -> None:
    """Raises InvalidArgumentError for rows or a launch that kernels cannot copy."""
    sizes = (row_bytes, shape.tile, shape.warps)
    if any(size < 1 or size & (size - 1) for size in sizes) or row_bytes < _ALIGNMENT or shape.programs < 1:
        raise InvalidArgumentError(
            f"rows of {row_bytes} bytes copied by {shape}, expected powers of two, rows of at least {_ALIGNMENT} "
            "bytes and a positive number of programs"
        )


@triton.jit
def row_words(addresses: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """Pointers to the words of rows, [rows, WORDS]."""
    # Without the hint words would be loaded one by one instead of by 16 bytes.
    rows = tl.multiple_of(addresses.to(tl.pointer_type(tl.int32)), 16)
    return rows[:, None] + tl.arange(0, WORDS)[None, :]


@triton.jit(do_not_specialize=["room"])
def copy_kernel(
    sources_ptr: tl.tensor,
    targets_ptr: tl.tensor,
    count_ptr: tl.tensor,
    room: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Every program copies TILE rows in every round."""
    wait_for_launch(CHAINED)
    count = tl.minimum(tl.load(count_ptr), room)
    step = tl.num_programs(0) * TILE
    first = tl.program_id(0) * TILE
    entry = first + tl.arange(0, TILE)
    sources = tl.load(sources_ptr + entry, mask=entry < count, other=0)
    targets = tl.load(targets_ptr + entry, mask=entry < count, other=0)
    for _ in range(first, count, step):
        # The next addresses arrive while these rows are under way.
        entry += step
        next_sources = tl.load(sources_ptr + entry, mask=entry < count, other=0)
        next_targets = tl.load(targets_ptr + entry, mask=entry < count, other=0)
        copied = (targets != 0)[:, None]
        words = tl.load(row_words(sources, WORDS), mask=copied, other=0)
        tl.store(row_words(targets, WORDS), words, mask=copied)
        sources, targets = next_sources, next_targets
