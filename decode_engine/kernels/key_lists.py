"""Lists of selected keys: what searches on a device leave, and attention reads.

Shape legend: R rows (sequence x KV head), P segments of a row, W keys that a segment has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class KeyLists:
    """Selected keys of every row, in segments: one for each program that selected.

    ids_RPW: [R, P, W] int32 key ids of the context, only searched ones; a key is in at most one segment of its row.
    Searches list them ascending inside a segment; entries of -1 do not count. counts_RP: [R, P] int32, entries of each
    segment that were written; the others may hold anything.

    Raises InvalidArgumentError for other types and shapes.
    """

    ids_RPW: Tensor
    counts_RP: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("ids", self.ids_RPW), ("counts", self.counts_RP)):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise InvalidArgumentError(
                    f"{name} are {tensor.dtype}, expected int32 in one contiguous piece"
                )
        if self.ids_RPW.dim() != 3 or self.counts_RP.shape != self.ids_RPW.shape[:2]:
            raise InvalidArgumentError(
                f"ids have shape {tuple(self.ids_RPW.shape)} and counts {tuple(self.counts_RP.shape)}, expected "
                "[rows, segments, width] and [rows, segments]"
            )

    @staticmethod
    def allocate(rows: int, segments: int, width: int, device: torch.device | str) -> KeyLists:
        """Uninitialised lists; whoever fills them writes every count."""
        return KeyLists(
            torch.empty(rows, segments, width, dtype=torch.int32, device=device),
            torch.empty(rows, segments, dtype=torch.int32, device=device),
        )

    def of_row(self, row: int) -> Tensor:
        """The row's key ids, [count] int64, for eager references and tests; waits for the device."""
        counts = self.counts_RP[row].tolist()
        ids = torch.cat([ids[:count] for ids, count in zip(self.ids_RPW[row], counts, strict=True)]).long()
        return ids[ids >= 0]
