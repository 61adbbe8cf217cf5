"""Exact top-k of long score rows without sorting them.

Shape legend: H KV heads, T query positions, M candidates, K kept.

A row is folded into B strided blocks and only their maxima are ranked: the K-th largest maximum is a lower bound of
the K-th largest score, because K blocks hold at least one score each that reaches it. Only blocks that reach the
bound are read again. Ids come out ascending, so later gathers walk memory forwards.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.compiled.launch import F4, I4, I8, U4, launch, njit, on_host, task_loop

_BLOCKS_PER_KEPT = 4
_MAX_FOLD = 64
_COARSE_BIT = np.uint32(1 << 21)
"""A float32's last bit where two bits of its fraction are left."""


def top_k(scores_HTM: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """Column ids of the `keep` largest scores of every row, ascending; -inf is never kept; ties go to lower ids.

    scores_HTM: [H, T, M] float32. Returns ids [H, T, keep] int32 and counts [H, T] int32; a row with
    fewer than `keep` finite scores has a smaller count, and its remaining ids are 0.
    """
    if not on_host(scores_HTM):
        return top_k_reference(scores_HTM, keep)
    heads, positions, columns = scores_HTM.shape
    ids = torch.zeros(heads, positions, min(keep, columns), dtype=torch.int32, device="cpu")
    counts = torch.zeros(heads, positions, dtype=torch.int32, device="cpu")
    if ids.numel() > 0:
        rows = RowsInLine.of([scores_HTM])
        found = (ids.numpy(), counts.numpy())
        launch(
            _top_k_rows,
            heads * positions,
            rows.numbers,
            rows.places_HR,
            columns,
            *found,
            work=0.9 * scores_HTM.numel(),
        )
    return ids, counts


def top_k_reference(scores_HTM: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """The same by a stable full sort."""
    columns = scores_HTM.shape[-1]
    keep = min(keep, columns)
    # Adding 0.0 makes -0.0 a tie of 0.0 for sorts that compare bits.
    order = torch.sort(scores_HTM + 0.0, dim=-1, descending=True, stable=True)
    kept = ~torch.isneginf(order.values[..., :keep])
    columns_first = torch.where(kept, order.indices[..., :keep], columns)
    ids = columns_first.sort(-1).values
    return torch.where(ids == columns, 0, ids).to(torch.int32), kept.sum(-1).to(torch.int32)


@njit()
def sortable(bits: np.uint32) -> np.uint32:
    """Maps float32 bits to unsigned integers of the same order, without branches; -0.0 and 0.0 are equal."""
    negative = np.uint32(np.int32(bits) >> np.int32(31))
    key = np.uint32(bits ^ (negative | np.uint32(0x80000000)))
    return np.uint32(key + np.uint32(bits == np.uint32(0x80000000)))


@njit()
def sortable_keys(numbers: F4) -> U4:
    """`sortable` of all numbers."""
    bits, keys = numbers.view(np.uint32), np.empty(numbers.shape[0], np.uint32)
    for j in range(keys.shape[0]):
        keys[j] = sortable(bits[j])
    return keys


@njit()
def kth_largest(keys: U4, k: int, last_bit: np.uint32) -> np.uint32:
    """The k-th largest, without the bits below `last_bit`.

    Bit by bit: counting all keys once for every bit is vectorised, sorting them into bins is not. Keys that cannot be
    the one any more are left behind once they are most of them.
    """
    differing = np.uint32(0)
    for j in range(keys.shape[0]):
        differing |= keys[j] ^ keys[0]
    bit = np.uint32(1)
    while differing > np.uint32(1):
        differing >>= np.uint32(1)
        bit <<= np.uint32(1)
    found = keys[0] & ~((bit << np.uint32(1)) - np.uint32(1))
    reaching, above = (
        keys.shape[0],
        0,
    )  # how many are at least `found`, and how many larger than all that begin as it
    while bit >= last_bit:
        tried = np.uint32(found | bit)
        count = np.uint32(0)
        for j in range(keys.shape[0]):
            count += np.uint32(keys[j] >= tried)
        counted = int(np.int64(count))
        if counted >= k:
            found, reaching = tried, counted
        else:
            above = counted
        if 8 * (reaching - above) < keys.shape[0]:
            some, kept = np.empty(reaching - above + 1, np.uint32), 0
            for j in range(keys.shape[0]):
                some[kept] = keys[j]
                kept += int(np.uint32(keys[j] - found) < bit)
            keys, k = some[:kept], k - above
            reaching, above = kept, 0
        bit >>= np.uint32(1)
    return np.uint32(found & ~(last_bit - np.uint32(1)))


@njit()
def keep_best(ids: I4, keys: U4, keep: int) -> int:
    """Brings the ids with the `keep` largest keys to the front, in their order; how many they are.

    Ties go to the first. Keys are in sortable form.
    """
    count = ids.shape[0]
    if count <= keep:
        return int(count)
    threshold = kth_largest(keys, keep, np.uint32(1))
    ties = keep
    for j in range(count):
        ties -= keys[j] > threshold
    kept = 0
    for j in range(count):
        # Written first, and kept on a hit: a mispredicted branch costs more.
        ids[kept] = ids[j]
        equal = keys[j] == threshold
        kept += (keys[j] > threshold) | (equal & (ties > 0))
        ties -= equal
    return kept


@njit()
def lower_bound(numbers: F4, k: int) -> np.float32:
    """What k of the numbers reach, at most a fifth less than the k-th largest; 0 if that is less, or there is none."""
    if numbers.shape[0] < k:
        return np.float32(0)
    bound = kth_largest(sortable_keys(numbers), k, _COARSE_BIT)
    if bound < np.uint32(0x80000000):
        return np.float32(0)
    bits = np.empty(1, np.uint32)
    bits[0] = bound & np.uint32(0x7FFFFFFF)
    return bits.view(np.float32)[0]  # type: ignore[no-any-return]


@njit()
def _folded_maxima(row: F4, fold: int) -> F4:
    """Maxima of strided blocks: block j holds columns j, j + B, j + 2B, ... of B = len(result) blocks."""
    columns = row.shape[0]
    blocks = (columns + fold - 1) // fold
    maxima = row[:blocks].copy()
    for part in range(1, fold):
        start = part * blocks
        tail = row[start : start + blocks]
        for j in range(tail.shape[0]):
            maxima[j] = tail[j] if tail[j] > maxima[j] else maxima[j]
    return maxima


@njit()
def _columns_reaching(row: F4, maxima: F4, bound: np.uint32) -> I4:
    """Columns with a score of at least `bound` (in sortable form), ascending."""
    blocks = maxima.shape[0]
    bits = maxima.view(np.uint32)
    # Both loops write first and advance on a hit: hits come at random, and a mispredicted branch costs more.
    hits = np.empty(blocks, np.int32)
    hit_count = 0
    for j in range(blocks):
        hits[hit_count] = j
        hit_count += int(sortable(bits[j]) >= bound)
    columns = row.shape[0]
    parts = (columns + blocks - 1) // blocks
    reached = np.empty(hit_count * parts + 1, np.int32)
    found = 0
    row_bits = row.view(np.uint32)
    for part in range(parts):
        for h in range(hit_count):
            i = part * blocks + hits[h]
            if i < columns:
                reached[found] = i
                found += int(sortable(row_bits[i]) >= bound)
    return reached[:found]


@njit()
def top_k_row(row: F4, ids: I4) -> int:
    keep = ids.shape[0]
    fold = min(_MAX_FOLD, row.shape[0] // (_BLOCKS_PER_KEPT * keep))
    if fold > 1:
        maxima = _folded_maxima(row, fold)
        reached = _columns_reaching(row, maxima, kth_largest(sortable_keys(maxima), keep, np.uint32(1)))
        keys = sortable_keys(row[reached])
    else:
        reached, keys = np.arange(row.shape[0], dtype=np.int32), sortable_keys(row)
    kept = 0
    for place in range(keep_best(reached, keys, keep)):
        if row[reached[place]] != -np.inf:
            ids[kept] = reached[place]
            kept += 1
    return kept


@task_loop("f4x1 i8x2 i8 i4x3 i4x2")
def _top_k_rows(task: int, numbers: F4, places: I8, columns: int, ids: I4, counts: I4) -> None:
    rows = places.shape[1]
    head, r = task // rows, task % rows
    row = numbers[places[head, r] : places[head, r] + columns]
    counts[head, r] = top_k_row(row, ids[head, r])
