"""Passes over coded rows of several tables in one launch: of a context's copy, and of what each session has appended.

What loops are told of the tables is a table itself, a row of numbers for each pass. A pass is cut into tasks, and the
tasks of all passes are numbered through.

Shape legend: H KV heads, X rows of queries of a KV head, P passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from index_store.compiled.launch import njit
from index_store.indexes.coarse_rows.scalars.coded_tables_numba import rows_in_line
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.scalars.spans import shift_of, span_count

CODES, CODES_APART, SCALES, SCALES_APART, OFFSETS, OFFSETS_APART = range(6)
"""Addresses of the first KV head's rows, and how many rows lie between the first ones of two heads."""
COUNT, LEAD, SHIFT, FIRST, BEGIN, END, MOST = range(6, 13)
"""Coded rows, positions of their first block, and of the pass's first span, that lie before them, the pass's first row,
its rows of queries BEGIN..END-1, and the most keys that one of these goes over."""
TASKS, SPLITS, EACH, SLOT = range(13, 17)
"""Tasks of the passes before, of a KV head of this one, spans of a task, and where its partial results begin."""
_FIELDS = 17


@dataclass(frozen=True, slots=True)
class CodedPass:
    """Coded rows from `first` on, as far as each of some consecutive rows of queries goes.

    All passes of a call are over rows of the same width and bits.
    """

    rows: ScalarRows
    first: int
    queries: range

    @property
    def shift(self) -> int:
        """Positions of its first span that lie before it."""
        return shift_of(self.rows, self.first)


@dataclass(frozen=True, slots=True)
class PassTable:
    """What loops are told of passes.

    numbers: [P, fields] int64. tasks: of all heads and passes. stride: from one task to the next that is begun: threads
    get runs of them, and those of a large pass are to be spread among the others. slots: of partial results.
    weights: that all rows of queries have. held: what the addresses are of.
    """

    numbers: NDArray[np.int64]
    tasks: int
    stride: int
    slots: int
    weights: int
    held: Sequence[Tensor]

    @classmethod
    def of_keys(cls, passes: Sequence[CodedPass], counts_X: NDArray[np.int64]) -> PassTable:
        """A task for every span of a pass's keys. counts_X: how many each row of queries goes over."""
        tables = [
            (each.rows.key_codes_HNC, each.rows.key_scales_HBD, each.rows.key_offsets_HBD) for each in passes
        ]
        return cls._of(passes, tables, counts_X, [1] * len(passes), np.zeros(len(counts_X), np.int64))

    @classmethod
    def of_values(
        cls,
        passes: Sequence[CodedPass],
        counts_X: NDArray[np.int64],
        rows_X: NDArray[np.int64],
        most_parts: int,
    ) -> PassTable:
        """A task for every part of a pass's values: as many spans as make so many parts, at most, of all of its rows.

        rows_X: which row of results each row of queries adds to. Parts that add to one are in different slots.
        """
        tables = [
            (each.rows.value_codes_HNC, each.rows.value_scales_HNV, each.rows.value_offsets_HNV)
            for each in passes
        ]
        spans = [span_count(each.rows.count - each.first, each.shift) for each in passes]
        each_part = [max(1, -(-count // most_parts)) for count in spans]
        return cls._of(passes, tables, counts_X, each_part, rows_X)

    @classmethod
    def _of(
        cls,
        passes: Sequence[CodedPass],
        tables: Sequence[tuple[Tensor, ...]],
        counts_X: NDArray[np.int64],
        spans_each: Sequence[int],
        rows_X: NDArray[np.int64],
    ) -> PassTable:
        numbers = np.zeros((len(passes), _FIELDS), np.int64)
        used = np.zeros(int(rows_X.max(initial=0)) + 1, np.int64)  # slots of every row of results
        held: list[Tensor] = []
        tasks = 0
        for row, each, arrays, spans in zip(numbers, passes, tables, spans_each, strict=True):
            for place, array in enumerate(map(rows_in_line, arrays)):
                held.append(array)
                row[2 * place : 2 * place + 2] = array.data_ptr(), array.stride(0) // array.shape[2]
            begin, end, shift = each.queries.start, each.queries.stop, each.shift
            most = int(counts_X[begin:end].max(initial=0))
            splits, own = -(-span_count(most, shift) // spans), rows_X[begin:end]
            slot = int(used[own].max(initial=0))
            used[own] = slot + splits
            row[COUNT:SPLITS] = each.rows.count, each.rows.lead, shift, each.first, begin, end, most, tasks
            row[SPLITS:] = splits, spans, slot
            tasks += len(arrays[0]) * splits
        weights = sum(int(counts_X[each.queries.start : each.queries.stop].sum()) for each in passes)
        stride = _spreading(tasks) if len(passes) > 1 else 1
        return cls(numbers, tasks, stride, int(used.max()), weights, held)


def passes_among(passes: Sequence[CodedPass], rows_X: NDArray[np.int64], wanted: range) -> list[CodedPass]:
    """The passes of those rows of queries that add to wanted rows of results, which ascend within a pass."""
    some = []
    for each in passes:
        rows, before = rows_X[each.queries.start : each.queries.stop], each.queries.start
        begin, end = (before + int(np.searchsorted(rows, edge)) for edge in (wanted.start, wanted.stop))
        if begin < end:
            some.append(CodedPass(each.rows, each.first, range(begin, end)))
    return some


def _spreading(tasks: int) -> int:
    """A step by which all of so many tasks are reached, and neighbours lie far apart."""
    step = max(1, round(0.618 * tasks))
    while gcd(step, tasks) != 1:
        step += 1
    return step


@njit(_nrt=False)
def pass_of(table: NDArray[np.int64], task: int) -> int:  # pragma: no cover - compiled
    """The pass that a task belongs to."""
    number = table.shape[0] - 1
    while table[number, TASKS] > task:
        number -= 1
    return number  # type: ignore[no-any-return]
