"""The members of items without the keys outside of the searched range, so that keys can be counted and numbered.

Shape legend: H KV heads, M items, X keys listed by items.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.compiled.launch import launch, njit, on_host, spread
from index_store.selection.ranking import Items, Members


def searchable_members(items: Items, heads: int, columns: int, device: torch.device | str = "cpu") -> Members:
    """One list of members for all `columns` items: what they hold of [first_key, end_key), in the same order.

    Keys beyond the last offset of a head are undefined. Items that are single keys are lists of one key (views,
    nothing is copied per head) on `device`.
    """
    if not items.groups:
        return _single_keys(items, heads, columns, device)
    if not on_host(items.groups[0].keys_HX):
        return searchable_members_reference(items, heads, columns)
    listed = sum(group.keys_HX.shape[1] for group in items.groups)
    offsets_HM = torch.zeros(heads, columns + 1, dtype=torch.int32, device="cpu")
    keys_HX = torch.zeros(heads, listed, dtype=torch.int32, device="cpu")
    column = 0
    for group in items.groups:
        launch(
            _keep_inside,
            group.offsets_HM.shape[1] - 1,
            *flat_rows(group.offsets_HM),
            *flat_rows(group.keys_HX),
            items.first_key,
            items.end_key,
            column,
            offsets_HM.numpy(),
            keys_HX.numpy(),
        )
        column += group.offsets_HM.shape[1] - 1
    return Members(offsets_HM, keys_HX)


def searchable_members_reference(
    items: Items, heads: int, columns: int, device: torch.device | str = "cpu"
) -> Members:
    """The same by running counts of the keys inside, on any device."""
    if not items.groups:
        return _single_keys(items, heads, columns, device)
    offsets, keys = [], []
    kept_H1 = torch.zeros_like(items.groups[0].offsets_HM[:, :1])
    for group in items.groups:
        entry_X = torch.arange(group.keys_HX.shape[1], device=group.keys_HX.device)
        inside = (group.keys_HX >= items.first_key) & (group.keys_HX < items.end_key)
        inside &= (entry_X >= group.offsets_HM[:, :1]) & (entry_X < group.offsets_HM[:, -1:])
        before_HX = torch.nn.functional.pad(inside.cumsum(1, dtype=torch.int32), (1, 0))
        offsets.append(kept_H1 + before_HX.gather(1, group.offsets_HM.long()))
        keys.append((group.keys_HX, inside, kept_H1 + before_HX[:, :-1]))
        kept_H1 = offsets[-1][:, -1:]
    listed = sum(group.keys_HX.shape[1] for group in items.groups)
    # The last column takes what lies outside.
    keys_HX = torch.zeros(heads, listed + 1, dtype=torch.int32, device=kept_H1.device)
    for of_group, inside, place in keys:
        keys_HX.scatter_(1, torch.where(inside, place, listed).long(), of_group)
    first = [offsets[0], *(later[:, 1:] for later in offsets[1:])]
    return Members(torch.cat(first, dim=1), keys_HX[:, :listed])


def flat_rows(rows_HX: Tensor) -> tuple[NDArray[np.int32], int]:
    """All rows in one dimension, and how far their first numbers lie apart: one type, of which loops are compiled once.

    Nothing is copied, unless neighbours in a row are none in memory.
    """
    if rows_HX.stride(1) != 1:
        rows_HX = rows_HX.contiguous()
    stride = rows_HX.stride(0)
    size = (rows_HX.shape[0] - 1) * stride + rows_HX.shape[1] if rows_HX.shape[0] else 0
    return rows_HX.as_strided((size,), (1,)).numpy(), stride


def _single_keys(items: Items, heads: int, columns: int, device: torch.device | str) -> Members:
    span = max(0, items.end_key - items.first_key)
    offsets = torch.arange(columns + 1, dtype=torch.int32, device=device).clamp_(max=span)
    keys = torch.arange(items.first_key, items.first_key + span, dtype=torch.int32, device=device)
    return Members(offsets.expand(heads, -1), keys.expand(heads, -1))


@njit()
def _keep_of_head(
    head: int,
    items: int,
    offsets: NDArray[np.int32],
    offsets_stride: int,
    keys: NDArray[np.int32],
    keys_stride: int,
    first: int,
    end: int,
    column: int,
    kept_offsets: NDArray[np.int32],
    kept_keys: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    kept = kept_offsets[head, column]
    for item in range(items):
        place = head * offsets_stride + item
        for x in range(offsets[place], offsets[place + 1]):
            key = keys[head * keys_stride + x]
            kept_keys[head, kept] = key
            kept += np.int32(first <= key < end)
        kept_offsets[head, column + item + 1] = kept


@njit("i8 i4x1 i8 i4x1 i8 i8 i8 i8 i4x2 i4x2")
def _keep_inside(
    items: int,
    offsets: NDArray[np.int32],
    offsets_stride: int,
    keys: NDArray[np.int32],
    keys_stride: int,
    first: int,
    end: int,
    column: int,
    kept_offsets: NDArray[np.int32],
    kept_keys: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    spread(
        _keep_of_head,
        kept_offsets.shape[0],
        (items, offsets, offsets_stride, keys, keys_stride, first, end, column, kept_offsets, kept_keys),
    )
