"""Runs of keys whose coarse values are not read, because next to no weight is on them.

A run is a block of 128 keys. It is left out for a row of queries where its weight is less than `NEGLIGIBLE` of its even
share of all searched keys' weight; keys that are attended exactly count in the latter alone. So whatever is left out
has less than `NEGLIGIBLE` of the weight: of flat attention nothing is. What is attended to shares its weight, as
attention states merge.

Shape legend: H KV heads, R rows of queries, S spans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import total_of
from index_store.compiled.launch import njit, spread
from index_store.indexes.coarse_rows.scalars.spans import SPAN

NEGLIGIBLE = 0.02


@njit()
def _find_limit(
    task: int,
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    span_rows: NDArray[np.int64],
    span_first: NDArray[np.int64],
    counts: NDArray[np.int64],
    shifts: NDArray[np.int64],
    beside: NDArray[np.float32],
    limits: NDArray[np.float32],
    rows: int,
) -> None:  # pragma: no cover - compiled
    head, r = task // rows, task % rows
    row, first = span_rows[r], span_first[r]
    spans = (shifts[r] + counts[r] + SPAN - 1) // SPAN if counts[r] > 0 else 0
    peak = beside[head, r] if beside.size else np.float32(-np.inf)
    for span in range(spans):
        peak = max(peak, peaks[head, row, first + span])
    limits[head, r] = -np.inf
    if peak > -np.inf:
        total = np.exp(beside[head, r] - peak) if beside.size else np.float32(0)
        for span in range(spans):
            total += np.exp(peaks[head, row, first + span] - peak) * totals[head, row, first + span]
        limits[head, r] = peak + np.log(total * np.float32(NEGLIGIBLE) / np.float32(counts[r]))


@njit("f4x3 f4x3 i8x1 i8x1 i8x1 i8x1 f4x2 f4x2")
def find_limits(
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    span_rows: NDArray[np.int64],
    span_first: NDArray[np.int64],
    counts: NDArray[np.int64],
    shifts: NDArray[np.int64],
    beside: NDArray[np.float32],
    limits: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Log of the weight a key, on average, below which runs are left out, of every row: [H, R].

    peaks, totals, span_rows, span_first: `Spans` of the rows' counts of weights, the first of which begins so many
    positions as its shift behind a span. beside: [H, R] log-sum-exp of logits that the totals lack, or nothing.
    """
    heads, rows = limits.shape
    spread(
        _find_limit,
        heads * rows,
        (peaks, totals, span_rows, span_first, counts, shifts, beside, limits, rows),
    )


@njit(_nrt=False)
def choose_rows(
    line: NDArray[np.float32],
    places: NDArray[np.int64],
    counts: NDArray[np.int64],
    low: int,
    keys: int,
    least: NDArray[np.float32],
    chosen: NDArray[np.int64],
) -> int:  # pragma: no cover - compiled
    """Fills in the rows to which a run of so many keys from column `low` on counts; returns how many these are.

    line: [1, .], where the rows' first columns are at places. least: of each row, its weight a key that is enough.
    """
    count = 0
    for r in range(counts.shape[0]):
        own = min(keys, counts[r] - low)
        if own > 0 and _add_up(line, places[r] + low, own) >= least[r] * np.float32(own):
            chosen[count] = r
            count += 1
    return count


@njit(_nrt=False)
def _add_up(line: NDArray[np.float32], first: int, count: int) -> np.float32:  # pragma: no cover - compiled
    """Sum of so many weights."""
    whole = count // LANES
    total = total_of(line, 0, first, whole)
    for x in range(first + whole * LANES, first + count):
        total += line[0, x]
    return total  # type: ignore[no-any-return]
