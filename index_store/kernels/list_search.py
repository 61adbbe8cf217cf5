"""Host kernels of Top-L lists: search by scattering scores, streaming insert (CSAttention sections 3.3 (2)-(5)).

Shape legend: H KV heads, R query rows, J lists read per query row, S lists (subspaces x centroids), L list capacity,
E capacity of the insert buffers, M ranked columns, T new keys.

A list is the union of the first `kept` entries of a stored list, sorted by falling score, and a session-private buffer
of `inserted` entries, sorted likewise. Inserting a key evicts the lowest entry of the union, so kept + inserted = L.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from index_store.kernels.launch import launch


@dataclass(frozen=True, slots=True)
class Lists:
    """ids int32 and values int16 [H, S, L], shared; kept and inserted [H, S] int32; insert buffers [H, S, E]."""

    ids_HSL: Tensor
    values_HSL: Tensor
    kept_HS: Tensor
    inserted_ids_HSE: Tensor
    inserted_values_HSE: Tensor
    inserted_HS: Tensor


def score_lists(
    lists: Lists, rows_HRJ: Tensor, weights_HRJ: Tensor, first: int, floor_missing: bool, out_HRM: Tensor
) -> None:
    """out[h, r, i] = sum_j weights[h, r, j] * value of key `first + i` in list rows[h, r, j].

    A key missing from a list counts as the list's lowest value with `floor_missing`, else as 0, and a key missing
    from all J lists then gets -inf. A weight of exactly 0 skips the list.
    """
    launch(
        _score_lists,
        lists.ids_HSL.numpy(),
        lists.values_HSL.numpy(),
        lists.kept_HS.numpy(),
        lists.inserted_ids_HSE.numpy(),
        lists.inserted_values_HSE.numpy(),
        lists.inserted_HS.numpy(),
        rows_HRJ.numpy(),
        weights_HRJ.numpy(),
        first,
        floor_missing,
        out_HRM.numpy(),
    )


def score_lists_reference(
    lists: Lists, rows_HRJ: Tensor, weights_HRJ: Tensor, first: int, floor_missing: bool, out_HRM: Tensor
) -> None:
    """The same with one dense row per list."""
    heads, queries, picks = rows_HRJ.shape
    columns = out_HRM.shape[-1]
    for head, query in np.ndindex(heads, queries):
        total = torch.zeros(columns)
        seen = torch.zeros(columns, dtype=torch.bool)
        for pick in range(picks):
            weight = float(weights_HRJ[head, query, pick])
            if weight == 0.0:
                continue
            ids, values = _union(lists, head, int(rows_HRJ[head, query, pick]))
            floor = float(values.min()) if floor_missing and len(values) else 0.0
            inside = (ids >= first) & (ids < first + columns)
            row = torch.full((columns,), floor)
            row[ids[inside] - first] = values[inside]
            seen[ids[inside] - first] = True
            total += weight * row
        out_HRM[head, query] = total if floor_missing else torch.where(seen, total, -torch.inf)


def insert_keys(lists: Lists, scores_HTS: Tensor, first_id: int) -> None:
    """Try-inserts T keys with ids first_id.. and int16 scores [H, T, S] into every list, one after another.

    Updates kept, inserted and the insert buffers in place; the buffers must have room for T more entries.
    """
    launch(
        _insert_keys,
        lists.values_HSL.numpy(),
        lists.kept_HS.numpy(),
        lists.inserted_ids_HSE.numpy(),
        lists.inserted_values_HSE.numpy(),
        lists.inserted_HS.numpy(),
        scores_HTS.numpy(),
        first_id,
    )


def insert_keys_reference(lists: Lists, scores_HTS: Tensor, first_id: int) -> None:
    """The same by sorting: keep the L best of stored list and insert buffer after every key."""
    heads, count, rows = scores_HTS.shape
    capacity = lists.ids_HSL.shape[-1]
    for head, row, position in np.ndindex(heads, rows, count):
        kept, inserted = int(lists.kept_HS[head, row]), int(lists.inserted_HS[head, row])
        base = lists.values_HSL[head, row, :kept].tolist()
        extra = list(
            zip(
                lists.inserted_values_HSE[head, row, :inserted].tolist(),
                lists.inserted_ids_HSE[head, row, :inserted].tolist(),
                strict=True,
            )
        )
        score = int(scores_HTS[head, position, row])
        lowest = min(base + [value for value, _ in extra])
        if score <= lowest:
            continue
        extra.append((score, first_id + position))
        extra.sort(key=lambda entry: -entry[0])
        if kept + len(extra) > capacity:
            if extra[-1][0] == lowest and extra[-1][1] != first_id + position:
                extra.pop()
            else:
                kept -= 1
        lists.kept_HS[head, row] = kept
        lists.inserted_HS[head, row] = len(extra)
        lists.inserted_values_HSE[head, row, : len(extra)] = torch.tensor(
            [value for value, _ in extra], dtype=torch.int16
        )
        lists.inserted_ids_HSE[head, row, : len(extra)] = torch.tensor(
            [i for _, i in extra], dtype=torch.int32
        )


def _union(lists: Lists, head: int, row: int) -> tuple[Tensor, Tensor]:
    kept, inserted = int(lists.kept_HS[head, row]), int(lists.inserted_HS[head, row])
    ids = torch.cat([lists.ids_HSL[head, row, :kept], lists.inserted_ids_HSE[head, row, :inserted]])
    values = torch.cat([lists.values_HSL[head, row, :kept], lists.inserted_values_HSE[head, row, :inserted]])
    return ids.long(), values.float()


@njit(cache=True, nogil=True, parallel=True)
def _score_lists(
    ids: NDArray[np.int32],
    values: NDArray[np.int16],
    kept: NDArray[np.int32],
    inserted_ids: NDArray[np.int32],
    inserted_values: NDArray[np.int16],
    inserted: NDArray[np.int32],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    first: int,
    floor_missing: bool,
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    heads, queries, picks = rows.shape
    columns = out.shape[2]
    for task in prange(heads * queries):
        head = task // queries
        query = task % queries
        acc = out[head, query]
        acc[:] = np.float32(0) if floor_missing else np.float32(-np.inf)
        base = np.float32(0)
        for pick in range(picks):
            weight = weights[head, query, pick]
            if weight == np.float32(0):
                continue
            row = rows[head, query, pick]
            count = kept[head, row]
            extra = inserted[head, row]
            floor = np.float32(0)
            if floor_missing and count + extra > 0:
                lowest = np.int16(32767)
                if count > 0:
                    lowest = values[head, row, count - 1]
                if extra > 0:
                    lowest = min(lowest, inserted_values[head, row, extra - 1])
                floor = np.float32(lowest)
                base += weight * floor
            for e in range(count):
                i = int(ids[head, row, e]) - first
                if i >= 0 and i < columns:
                    add = weight * (np.float32(values[head, row, e]) - floor)
                    acc[i] = add if acc[i] == -np.inf else acc[i] + add
            for e in range(extra):
                i = int(inserted_ids[head, row, e]) - first
                if i >= 0 and i < columns:
                    add = weight * (np.float32(inserted_values[head, row, e]) - floor)
                    acc[i] = add if acc[i] == -np.inf else acc[i] + add
        if base != np.float32(0):
            for i in range(columns):
                acc[i] += base


@njit(cache=True, nogil=True, parallel=True)
def _insert_keys(
    values: NDArray[np.int16],
    kept: NDArray[np.int32],
    inserted_ids: NDArray[np.int32],
    inserted_values: NDArray[np.int16],
    inserted: NDArray[np.int32],
    scores: NDArray[np.int16],
    first_id: int,
) -> None:  # pragma: no cover - compiled
    heads, count, rows = scores.shape
    capacity = values.shape[2]
    for task in prange(heads * rows):
        head = task // rows
        row = task % rows
        for position in range(count):
            score = scores[head, position, row]
            base = kept[head, row]
            extra = inserted[head, row]
            lowest_base = np.int32(values[head, row, base - 1]) if base > 0 else np.int32(32768)
            lowest_extra = np.int32(inserted_values[head, row, extra - 1]) if extra > 0 else np.int32(32768)
            if score <= min(lowest_base, lowest_extra):
                continue
            if base + extra >= capacity:
                if lowest_extra <= lowest_base:
                    extra -= 1
                else:
                    base -= 1
            slot = extra
            while slot > 0 and inserted_values[head, row, slot - 1] < score:
                inserted_values[head, row, slot] = inserted_values[head, row, slot - 1]
                inserted_ids[head, row, slot] = inserted_ids[head, row, slot - 1]
                slot -= 1
            inserted_values[head, row, slot] = score
            inserted_ids[head, row, slot] = np.int32(first_id + position)
            kept[head, row] = base
            inserted[head, row] = extra + 1
