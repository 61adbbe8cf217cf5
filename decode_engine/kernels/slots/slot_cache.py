"""A bounded cache on the device of rows whose keys and values lie in host memory.

A row is the key and the value of one token for one KV head. The cache of a context, layer and KV head is
set-associative: a key may be in one of the `WAYS` slots of either of the two sets that its id hashes to. (With one set
a key, steps that want 82 % as many rows as there are slots found none for 3 % of them; simulated with two, 0.02 %.) A
slot has a tag, the id of its key plus 1 (0 when empty), and a stamp, the number of the last step that used it.
Everything lies in device memory and is found through records; `slot_fetch` reads and changes it.

Shape legend: L layers with a cache, H KV heads, S slots of a KV head, d head dim, C tallies, M words of marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import MARKED, SET

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
