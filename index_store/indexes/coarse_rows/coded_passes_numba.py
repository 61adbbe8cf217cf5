"""Passes over coded rows of several tables in one launch: of a context's copy, and of what each session has appended.

What loops are told of the tables is a table itself, a row of numbers for each pass. A pass is cut into tasks, and the
tasks of all passes are numbered through.

Weights are exponentials of logits, each relative to the largest of its span of keys: a logit is exponentiated once,
when no softmax over all keys is known yet, so a span's exponentials lack one factor.

Shape legend: H KV heads, N rows, J numbers of a row, R rows of queries, X those of all passes, P passes, S spans, g
groups of a value's channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.rows_in_line_numba import row_table
from index_store.attention.vectors.code import LANES
from index_store.attention.vectors.floats_numba import make_widening
from index_store.compiled.launch import F4, I2, I8, U1, byte_table, int16_table, njit
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows

SPAN = 2048
"""Keys whose weights have one peak: with the weights of a group few enough for the second-level cache."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Peaks and totals of spans of exp(logit - peak), for rows of weights that lie elsewhere.

    peaks_HRS, totals_HRS: float32; -inf and 0 where a span has no key that counts. Span s of a row of weights is number
    first_R[r] + s of row rows_R[r] here; both int64. Spans begin at multiples of SPAN positions, as blocks of keys do:
    where weights begin `shift` positions behind one, the first span is so much shorter.
    """

    peaks_HRS: F4
    totals_HRS: F4
    rows_R: I8
    first_R: I8

    @classmethod
    def empty(cls, heads: int, rows: int, spans: int) -> Spans:
        """Room for so many of every row, nothing in it."""
        shape = (heads, rows, spans)
        peaks, totals = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.float32)
        return cls(peaks, totals, *_each_row(rows))

    def of(self, rows_R: I8, first_R: I8) -> Spans:
        """The same room for other rows of weights."""
        return Spans(self.peaks_HRS, self.totals_HRS, rows_R, first_R)


class Weights(NamedTuple):
    """`RowsInLine` as loops have them, the line as one row. Of one KV head places are [R], else [H, R]."""

    line: F4
    places: I8
    counts: I8


class SpanTable(NamedTuple):
    """`Spans` as loops have them. Of one KV head peaks and totals are [R, S]."""

    peaks: F4
    totals: F4
    rows: I8
    first: I8


class CodedTable(NamedTuple):
    """Coded rows of one KV head, with their scales and offsets, float16 as int16, and the bits of a code."""

    codes: U1
    scales: I2
    offsets: I2
    bits: int


class PassTasks(NamedTuple):
    """What a loop over passes goes by: `PassTable`, and of coded rows the bytes, the groups of scales, and bits."""

    table: I8
    tasks: int
    stride: int
    width: int
    groups: int
    bits: int


@lru_cache(maxsize=64)
def _each_row(rows: int) -> tuple[I8, I8]:
    """So many rows in their order, and the number 0 for each; nobody writes to them."""
    return np.arange(rows), np.zeros(rows, np.int64)


def shift_of(rows: ScalarRows, first: int) -> int:
    """Positions of the span of row `first` that lie before it."""
    return (rows.lead + first) % SPAN


def span_count(keys: int, shift: int) -> int:
    """Spans of so many keys."""
    return -(-(shift + keys) // SPAN) if keys else 0


_widen_halves = make_widening("float16")


def half_table(rows_HNJ: Tensor) -> tuple[NDArray[np.generic], int]:
    """`row_table` of float16, as the words that compiled loops can read."""
    return row_table(rows_HNJ.view(torch.int16))


@njit()
def at_cache_line(rows: int, width: int) -> F4:  # pragma: no cover - compiled
    """[rows, width] zeros that begin at a cache line, for widths that are multiples of LANES.

    A vector that lies across two lines is loaded, and stored, in two halves.
    """
    room = np.zeros(rows * width + LANES, np.float32)
    first = -(room.ctypes.data // 4) % LANES
    return room[first : first + rows * width].reshape(rows, width)


@njit(_nrt=False)
def largest_count(counts: I8) -> int:  # pragma: no cover - compiled
    """0 where there is none."""
    most = 0
    for r in range(counts.shape[0]):
        most = max(most, counts[r])
    return most


@njit(_nrt=False)
def widen(halves: I2, row: int, count: int, scratch: I2, floats: F4) -> None:  # pragma: no cover - compiled
    """floats[0, :count] = the finite float16 numbers from halves[row, 0] on, which may go on in the rows that follow.

    scratch: [1, LANES]. Beyond count, up to a multiple of LANES, floats are undefined, but finite.
    """
    vectors, width = count // LANES, halves.shape[1]
    _widen_halves(halves, row, 0, floats, 0, 0, vectors)
    if vectors * LANES < count:
        for i in range(vectors * LANES, count):
            scratch[0, i - vectors * LANES] = halves[row + i // width, i % width]
        _widen_halves(scratch, 0, 0, floats, 0, vectors * LANES, 1)


@njit(_nrt=False)
def widen_groups(
    halves: I2, row: int, count: int, scratch: I2, line: F4, floats: F4
) -> None:  # pragma: no cover - compiled
    """floats[g, n] = the finite float16 number halves[row + n, g]. line: scratch, [1, as many in all]."""
    groups = halves.shape[1]
    if groups == 1:
        widen(halves, row, count, scratch, floats)
        return
    widen(halves, row, count * groups, scratch, line)
    for n in range(count):
        for g in range(groups):
            floats[g, n] = line[0, n * groups + g]


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

    @property
    def shape(self) -> tuple[int, ...]:
        """All numbers of it that do not say where its rows lie: heads, and those from COUNT to END."""
        rows, queries = self.rows, self.queries
        heads, count = rows.key_codes_HNC.shape[:2]
        return heads, count, rows.lead, self.shift, self.first, queries.start, queries.stop


@dataclass(frozen=True, slots=True)
class PassTable:
    """What loops are told of passes.

    numbers: [P, fields] int64. tasks: of all heads and passes. stride: from one task to the next that is begun: threads
    get runs of them, and those of a large pass are to be spread among the others. slots: of partial results.
    weights: that all rows of queries have. most: keys that the longest row of each pass goes over, in all.
    """

    numbers: I8
    tasks: int
    stride: int
    slots: int
    weights: int
    most: int

    @classmethod
    def of_keys(cls, passes: Sequence[CodedPass], counts_X: I8) -> PassTable:
        """A task for every span of a pass's keys. counts_X: how many each row of queries goes over."""
        shapes = tuple([each.shape for each in passes])
        table = _lay_out(shapes, (1,) * len(passes), counts_X.tobytes(), b"")
        return table.at([each.rows.key_places.numbers for each in passes])

    @classmethod
    def of_values(cls, passes: Sequence[CodedPass], counts_X: I8, rows_X: I8, most_parts: int) -> PassTable:
        """A task for every part of a pass's values: as many spans as make so many parts, at most, of all of its rows.

        rows_X: which row of results each row of queries adds to. Parts that add to one are in different slots.
        """
        shapes = tuple([each.shape for each in passes])
        spans = [span_count(each.rows.count - each.first, each.shift) for each in passes]
        each_part = tuple([max(1, -(-count // most_parts)) for count in spans])
        table = _lay_out(shapes, each_part, counts_X.tobytes(), rows_X.tobytes())
        return table.at([each.rows.value_places.numbers for each in passes])

    def at(self, places: Sequence[tuple[int, ...]]) -> PassTable:
        """The same over coded rows that lie there: see `Places`."""
        numbers = self.numbers.copy()
        for row, place in zip(numbers, places, strict=True):
            row[:COUNT] = place
        return PassTable(numbers, self.tasks, self.stride, self.slots, self.weights, self.most)


@lru_cache(maxsize=256)  # all layers of a step ask for the same, and so do the steps that follow
def _lay_out(
    passes: tuple[tuple[int, ...], ...], spans_each: tuple[int, ...], counts: bytes, rows: bytes
) -> PassTable:
    """The table of passes of these shapes, but for where their rows lie.

    spans_each: of each pass's tasks. counts, rows: int64 of every row of queries, see `PassTable`; without rows each
    pass adds to results of its own.
    """
    counts_X = np.frombuffer(counts, np.int64)
    rows_X = np.frombuffer(rows, np.int64) if rows else np.zeros(len(counts_X), np.int64)
    numbers = np.zeros((len(passes), _FIELDS), np.int64)
    used = np.zeros(int(rows_X.max(initial=0)) + 1, np.int64)  # slots of every row of results
    tasks = weights = 0
    for row, (heads, count, lead, shift, first, begin, end), spans in zip(
        numbers, passes, spans_each, strict=True
    ):
        most = int(counts_X[begin:end].max(initial=0))
        splits, own = -(-span_count(most, shift) // spans), rows_X[begin:end]
        slot = int(used[own].max(initial=0))
        used[own] = slot + splits
        row[COUNT:SPLITS] = count, lead, shift, first, begin, end, most, tasks
        row[SPLITS:] = splits, spans, slot
        tasks += heads * splits
        weights += int(counts_X[begin:end].sum())
    stride = _spreading(tasks) if len(passes) > 1 else 1
    return PassTable(numbers, tasks, stride, int(used.max()), weights, int(numbers[:, MOST].sum()))


def passes_among(passes: Sequence[CodedPass], rows_X: I8, wanted: range) -> list[CodedPass]:
    """The passes of those rows of queries that add to wanted rows of results, which ascend within a pass."""
    some: list[CodedPass] = []
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
def pass_of(table: I8, task: int) -> int:  # pragma: no cover - compiled
    """The pass that a task belongs to."""
    number = table.shape[0] - 1
    while table[number, TASKS] > task:
        number -= 1
    return number  # type: ignore[no-any-return]


@njit()
def task_of(number: int, passes: PassTasks) -> tuple[I8, int, int]:  # pragma: no cover - compiled
    """The numbers of the pass that the `number`-th task is of, its KV head, and which of the head's tasks it is."""
    task = number * passes.stride % passes.tasks
    own = passes.table[pass_of(passes.table, task)]
    return own, (task - own[TASKS]) // own[SPLITS], (task - own[TASKS]) % own[SPLITS]


@njit()
def coded_table(
    own: I8, passes: PassTasks, head: int, row: int, scale_row: int, rows: int, scale_rows: int
) -> CodedTable:  # pragma: no cover - compiled
    """A pass's coded rows of a KV head from `row` on, so many of them, and scales and offsets from `scale_row` on."""
    scale, offset = head * own[SCALES_APART] + scale_row, head * own[OFFSETS_APART] + scale_row
    return CodedTable(
        byte_table(own[CODES] + (head * own[CODES_APART] + row) * passes.width, rows, passes.width),
        int16_table(own[SCALES] + 2 * scale * passes.groups, scale_rows, passes.groups),
        int16_table(own[OFFSETS] + 2 * offset * passes.groups, scale_rows, passes.groups),
        passes.bits,
    )
