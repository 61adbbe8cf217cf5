"""The members of items without the keys outside of the searched range, so that keys can be counted and numbered.

Shape legend: H KV heads, M items, X keys listed by items.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from index_store.kernels.launch import launch
from index_store.ranking import Items, Members


def searchable_members(items: Items, heads: int, columns: int) -> Members:
    """One list of members for all `columns` items: what they hold of [first_key, end_key), in the same order.

    Keys beyond the last offset of a head are undefined. Items that are single keys are lists of one key (views,
    nothing is copied per head).
    """
    span = max(0, items.end_key - items.first_key)
    if not items.groups:
        offsets = torch.arange(columns + 1, dtype=torch.int32).clamp_(max=span)
        keys = torch.arange(items.first_key, items.first_key + span, dtype=torch.int32)
        return Members(offsets.expand(heads, -1), keys.expand(heads, -1))
    listed = sum(group.keys_HX.shape[1] for group in items.groups)
    offsets_HM = torch.zeros(heads, columns + 1, dtype=torch.int32)
    keys_HX = torch.zeros(heads, listed, dtype=torch.int32)
    column = 0
    for group in items.groups:
        launch(
            _keep_inside,
            group.offsets_HM.numpy(),
            group.keys_HX.numpy(),
            items.first_key,
            items.end_key,
            column,
            offsets_HM.numpy(),
            keys_HX.numpy(),
        )
        column += group.offsets_HM.shape[1] - 1
    return Members(offsets_HM, keys_HX)


def searchable_members_reference(items: Items, heads: int, columns: int) -> Members:
    """The same with lists."""
    found: list[list[list[int]]] = []
    for head in range(heads):
        lists: list[list[int]] = []
        for group in items.groups:
            for begin, end in group.offsets_HM[head].unfold(0, 2, 1).tolist():
                lists.append(group.keys_HX[head, begin:end].tolist())
        if not items.groups:
            lists = [[items.first_key + column] for column in range(columns)]
        found.append([[key for key in keys if items.first_key <= key < items.end_key] for keys in lists])
    sizes = torch.tensor([[len(keys) for keys in lists] for lists in found], dtype=torch.int32)
    offsets_HM = torch.zeros(heads, columns + 1, dtype=torch.int32)
    offsets_HM[:, 1:] = sizes.view(heads, columns).cumsum(1)
    keys_HX = torch.zeros(heads, int(offsets_HM[:, -1].max()), dtype=torch.int32)
    for head, lists in enumerate(found):
        flat = [key for keys in lists for key in keys]
        keys_HX[head, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
    return Members(offsets_HM, keys_HX)


@njit(cache=True, nogil=True, parallel=True)
def _keep_inside(
    offsets: NDArray[np.int32],
    keys: NDArray[np.int32],
    first: int,
    end: int,
    column: int,
    kept_offsets: NDArray[np.int32],
    kept_keys: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    for head in prange(offsets.shape[0]):
        kept = kept_offsets[head, column]
        for item in range(offsets.shape[1] - 1):
            for x in range(offsets[head, item], offsets[head, item + 1]):
                key = keys[head, x]
                kept_keys[head, kept] = key
                kept += np.int32(first <= key < end)
            kept_offsets[head, column + item + 1] = kept
