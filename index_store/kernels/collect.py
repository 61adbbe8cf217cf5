"""From ranked items to key ids: walks every head's items in order until its limit, unites the heads, sorts the ids.

Shape legend: H KV heads, T query positions, G group heads, M items, K collected keys, X keys listed by items.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray
from torch import Tensor

from index_store.kernels.launch import launch
from index_store.ranking import Items


def collect(order_HTGM: Tensor, items_HTG: Tensor, limits_HTG: Tensor, items: Items) -> tuple[Tensor, Tensor]:
    """Ids [H, T, K] int32, ascending and unique, and counts [H, T] int32, of every row's collected keys.

    order_HTGM: [H, T, G, M] int32 item numbers, best first; items_HTG: [H, T, G] int32, how many of them count.
    limits_HTG: [H, T, G] int32, keys that a head takes at most; the item that reaches the limit is cut. Keys outside
    items.first_key..end_key-1 are passed over and do not count. Entries of ids beyond a row's count are 0.
    """
    heads, positions = order_HTGM.shape[:2]
    rows = heads * positions
    span = max(0, items.end_key - items.first_key)
    width = int(limits_HTG.clamp(max=span).sum(2).clamp(max=span).max()) if rows else 0
    ids = torch.zeros(heads, positions, width, dtype=torch.int32)
    counts = torch.zeros(heads, positions, dtype=torch.int32)
    if rows and width:
        launch(
            _collect_rows,
            order_HTGM.to(torch.int32).flatten(0, 1).contiguous().numpy(),
            items_HTG.to(torch.int32).flatten(0, 1).contiguous().numpy(),
            limits_HTG.to(torch.int32).flatten(0, 1).contiguous().numpy(),
            *_lists(items, heads),
            positions,
            items.first_key,
            items.end_key,
            ids.flatten(0, 1).numpy(),
            counts.flatten().numpy(),
        )
    kept = int(counts.max()) if rows else 0
    return ids[..., :kept], counts


def collect_reference(
    order_HTGM: Tensor, items_HTG: Tensor, limits_HTG: Tensor, items: Items
) -> tuple[Tensor, Tensor]:
    """The same with sets."""
    heads, positions, group, _ = order_HTGM.shape
    found: list[list[int]] = []
    for head in range(heads):
        for position in range(positions):
            row: set[int] = set()
            for g in range(group):
                taken: list[int] = []
                for item in order_HTGM[head, position, g, : int(items_HTG[head, position, g])].tolist():
                    inside = [
                        key for key in _keys_of(items, head, item) if items.first_key <= key < items.end_key
                    ]
                    taken += inside
                row.update(taken[: int(limits_HTG[head, position, g])])
            found.append(sorted(row))
    counts = torch.tensor([len(row) for row in found], dtype=torch.int32).view(heads, positions)
    ids = torch.zeros(heads * positions, int(counts.max()), dtype=torch.int32)
    for row_ids, keys in zip(ids, found, strict=True):
        row_ids[: len(keys)] = torch.tensor(keys, dtype=torch.int32)
    return ids.view(heads, positions, -1), counts


def _keys_of(items: Items, head: int, item: int) -> list[int]:
    if not items.groups:
        return [items.first_key + item]
    for group in items.groups:
        columns = group.offsets_HM.shape[1] - 1
        if item < columns:
            begin, end = group.offsets_HM[head, item : item + 2].tolist()
            keys: list[int] = group.keys_HX[head, begin:end].tolist()
            return keys
        item -= columns
    raise IndexError(item)


def _lists(items: Items, heads: int) -> list[NDArray[np.int32]]:
    """Offsets and keys of the shared and the private group; empty arrays where there is none."""
    if len(items.groups) > 2:
        raise ValueError(f"items have {len(items.groups)} groups of members, expected at most 2")
    arrays: list[NDArray[np.int32]] = []
    for number in range(2):
        if number < len(items.groups):
            group = items.groups[number]
            arrays += [group.offsets_HM.numpy(), group.keys_HX.numpy()]
        else:
            arrays += [np.zeros((heads, 1), np.int32), np.zeros((heads, 0), np.int32)]
    return arrays


@njit(cache=True, nogil=True)
def _mark(
    keys: NDArray[np.int32], first: int, end: int, left: int, marked: NDArray[np.uint8]
) -> int:  # pragma: no cover - compiled
    """Marks keys inside the range until `left` is used up; returns what is left."""
    for x in range(keys.shape[0]):
        if left == 0:
            break
        key = keys[x]
        if first <= key < end:
            marked[key - first] = 1
            left -= 1
    return left


@njit(cache=True, nogil=True, parallel=True)
def _collect_rows(
    order: NDArray[np.int32],
    item_counts: NDArray[np.int32],
    limits: NDArray[np.int32],
    shared_offsets: NDArray[np.int32],
    shared_keys: NDArray[np.int32],
    private_offsets: NDArray[np.int32],
    private_keys: NDArray[np.int32],
    positions: int,
    first: int,
    end: int,
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    shared = shared_offsets.shape[1] - 1
    single = shared + private_offsets.shape[1] - 1 == 0
    for row in prange(order.shape[0]):
        head = row // positions
        marked = np.zeros(end - first, np.uint8)
        for g in range(order.shape[1]):
            left = limits[row, g]
            for rank in range(item_counts[row, g]):
                if left == 0:
                    break
                item = order[row, g, rank]
                if single:
                    if item < end - first:
                        marked[item] = 1
                        left -= 1
                elif item < shared:
                    begin, stop = shared_offsets[head, item], shared_offsets[head, item + 1]
                    left = _mark(shared_keys[head, begin:stop], first, end, left, marked)
                else:
                    begin = private_offsets[head, item - shared]
                    stop = private_offsets[head, item - shared + 1]
                    left = _mark(private_keys[head, begin:stop], first, end, left, marked)
        found = 0
        for x in range(end - first):
            if marked[x]:
                ids[row, found] = first + x
                found += 1
        counts[row] = found
