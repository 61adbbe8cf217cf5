"""Rows of attention weights on the way: exponentials of logits, each relative to the largest of its span of keys.

A logit is exponentiated once, when no softmax over all keys is known yet: a span's exponentials lack one factor.

Shape legend: H KV heads, R rows of queries, S spans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows

SPAN = 2048
"""Keys whose weights have one peak: with the weights of a group few enough for the second-level cache."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Peaks and totals of spans of exp(logit - peak), for rows of weights that lie elsewhere.

    peaks_HRS, totals_HRS: float32; -inf and 0 where a span has no key that counts. Span s of a row of weights is number
    first_R[r] + s of row rows_R[r] here; both int64. Spans begin at multiples of SPAN positions, as blocks of keys do:
    where weights begin `shift` positions behind one, the first span is so much shorter.
    """

    peaks_HRS: NDArray[np.float32]
    totals_HRS: NDArray[np.float32]
    rows_R: NDArray[np.int64]
    first_R: NDArray[np.int64]

    @classmethod
    def empty(cls, heads: int, rows: int, spans: int) -> Spans:
        """Room for so many of every row, nothing in it."""
        shape = (heads, rows, spans)
        first = np.zeros(rows, np.int64)
        peaks, totals = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
        return cls(peaks, totals, np.arange(rows), first)

    def of(self, rows_R: NDArray[np.int64], first_R: NDArray[np.int64]) -> Spans:
        """The same room for other rows of weights."""
        return replace(self, rows_R=rows_R, first_R=first_R)


def shift_of(rows: ScalarRows, first: int) -> int:
    """Positions of the span of row `first` that lie before it."""
    return (rows.lead + first) % SPAN


def span_count(keys: int, shift: int) -> int:
    """Spans of so many keys."""
    return -(-(shift + keys) // SPAN) if keys else 0
