"""Lists of selected keys: what searches on a device leave, and attention reads.

Shape legend: R rows (sequence x KV head), P segments of a row, W keys that a segment has room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_queries(q_RGD: Tensor, sequences: int) -> None:
    """Raises InvalidArgumentError unless the queries [R, G, d] are supported, contiguous, and R a multiple of B."""
    rows, group, head_dim = q_RGD.shape
    if not sequences or rows % sequences or not 1 <= group <= MAX_GROUP or head_dim not in HEAD_DIMS:
        raise InvalidArgumentError(
            f"queries have shape {tuple(q_RGD.shape)} for {sequences} sequences, expected [KV heads of all sequences, "
            f"1..{MAX_GROUP}, one of {HEAD_DIMS}]"
        )
    if q_RGD.dtype not in DTYPES or not q_RGD.is_contiguous():
        raise InvalidArgumentError(
            f"queries are {q_RGD.dtype}, expected one of {', '.join(map(str, DTYPES))} in one contiguous piece"
        )


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


@dataclass(frozen=True, slots=True)
class ClusterScores:
    """What a lookup finds about the clusters of every row, and what attention takes out of them.

    logits_RCG: [R, C, G] float32, q . mean key in units of log2; -inf for clusters without keys; anything beyond a
    context's clusters. spreads_RCG: [R, C, G] float32, 1 + v / 2 with the logits' variance v. taken_RC: [R, C]
    int32 and taken_logits_RCG: [R, C, G] float32, number and sum of logits of the keys that were taken out; 0 after a
    lookup. The last three are None where there are no variances.
    """

    logits_RCG: Tensor
    spreads_RCG: Tensor | None = None
    taken_RC: Tensor | None = None
    taken_logits_RCG: Tensor | None = None

    @staticmethod
    def allocate(
        rows: int, width: int, group: int, spread: bool, device: torch.device | str
    ) -> ClusterScores:
        """Uninitialised, for up to `width` clusters."""
        logits = torch.empty(rows, width, group, device=device)
        if not spread:
            return ClusterScores(logits)
        taken = torch.empty(rows, width, dtype=torch.int32, device=device)
        return ClusterScores(logits, torch.empty_like(logits), taken, torch.empty_like(logits))
