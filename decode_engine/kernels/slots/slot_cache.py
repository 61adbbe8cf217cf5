"""A bounded cache on the device of rows whose keys and values lie in host memory, and copies of such rows.

A row is the key and the value of one token for one KV head. The cache of a context, layer and KV head is
set-associative: a key may be in one of the `WAYS` slots of either of the two sets that its id hashes to. (With one set
a key, steps that want 82 % as many rows as there are slots found none for 3 % of them; simulated with two, 0.02 %.) A
slot has a tag, the id of its key plus 1 (0 when empty), and a stamp, the number of the last step that used it.
Everything lies in device memory and is found through records; `slot_fetch` reads and changes it.

A kernel reads host memory in place. PCIe is busy with a few programs of one warp each, and the others of a device's
places stay free for whatever runs beside. What limits them is how many bytes are under way: every program has
`CopyShape.tile` rows of its own in flight, 16 bytes per thread. Rows should be listed in the order in which they lie.

Shape legend: L layers with a cache, H KV heads, S slots of a KV head, d head dim, M words of marks, C tallies; R rows
of X numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.launches import chained, wait_for_launch
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import MARKED, SET

_ALIGNMENT = 16
WORD = 4
"""Bytes that kernels count rows in."""


@dataclass(frozen=True, slots=True)
class CopyShape:
    """Of a launch: programs, rows that each has in flight, warps per program; tile and warps are powers of two."""

    programs: int = 33
    tile: int = 16
    warps: int = 1


def copy_rows(sources_R: Tensor, out_RX: Tensor, shape: CopyShape | None = None) -> None:
    """Copies rows at int64 addresses, multiples of 16, perhaps of page-locked host memory, into those of a tensor.

    out_RX: contiguous, on the device; its rows have a power of two of bytes, at least 16.
    Raises InvalidArgumentError for another row size or shape of the launch.
    """
    shape, row_bytes = shape or CopyShape(), out_RX.shape[1] * out_RX.element_size()
    check_shape(row_bytes, shape)
    copy_kernel[(shape.programs,)](
        sources_R,
        out_RX.view(torch.int32),
        len(sources_R),
        WORDS=row_bytes // WORD,
        TILE=shape.tile,
        num_warps=shape.warps,
        **chained(sources_R.device),
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


@triton.jit(do_not_specialize=["count"])
def copy_kernel(
    sources_ptr: tl.tensor,
    out_ptr: tl.tensor,
    count: tl.tensor,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Every program copies TILE rows in every round."""
    wait_for_launch(CHAINED)
    step = tl.num_programs(0) * TILE
    first = tl.program_id(0) * TILE
    entry = first + tl.arange(0, TILE)
    sources = tl.load(sources_ptr + entry, mask=entry < count, other=0)
    for _ in range(first, count, step):
        # The next addresses arrive while these rows are under way.
        next_sources = tl.load(sources_ptr + entry + step, mask=entry + step < count, other=0)
        there = (entry < count)[:, None]
        words = tl.load(row_words(sources, WORDS), mask=there, other=0)
        into = out_ptr + entry.to(tl.int64)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        tl.store(into, words, mask=there)
        entry += step
        sources = next_sources


WAYS = SET
"""Slots of a set; their tags are 64 bytes."""
HASH, OTHER_HASH = 2654435769, 2246822519
"""A key's sets are the upper digits of its multiples, modulo 2^32."""
TALLY_COUNT = 8
DONE, CURRENT, WANTED, REUSED, BYPASSED, CROWDED = range(6)
"""Of the tallies of a KV head: steps that have ended and begun, rows over all steps, and the last step in which a key
found no slot."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Rows of the context that steps attended to.

    wanted: all of them. reused: those that were in a slot, or that another session of the step brings into one.
    fetched: copied into one. bypassed: read from host memory by the attention itself.
    """

    wanted: int
    reused: int
    bypassed: int

    @property
    def fetched(self) -> int:
        return self.wanted - self.reused - self.bypassed


@dataclass(frozen=True, slots=True)
class SlotCache:
    """The cache of a context, for all of its sessions. Made by `make`.

    layers: of the model, those that have one. rows_LHS2D: as the context has them in host memory, of rows in two planes
    the low one, uint8 [L, H, S, 2, d/2]. tags_LHS, stamps_LHS: int32.
    tallies_LHC: int64. missed_LHM: int32, a bit for every key of the context; zeros between steps.
    """

    layers: tuple[int, ...]
    rows_LHS2D: Tensor
    tags_LHS: Tensor
    stamps_LHS: Tensor
    tallies_LHC: Tensor
    missed_LHM: Tensor

    @staticmethod
    def make(
        layers: Sequence[int],
        kv_heads: int,
        keys: int,
        slots: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> SlotCache:
        """An empty cache for a context of so many keys, with at least that many slots per layer and KV head.

        width: numbers of a key as the context has it, half a row.
        Raises InvalidArgumentError for no layers or slots.
        """
        if not layers or slots < 1:
            raise InvalidArgumentError(
                f"a slot cache of {slots} slots for {len(layers)} layers, expected at least one of each"
            )
        shape = (len(layers), kv_heads, -(-slots // WAYS) * WAYS)
        return SlotCache(
            tuple(layers),
            torch.empty(*shape, 2, width, dtype=dtype, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(*shape[:2], TALLY_COUNT, dtype=torch.int64, device=device),
            torch.zeros(*shape[:2], -(-keys // MARKED), dtype=torch.int32, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        tensors = (self.rows_LHS2D, self.tags_LHS, self.stamps_LHS, self.tallies_LHC, self.missed_LHM)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def clear(self) -> None:
        """Empties it, and starts to count anew; in stream order."""
        self.tags_LHS.zero_()
        self.stamps_LHS.zero_()
        self.tallies_LHC.zero_()
        self.missed_LHM.zero_()

    def fields(self, layer: int) -> Mapping[int, int]:
        """What a layer's record says about the cache; nothing for layers without."""
        if layer not in self.layers:
            return {}
        at = self.layers.index(layer)
        rows_HS2D = self.rows_LHS2D[at]
        return {
            records.SLOTS: rows_HS2D.data_ptr(),
            records.SLOT_HEAD: rows_HS2D.stride(0) * rows_HS2D.element_size(),
            records.TAGS: self.tags_LHS[at].data_ptr(),
            records.STAMPS: self.stamps_LHS[at].data_ptr(),
            records.TALLIES: self.tallies_LHC[at].data_ptr(),
            records.MISSED: self.missed_LHM[at].data_ptr(),
            records.SETS: rows_HS2D.shape[1] // WAYS,
        }

    def counts(self) -> RowCounts:
        """Rows of all steps since it was made or emptied, over all layers and KV heads; waits for the device."""
        sums = self.tallies_LHC.sum((0, 1)).tolist()
        return RowCounts(wanted=sums[WANTED], reused=sums[REUSED], bypassed=sums[BYPASSED])
