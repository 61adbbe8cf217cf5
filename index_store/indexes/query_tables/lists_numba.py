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
from numpy.typing import NDArray
from torch import Tensor

from index_store.compiled.launch import launch, njit, on_host, spread

_BELOW_ALL = -(2**15) - 1
_ENTRIES = 2**23  # of lists that the reference gathers at a time


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
    if not on_host(rows_HRJ):
        score_lists_reference(lists, rows_HRJ, weights_HRJ, first, floor_missing, out_HRM)
        return
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
    """The same by gathering the lists of some queries at a time, on any device."""
    heads, queries, picks = rows_HRJ.shape
    entries = lists.ids_HSL.shape[2] + lists.inserted_ids_HSE.shape[2]
    step = max(1, _ENTRIES // max(1, heads * picks * entries))
    for begin in range(0, queries, step):
        part = slice(begin, begin + step)
        scored = _score_some(
            lists, rows_HRJ[:, part], weights_HRJ[:, part], first, out_HRM.shape[2], floor_missing
        )
        out_HRM[:, part] = scored


def _score_some(
    lists: Lists, rows_HRJ: Tensor, weights_HRJ: Tensor, first: int, columns: int, floor_missing: bool
) -> Tensor:
    ids, values, held = _union(lists, rows_HRJ.long())
    weights_HRJ1 = weights_HRJ[..., None]
    held &= weights_HRJ1 != 0.0
    floor_HRJ1 = torch.zeros_like(weights_HRJ1)
    if floor_missing:
        lowest = torch.where(held, values, torch.inf).amin(-1, keepdim=True)
        floor_HRJ1 = lowest.masked_fill_(torch.isinf(lowest), 0.0)
    found = held & (ids >= first) & (ids < first + columns)
    # The last column takes what lies outside.
    places = torch.where(found, ids - first, columns)
    added = torch.where(found, weights_HRJ1 * (values - floor_HRJ1), 0.0)
    total = torch.zeros(*rows_HRJ.shape[:2], columns + 1, device=places.device)
    # A list has every key once, so that the order of additions is the same every time.
    for place, of_list in zip(places.unbind(2), added.unbind(2), strict=True):
        total.scatter_add_(2, place, of_list)
    total += (weights_HRJ1 * floor_HRJ1).sum(2)
    if not floor_missing:
        seen = torch.zeros(total.shape, dtype=torch.bool, device=total.device)
        total.masked_fill_(~seen.scatter_(2, places.flatten(2), True), -torch.inf)
    return total[..., :columns]


def insert_keys(lists: Lists, scores_HTS: Tensor, first_id: int) -> None:
    """Try-inserts T keys with ids first_id.. and int16 scores [H, T, S] into every list, one after another.

    Updates kept, inserted and the insert buffers in place; the buffers must have room for T more entries.
    """
    if not on_host(scores_HTS):
        insert_keys_reference(lists, scores_HTS, first_id)
        return
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
    """The same for all keys at once, on any device.

    Of stored entries, inserted ones and new keys, in this order, the L with the largest scores stay, of equal ones
    those that come first: inserting one after another ends there too.
    """
    new = scores_HTS.shape[1]
    device = scores_HTS.device
    slots = lists.inserted_ids_HSE.shape[2]
    scores_HST = scores_HTS.transpose(1, 2).int()
    ids_T = torch.arange(first_id, first_id + new, dtype=torch.int32, device=device)
    held = torch.arange(slots, device=device) < lists.inserted_HS[..., None]
    values = torch.where(held, lists.inserted_values_HSE.int(), _BELOW_ALL)
    order = torch.cat([values, scores_HST], dim=2).sort(dim=2, descending=True, stable=True)
    ids = torch.cat([lists.inserted_ids_HSE, ids_T.expand(scores_HST.shape)], dim=2).gather(2, order.indices)
    # Only the last T stored entries can go: one does when as many entries as there is room for come before it.
    places = lists.kept_HS[..., None] - 1 - torch.arange(new, device=device)
    stored = lists.values_HSL.gather(2, places.clamp(min=0).long()).int()
    larger = torch.searchsorted(-order.values, -stored)
    evicted = (places >= 0) & (places + larger >= (lists.kept_HS + lists.inserted_HS)[..., None])
    gone = evicted.sum(2, dtype=torch.int32)
    lists.kept_HS.sub_(gone)
    lists.inserted_HS.add_(gone)
    lists.inserted_values_HSE.copy_(order.values[..., :slots])
    lists.inserted_ids_HSE.copy_(ids[..., :slots])


def _union(lists: Lists, rows_HRJ: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, values and which entries count, [H, R, J, L + E] each, of lists by number."""
    heads = torch.arange(len(rows_HRJ), device=rows_HRJ.device)[:, None, None]
    ids, values, held = [], [], []
    for of_ids, of_values, counts_HS in (
        (lists.ids_HSL, lists.values_HSL, lists.kept_HS),
        (lists.inserted_ids_HSE, lists.inserted_values_HSE, lists.inserted_HS),
    ):
        ids.append(of_ids[heads, rows_HRJ])
        values.append(of_values[heads, rows_HRJ])
        entry = torch.arange(of_ids.shape[2], device=rows_HRJ.device)
        held.append(entry < counts_HS[heads, rows_HRJ][..., None])
    return torch.cat(ids, 3).long(), torch.cat(values, 3).float(), torch.cat(held, 3)


@njit()
def _score_query(
    task: int,
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
    queries: int,
    picks: int,
    columns: int,
) -> None:  # pragma: no cover - compiled
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


@njit("i4x3 i2x3 i4x2 i4x3 i2x3 i4x2 i4x3 f4x3 i8 b1 f4x3")
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
    spread(
        _score_query,
        heads * queries,
        (
            ids,
            values,
            kept,
            inserted_ids,
            inserted_values,
            inserted,
            rows,
            weights,
            first,
            floor_missing,
            out,
            queries,
            picks,
            columns,
        ),
    )


@njit()
def _insert_into_row(
    task: int,
    values: NDArray[np.int16],
    kept: NDArray[np.int32],
    inserted_ids: NDArray[np.int32],
    inserted_values: NDArray[np.int16],
    inserted: NDArray[np.int32],
    scores: NDArray[np.int16],
    first_id: int,
    rows: int,
    count: int,
    capacity: int,
) -> None:  # pragma: no cover - compiled
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


@njit("i2x3 i4x2 i4x3 i2x3 i4x2 i2x3 i8")
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
    spread(
        _insert_into_row,
        heads * rows,
        (values, kept, inserted_ids, inserted_values, inserted, scores, first_id, rows, count, capacity),
    )
