"""Passes over several tables in one launch find what each finds by itself, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.indexes.coarse_rows import value_sums_numba
from index_store.indexes.coarse_rows.coded_passes_numba import (
    BEGIN,
    EACH,
    END,
    SLOT,
    SPAN,
    SPLITS,
    TASKS,
    CodedPass,
    PassTable,
    Spans,
    pass_of,
)
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.key_scores_numba import score_keys
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.value_sums_numba import add_values

HEADS, HEAD_DIM = 2, 64
TABLES = ((5000, 0, 4), (128, 5000, 0), (300, 5000, 0), (5000, 0, 1500), (2100, 5000, 0))
"""Rows of each table, the id of the first one, and the row that its pass begins with."""
QUERIES = (6, 2, 2, 3, 1)
RESULTS = ((0, 1, 2, 3, 4, 5), (0, 1), (2, 3), (6, 7, 8), (7,))
"""Rows of results that the rows of queries of each pass add to."""


def coded(count: int, first_id: int) -> ScalarRows:
    generator = torch.Generator().manual_seed(count + first_id)
    return code_rows(torch.randn(HEADS, count, 2, HEAD_DIM, generator=generator), first_id, 4, 4, 1)


def make_passes() -> list[CodedPass]:
    begins = np.cumsum((0, *QUERIES))
    return [
        CodedPass(coded(count, first_id), first, range(begins[number], begins[number + 1]))
        for number, (count, first_id, first) in enumerate(TABLES)
    ]


def layout(passes: list[CodedPass]) -> tuple[RowsInLine, Spans]:
    """Room for the weights of all passes: rows of one go over fewer keys the later they come."""
    counts = [
        max(0, each.rows.count - each.first - 40 * number)
        for each in passes
        for number in range(len(each.queries))
    ]
    width = max(counts) + 64
    rows = len(counts)
    places = np.arange(HEADS * rows).reshape(HEADS, rows) * width + 16
    line = np.full(HEADS * rows * width, np.nan, np.float32)
    results = np.array([row for own in RESULTS for row in own])
    first = np.array([4 if number in (1, 2, 4) else 0 for number in range(5) for _ in RESULTS[number]])
    spans = Spans.empty(HEADS, 1 + int(results.max()), 6).of(results, first)
    return RowsInLine(line, places, np.array(counts)), spans


def alone(each: CodedPass, weights: RowsInLine, spans: Spans) -> tuple[CodedPass, RowsInLine, Spans]:
    """A pass by itself, with the same room."""
    own = slice(each.queries.start, each.queries.stop)
    few = RowsInLine(weights.numbers, weights.places_HR[:, own], weights.counts_R[own])
    empty = Spans.empty(HEADS, spans.peaks_HRS.shape[1], spans.peaks_HRS.shape[2])
    again = CodedPass(each.rows, each.first, range(len(each.queries)))
    return again, few, empty.of(spans.rows_R[own], spans.first_R[own])


def test_scores_of_several_tables_are_those_of_each() -> None:
    passes = make_passes()
    queries = torch.randn(HEADS, sum(QUERIES), HEAD_DIM, generator=torch.Generator().manual_seed(1)) / 8
    weights, spans = layout(passes)
    score_keys(passes, queries, weights, spans)
    together = weights.numbers.copy()
    weights.numbers[:] = np.nan
    peaks, totals = np.full_like(spans.peaks_HRS, -np.inf), np.zeros_like(spans.totals_HRS)
    for each in passes:
        again, few, own = alone(each, weights, spans)
        score_keys([again], queries[:, each.queries.start : each.queries.stop], few, own)
        peaks, totals = np.maximum(peaks, own.peaks_HRS), totals + own.totals_HRS
    assert np.array_equal(weights.numbers, together, equal_nan=True)
    assert int((~np.isnan(together)).sum()) == HEADS * weights.counts_R.sum()
    assert np.array_equal(spans.peaks_HRS, peaks)
    assert np.array_equal(spans.totals_HRS, totals)


@pytest.mark.parametrize("most_rows", [256, 4])  # of one launch
def test_values_of_several_tables_are_those_of_each(most_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of results to which two passes add are the union of both."""
    monkeypatch.setattr(value_sums_numba, "_MOST_ROWS", most_rows)
    passes = make_passes()
    queries = torch.randn(HEADS, sum(QUERIES), HEAD_DIM, generator=torch.Generator().manual_seed(2)) / 8
    weights, spans = layout(passes)
    score_keys(passes, queries, weights, spans)
    together = add_values(passes, weights, spans)
    states = []
    for each in passes:
        again, few, own = alone(each, weights, spans)
        own.peaks_HRS[:], own.totals_HRS[:] = spans.peaks_HRS, spans.totals_HRS
        states.append(add_values([again], few, own))
    merged = states[0]
    for state in states[1:]:
        merged = merged.merge(state)
    torch.testing.assert_close(together.out, merged.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(together.lse, merged.lse, rtol=1e-6, atol=1e-6)
    for row in (4, 5, 6, 8):  # of one pass alone
        number = next(number for number, own in enumerate(RESULTS) if row in own)
        assert torch.equal(together.out[:, row], states[number].out[:, row])
        assert torch.equal(together.lse[:, row], states[number].lse[:, row])


def test_every_task_is_begun_once_and_parts_of_a_row_have_slots_of_their_own() -> None:
    passes = make_passes()
    weights, spans = layout(passes)
    for table in (
        PassTable.of_keys(passes, weights.counts_R),
        PassTable.of_values(passes, weights.counts_R, spans.rows_R, 2),
    ):
        begun = [number * table.stride % table.tasks for number in range(table.tasks)]
        assert sorted(begun) == list(range(table.tasks))
        for number, own in enumerate(table.numbers):
            for task in range(own[TASKS], own[TASKS] + HEADS * own[SPLITS]):
                assert pass_of.py_func(table.numbers, task) == number
    assert [own[SPLITS] for own in table.numbers] == [2, 1, 1, 2, 2]
    assert [own[EACH] for own in table.numbers] == [-(-3 // 2), 1, 1, -(-3 // 2), 1]
    taken = [
        (row, own[SLOT] + part)
        for own in table.numbers
        for row in spans.rows_R[own[BEGIN] : own[END]]
        for part in range(own[SPLITS])
    ]
    assert len(taken) == len(set(taken))
    assert max(slot for _, slot in taken) < table.slots <= 4
    assert SPAN < 2100  # the last table has two spans


def test_passes_over_nothing_leave_everything_as_it_was() -> None:
    rows = coded(300, 0)
    weights = RowsInLine(np.zeros(64, np.float32), np.zeros((HEADS, 2), np.int64), np.zeros(2, np.int64))
    spans = Spans.empty(HEADS, 2, 1)
    passes = [CodedPass(rows, 0, range(1)), CodedPass(rows, 300, range(1, 2))]
    score_keys(passes, torch.zeros(HEADS, 2, HEAD_DIM), weights, spans)
    state = add_values(passes, weights, spans)
    assert (state.lse == -torch.inf).all()
    assert not state.out.any()
    assert not weights.numbers.any()
