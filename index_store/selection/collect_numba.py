"""From ranked items to key ids: walks every head's items in order until its limit, unites the heads, sorts the ids.

Shape legend: H KV heads, T query positions, G group heads, M items, K collected keys, X keys listed by items, S keys
of the searched range.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from index_store.compiled.launch import I4, U1, launch, njit, on_host, task_loop
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
            heads,
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


def flat_rows(rows_HX: Tensor) -> tuple[I4, int]:
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


@task_loop("i8 i4x1 i8 i4x1 i8 i8 i8 i8 i4x2 i4x2")
def _keep_inside(
    head: int,
    items: int,
    offsets: I4,
    offsets_stride: int,
    keys: I4,
    keys_stride: int,
    first: int,
    end: int,
    column: int,
    kept_offsets: I4,
    kept_keys: I4,
) -> None:
    kept = kept_offsets[head, column]
    for item in range(items):
        place = head * offsets_stride + item
        for x in range(offsets[place], offsets[place + 1]):
            key = keys[head * keys_stride + x]
            kept_keys[head, kept] = key
            kept += np.int32(first <= key < end)
        kept_offsets[head, column + item + 1] = kept


def collect(order_HTGM: Tensor, items_HTG: Tensor, limits_HTG: Tensor, items: Items) -> tuple[Tensor, Tensor]:
    """Ids [H, T, K] int32, ascending and unique, and counts [H, T] int32, of every row's collected keys.

    order_HTGM: [H, T, G, M] int32 item numbers, best first; items_HTG: [H, T, G] int32, how many of them count.
    limits_HTG: [H, T, G] int32, keys that a head takes at most; the item that reaches the limit is cut. Keys outside
    items.first_key..end_key-1 are passed over and do not count. Entries of ids beyond a row's count are 0.
    """
    if not on_host(order_HTGM):
        return collect_reference(order_HTGM, items_HTG, limits_HTG, items)
    heads, positions = order_HTGM.shape[:2]
    rows = heads * positions
    span = max(0, items.end_key - items.first_key)
    width = int(limits_HTG.clamp(max=span).sum(2).clamp(max=span).max()) if rows else 0
    ids = torch.zeros(heads, positions, width, dtype=torch.int32, device="cpu")
    counts = torch.zeros(heads, positions, dtype=torch.int32, device="cpu")
    if rows and width:
        launch(
            _collect_rows,
            rows,
            order_HTGM.to(torch.int32).flatten(0, 1).contiguous().numpy(),
            items_HTG.to(torch.int32).flatten(0, 1).contiguous().numpy(),
            limits_HTG.to(torch.int32).flatten(0, 1).contiguous().numpy(),
            *_lists(items),
            positions,
            items.first_key,
            items.end_key,
            ids.flatten(0, 1).numpy(),
            counts.flatten().numpy(),
            work=20 * ids.numel(),
        )
    kept = int(counts.max()) if rows else 0
    return ids[..., :kept], counts


def collect_reference(
    order_HTGM: Tensor, items_HTG: Tensor, limits_HTG: Tensor, items: Items
) -> tuple[Tensor, Tensor]:
    """The same by running sums over the items and one mark per key, on any device."""
    heads, positions, _, columns = order_HTGM.shape
    span = max(0, items.end_key - items.first_key)
    # The last column takes what is not kept.
    marked = torch.zeros(heads, positions, span + 1, dtype=torch.bool, device=order_HTGM.device)
    order = order_HTGM.long()
    walked = torch.arange(columns, device=order.device) < items_HTG[..., None]
    if items.groups:
        places, found = _members_taken(order, walked, limits_HTG, items)
    else:
        inside = walked & (order < span)
        places, found = order.flatten(2), inside & (inside.cumsum(-1) <= limits_HTG[..., None])
    marked.scatter_(2, torch.where(found.flatten(2), places, span), True)
    return _list_marked(marked[..., :span], items.first_key)


def _members_taken(
    order_HTGM: Tensor, walked_HTGM: Tensor, limits_HTG: Tensor, items: Items
) -> tuple[Tensor, Tensor]:
    """Places [H, T, X] of listed keys in the searched range, and which of them some head takes."""
    heads, positions, group, _ = order_HTGM.shape
    columns = sum(members.offsets_HM.shape[1] - 1 for members in items.groups)
    members = searchable_members(items, heads, columns)
    offsets_HM, keys_HX = members.offsets_HM.long(), members.keys_HX
    sizes = offsets_HM.diff(dim=1)[:, None, None].expand(-1, positions, group, -1)
    sizes_in_order = sizes.gather(-1, order_HTGM) * walked_HTGM
    before = sizes_in_order.cumsum(-1) - sizes_in_order
    left = (limits_HTG[..., None] - before).clamp_(min=0)
    # Keys that a head takes of every item: all, some of the first, or none.
    taken_HTGM = torch.zeros_like(sizes, memory_format=torch.contiguous_format)
    taken_HTGM.scatter_add_(-1, order_HTGM, torch.minimum(sizes_in_order, left))
    entry_X = torch.arange(keys_HX.shape[1], device=keys_HX.device)
    item_HX = torch.searchsorted(
        offsets_HM[:, 1:].contiguous(), entry_X.expand(heads, -1).contiguous(), right=True
    )
    listed_HX = item_HX < columns
    item_HX = item_HX.clamp_(max=columns - 1)
    rank_HX = entry_X - offsets_HM.gather(1, item_HX)
    found = torch.zeros(heads, positions, len(entry_X), dtype=torch.bool, device=keys_HX.device)
    for head in range(group):
        taken_HTX = taken_HTGM[:, :, head].gather(-1, item_HX[:, None].expand(-1, positions, -1))
        found |= rank_HX[:, None] < taken_HTX
    places_HX = (keys_HX - items.first_key).long()
    return places_HX[:, None].expand(-1, positions, -1), found & listed_HX[:, None]


def _list_marked(marked_HTS: Tensor, first_key: int) -> tuple[Tensor, Tensor]:
    """Ids [H, T, K] int32 of the marked keys and how many every row has."""
    heads, positions, _ = marked_HTS.shape
    counts_HT = marked_HTS.sum(-1, dtype=torch.int32)
    width = int(counts_HT.max()) if counts_HT.numel() else 0
    row, place = marked_HTS.flatten(0, 1).nonzero(as_tuple=True)
    begins = counts_HT.flatten().cumsum(0) - counts_HT.flatten()
    ids = torch.zeros(heads * positions, width, dtype=torch.int32, device=marked_HTS.device)
    ids[row, torch.arange(len(row), device=row.device) - begins[row]] = (place + first_key).to(torch.int32)
    return ids.view(heads, positions, width), counts_HT


def _lists(items: Items) -> list[I4 | int]:
    """Items, offsets and keys of the shared and the private group, all rows one after another; none of no group."""
    if len(items.groups) > 2:
        raise ValueError(f"items have {len(items.groups)} groups of members, expected at most 2")
    found: list[I4 | int] = []
    for group in items.groups:
        found += [group.offsets_HM.shape[1] - 1, *flat_rows(group.offsets_HM), *flat_rows(group.keys_HX)]
    nothing = np.zeros(0, np.int32)
    for _ in range(len(items.groups), 2):
        found += [0, nothing, 0, nothing, 0]
    return found


@njit()
def _mark(keys: I4, first: int, end: int, left: int, marked: U1) -> int:
    """Marks keys inside the range until `left` is used up; returns what is left."""
    for x in range(keys.shape[0]):
        if left == 0:
            break
        key = keys[x]
        if first <= key < end:
            marked[key - first] = 1
            left -= 1
    return left


@task_loop("i4x3 i4x2 i4x2 i8 i4x1 i8 i4x1 i8 i8 i4x1 i8 i4x1 i8 i8 i8 i8 i4x2 i4x1")
def _collect_rows(
    row: int,
    order: I4,
    item_counts: I4,
    limits: I4,
    shared: int,
    shared_offsets: I4,
    shared_offsets_stride: int,
    shared_keys: I4,
    shared_keys_stride: int,
    private: int,
    private_offsets: I4,
    private_offsets_stride: int,
    private_keys: I4,
    private_keys_stride: int,
    positions: int,
    first: int,
    end: int,
    ids: I4,
    counts: I4,
) -> None:
    single = shared + private == 0
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
                place, keys = head * shared_offsets_stride + item, head * shared_keys_stride
                begin, stop = shared_offsets[place], shared_offsets[place + 1]
                left = _mark(shared_keys[keys + begin : keys + stop], first, end, left, marked)
            else:
                place, keys = head * private_offsets_stride + item - shared, head * private_keys_stride
                begin, stop = private_offsets[place], private_offsets[place + 1]
                left = _mark(private_keys[keys + begin : keys + stop], first, end, left, marked)
    found = 0
    for x in range(end - first):
        if marked[x]:
            ids[row, found] = first + x
            found += 1
    counts[row] = found
