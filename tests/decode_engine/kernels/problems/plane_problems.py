"""Problems over clusters and lists whose contexts have their rows in two planes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.kernels.coarse.reference import CoarseSequence
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import value_groups
from index_store.indexes.coarse_rows.two_planes import TwoPlanes, find_low_plane
from tests.decode_engine.kernels.problems.cluster_problems import Problem


def with_planes(problem: Problem) -> tuple[Problem, list[TwoPlanes | None]]:
    """The same with planes in the records, whose sequences hold the decoded rows; and the planes.

    Behind every head's low rows lie some of 255, which nothing may read.
    """
    rows_BF, sequences, made = problem.records_BF.clone(), [], []
    for b, sequence in enumerate(problem.sequences):
        if sequence is None:
            sequences.append(None)
            made.append(None)
            continue
        kv_HN2D = sequence.kv_HN2D.contiguous()
        coarse = code_rows(kv_HN2D, 0, 4, 4, value_groups(kv_HN2D.shape[3], 128))
        low = find_low_plane(kv_HN2D, coarse)
        room = torch.full((low.shape[0], 3, *low.shape[2:]), 255, dtype=torch.uint8, device=low.device)
        planes = TwoPlanes(coarse, torch.cat([low, room], dim=1)[:, : low.shape[1]], kv_HN2D.dtype)
        decoded = planes.decode(0, low.shape[1]).to(kv_HN2D.dtype)
        sequences.append(replace(sequence, kv_HN2D=decoded))
        made.append(planes)
        copies = CoarseSequence(coarse, sequence.first, sequence.end, sequence.keep)
        for field, value in copies.fields().items():
            rows_BF[b, field] = value
        rows_BF[b, records.KV] = planes.low_HN2C.data_ptr()
        rows_BF[b, records.KV_HEAD] = planes.low_HN2C.stride(0)
    return replace(problem, sequences=tuple(sequences), records_BF=rows_BF), made


def low_slots(
    problem: Problem, planes: Sequence[TwoPlanes | None], lists: KeyLists, joined_RN: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Every other entry of a row in a slot: records and locations, and the slots; joined_RN gets all entries.

    The low codes of what is in a slot are wrong where the context has them.
    """
    rows_BF = problem.records_BF.clone()
    locations_RN = torch.full_like(joined_RN, -1)
    held: list[Tensor] = []
    for b, (sequence, own) in enumerate(zip(problem.sequences, planes, strict=True)):
        if sequence is None or own is None:
            continue
        heads, keys = own.low_HN2C.shape[:2]
        right = own.low_HN2C.clone()
        slots = torch.full((heads, keys + 5, *right.shape[2:]), 255, dtype=torch.uint8, device=right.device)
        for head in range(heads):
            row = b * heads + head
            ids = torch.cat([_entries(lists, row), sequence.always().to(right.device)])
            joined_RN[row, : len(ids)] = ids.to(torch.int32)
            for entry in range(0, len(ids), 2):
                id_ = int(ids[entry])
                if id_ >= 0:
                    slots[head, entry + 5] = right[head, id_]
                    own.low_HN2C[head, id_] = 255
                    locations_RN[row, entry] = entry + 5
        held.append(slots)
        rows_BF[b, records.SLOTS] = slots.data_ptr()
        rows_BF[b, records.SLOT_HEAD] = slots.stride(0)
    return rows_BF, locations_RN, held


def _entries(lists: KeyLists, row: int) -> Tensor:
    """A row's list, entries of -1 among them."""
    counts = lists.counts_RP[row].tolist()
    return torch.cat([ids[:count] for ids, count in zip(lists.ids_RPW[row], counts, strict=True)]).long()
