"""Exact top-k of long score rows without sorting them.

Shape legend: H KV heads, T query positions, M candidates, K kept.

A row is folded into B strided blocks and only their maxima are ranked: the K-th largest maximum is a lower bound of
the K-th largest score, because K blocks hold at least one score each that reaches it. Only blocks that reach the
bound are read again. Ids come out ascending, so later gathers walk memory forwards.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.rows_in_line import RowsInLine
from index_store.compiled.launch import launch, njit, on_host, spread

_BLOCKS_PER_KEPT = 4
_MAX_FOLD = 64


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
        launch(_top_k_rows, rows.numbers, rows.places_HR, columns, *found, work=0.9 * scores_HTM.numel())
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
def sortable(bits: np.uint32) -> np.uint32:  # pragma: no cover - compiled
    """Maps float32 bits to unsigned integers of the same order, without branches; -0.0 and 0.0 are equal."""
    negative = np.uint32(np.int32(bits) >> np.int32(31))
    key = np.uint32(bits ^ (negative | np.uint32(0x80000000)))
    return np.uint32(key + np.uint32(bits == np.uint32(0x80000000)))


@njit()
def _kth_largest(
    bits: NDArray[np.uint32], count: int, k: int, coarse: bool = False
) -> np.uint32:  # pragma: no cover - compiled
    """The k-th largest of bits[:count] in sortable form: radix select, 11 + 11 + 10 bits.

    coarse: only the first bits, the others 0.
    """
    histogram = np.empty(2048, np.int64)
    prefix = np.uint32(0)
    mask = np.uint32(0)
    remaining = k
    for shift, width in ((21, 11), (10, 11), (0, 10)):
        histogram[:] = 0
        low = np.uint32((1 << width) - 1)
        for i in range(count):
            key = sortable(bits[i])
            if (key & mask) == prefix:
                histogram[(key >> np.uint32(shift)) & low] += 1
        digit = (1 << width) - 1
        while histogram[digit] < remaining:
            remaining -= histogram[digit]
            digit -= 1
        prefix = np.uint32(prefix | np.uint32(np.uint32(digit) << np.uint32(shift)))
        mask = np.uint32(mask | np.uint32(low << np.uint32(shift)))
        if coarse:
            break
    return prefix


@njit()
def lower_bound(numbers: NDArray[np.float32], k: int) -> np.float32:  # pragma: no cover - compiled
    """What k of the numbers reach, at most a fifth less than the k-th largest; 0 if that is less, or there is none."""
    if numbers.shape[0] < k:
        return np.float32(0)
    bound = _kth_largest(numbers.view(np.uint32), numbers.shape[0], k, True)
    if bound < np.uint32(0x80000000):
        return np.float32(0)
    bits = np.empty(1, np.uint32)
    bits[0] = bound & np.uint32(0x7FFFFFFF)
    return bits.view(np.float32)[0]  # type: ignore[no-any-return]


@njit()
def _folded_maxima(row: NDArray[np.float32], keep: int) -> NDArray[np.float32]:  # pragma: no cover - compiled
    """Maxima of strided blocks: block j holds columns j, j + B, j + 2B, ... of B = len(result) blocks."""
    columns = row.shape[0]
    fold = max(1, min(_MAX_FOLD, columns // (_BLOCKS_PER_KEPT * keep)))
    blocks = (columns + fold - 1) // fold
    maxima = row[:blocks].copy()
    for part in range(1, fold):
        start = part * blocks
        tail = row[start : start + blocks]
        for j in range(tail.shape[0]):
            maxima[j] = tail[j] if tail[j] > maxima[j] else maxima[j]
    return maxima


@njit()
def _columns_reaching(
    row: NDArray[np.float32], maxima: NDArray[np.float32], bound: np.uint32
) -> NDArray[np.int32]:  # pragma: no cover - compiled
    """Columns with a finite score of at least `bound` (in sortable form), ascending."""
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
                found += int((sortable(row_bits[i]) >= bound) & (row[i] != -np.inf))
    return reached[:found]


@njit()
def top_k_row(row: NDArray[np.float32], ids: NDArray[np.int32]) -> int:  # pragma: no cover - compiled
    keep = ids.shape[0]
    maxima = _folded_maxima(row, keep)
    bound = _kth_largest(maxima.view(np.uint32), maxima.shape[0], keep)
    reached = _columns_reaching(row, maxima, bound)
    found = reached.shape[0]
    if found <= keep:
        for place in range(found):
            ids[place] = reached[place]
        return int(found)
    row_bits, bits = row.view(np.uint32), np.empty(found, np.uint32)
    for c in range(found):
        bits[c] = row_bits[reached[c]]
    threshold = _kth_largest(bits, found, keep)
    ties = keep
    for c in range(found):
        if sortable(bits[c]) > threshold:
            ties -= 1
    kept = 0
    for c in range(found):
        key = sortable(bits[c])
        if key > threshold or (key == threshold and ties > 0):
            if key == threshold:
                ties -= 1
            ids[kept] = reached[c]
            kept += 1
    return kept


@njit()
def _top_k_of(
    task: int,
    numbers: NDArray[np.float32],
    places: NDArray[np.int64],
    columns: int,
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
    rows: int,
) -> None:  # pragma: no cover - compiled
    head, r = task // rows, task % rows
    row = numbers[places[head, r] : places[head, r] + columns]
    counts[head, r] = top_k_row(row, ids[head, r])


@njit("f4x1 i8x2 i8 i4x3 i4x2")
def _top_k_rows(
    numbers: NDArray[np.float32],
    places: NDArray[np.int64],
    columns: int,
    ids: NDArray[np.int32],
    counts: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    heads, rows = places.shape
    spread(_top_k_of, heads * rows, (numbers, places, columns, ids, counts, rows))
