"""The best keys of sessions by exponentials of their logits, which are taken out of these.

A key's weight is the softmax of its logit, summed over the heads of a group.

Shape legend: H KV heads, Q sessions, G group heads, R = Q * G rows of weights, K kept keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import add_weighted
from index_store.indexes.coarse_rows.scalars.spans import SPAN, Spans, span_count
from index_store.launch import launch, njit, prange
from index_store.selection.top_k_numba import top_k_row


@dataclass(frozen=True, slots=True)
class Columns:
    """What columns a session's rows have: `count`, of which the first `shared` have spans of their own.

    shift, own_shift: of their spans, and of those of the others (`Spans`).
    """

    count: int
    shared: int
    shift: int
    own_shift: int


def take_best(
    weights: NDArray[np.float32],
    places_HQG: NDArray[np.int64],
    sums_HQ: NDArray[np.int64],
    spans: Spans,
    columns: Sequence[Columns],
    keeps: Sequence[int],
    ids_HQK: Tensor,
    counts_HQ: Tensor,
) -> None:
    """Writes column ids of so many best keys of each session, and how many there are; their weights become 0.

    weights: a line of exponentials (`Spans`), where a session's rows begin at places_HQG. Those of row q * G + g have
    the peaks and totals of that row; those of its other columns come behind those of its shared ones. sums_HQ: where
    there is room in the line for a row more, for their sums. ids_HQK: int32, ascending, ties going to the lower.
    counts_HQ: int32.
    """
    if ids_HQK.numel() == 0:
        return
    launch(
        _take_best,
        weights,
        places_HQG,
        sums_HQ,
        spans.peaks_HRS,
        spans.totals_HRS,
        np.empty_like(spans.peaks_HRS),
        np.array([each.count for each in columns], np.int64),
        np.array([each.shared for each in columns], np.int64),
        np.array([span_count(each.shared, each.shift) for each in columns], np.int64),
        np.array([each.shift for each in columns], np.int64),
        np.array([each.own_shift for each in columns], np.int64),
        np.array(keeps, np.int64),
        ids_HQK.numpy(),
        counts_HQ.numpy(),
    )


@njit(cache=True, nogil=True, parallel=True)
def _take_best(
    weights: NDArray[np.float32],
    places: NDArray[np.int64],
    sum_places: NDArray[np.int64],
    peaks: NDArray[np.float32],
    totals: NDArray[np.float32],
    factors: NDArray[np.float32],
    counts: NDArray[np.int64],
    shared: NDArray[np.int64],
    shared_spans: NDArray[np.int64],
    shifts: NDArray[np.int64],
    own_shifts: NDArray[np.int64],
    keeps: NDArray[np.int64],
    ids: NDArray[np.int32],
    found: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    heads, queries, group = places.shape
    spans = peaks.shape[2]
    line = weights.reshape(1, weights.size)
    for task in prange(heads * queries * group):
        head, row = task // (queries * group), task % (queries * group)
        _find_factors(peaks[head, row], totals[head, row], factors[head, row])
    for task in prange(heads * queries * spans):
        head, query, span = task // (queries * spans), task // spans % queries, task % spans
        if span < shared_spans[query]:
            end = (span + 1) * SPAN - shifts[query]
            low, high = max(0, end - SPAN), min(end, shared[query])
        else:
            end = shared[query] + (span - shared_spans[query] + 1) * SPAN - own_shifts[query]
            low, high = max(shared[query], end - SPAN), min(end, counts[query])
        if low < high:
            _sum_span(
                line,
                places[head, query],
                factors[head, query * group : (query + 1) * group, span],
                low,
                high,
                sum_places[head, query],
            )
    for task in prange(heads * queries):
        head, query = task // queries, task % queries
        if keeps[query] > 0:
            place = sum_places[head, query]
            best = ids[head, query, : keeps[query]]
            found[head, query] = top_k_row(weights[place : place + counts[query]], best)
            for g in range(group):
                for k in range(found[head, query]):
                    weights[places[head, query, g] + best[k]] = 0


@njit(cache=True, nogil=True)
def _find_factors(
    peaks: NDArray[np.float32], totals: NDArray[np.float32], factors: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    """What makes every span's exponentials of a row the softmax of its logits."""
    peak, total = peaks.max(), np.float32(0)
    for span in range(peaks.shape[0]):
        factors[span] = np.exp(peaks[span] - peak) if peaks[span] > -np.inf else np.float32(0)
        total += factors[span] * totals[span]
    if total > 0:
        factors /= total


@njit(cache=True, nogil=True)
def _sum_span(
    weights: NDArray[np.float32],
    places: NDArray[np.int64],
    factors: NDArray[np.float32],
    low: int,
    high: int,
    place: int,
) -> None:  # pragma: no cover - compiled
    """weights[0, place + low..] = the weights in columns low..high-1 of all heads of a group, each times its factor."""
    vectors = (high - low) // LANES
    end = low + vectors * LANES
    weights[0, place + low : place + high] = 0
    for g in range(places.shape[0]):
        factor = factors[g]
        if factor > 0:
            add_weighted(factor, weights, 0, places[g] + low, weights, 0, place + low, vectors)
            for x in range(end, high):
                weights[0, place + x] += factor * weights[0, places[g] + x]
