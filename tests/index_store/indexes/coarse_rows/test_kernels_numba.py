"""The compiled loops over scalar codes equal their eager references, row by row whatever stands beside a row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.attention.vectors.bytes_numba import instruction_sets, make_block_product
from index_store.attention.vectors.code import LANES
from index_store.indexes.coarse_rows import coded_steps_numba
from index_store.indexes.coarse_rows import index as coarse_index
from index_store.indexes.coarse_rows.best_keys_numba import Columns
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
    span_count,
)
from index_store.indexes.coarse_rows.coded_steps_numba import (
    BestColumns,
    add_values,
    attend_values,
    score_keys,
    take_best,
)
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.key_scores_numba import weigh
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.reference import (
    attend_values_reference,
    score_keys_reference,
    take_best_reference,
    weigh_reference,
)
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.value_sums_numba import NEGLIGIBLE
from index_store.indexes.interface.layer_index import Asked, Best, LayerSource
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import COARSE, TokenCount
from index_store.selection.cutting import cut
from index_store.selection.remainder_states import ExactKeys, remainder_state
from tests.support.devices import crossed

HEADS = 2


def coded(count: int, head_dim: int, bits: tuple[int, int], groups: int = 1, first_id: int = 0) -> ScalarRows:
    generator = torch.Generator().manual_seed(count + head_dim)
    spread = torch.rand(HEADS, 1, 2, head_dim, generator=generator) * 3
    kv = torch.randn(HEADS, count, 2, head_dim, generator=generator) * spread + spread
    return code_rows(kv, first_id, *bits, groups)


def queries(rows: int, head_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(HEADS, rows, head_dim, generator=generator) * head_dim**-0.5


def score(rows: ScalarRows, q_HRD: Tensor, first: int, out_HRX: Tensor) -> None:
    score_keys([CodedPass(rows, first, range(q_HRD.shape[1]))], q_HRD, RowsInLine.of([out_HRX]))


def attend(
    rows: ScalarRows, logits_HRX: Tensor, first: int, elsewhere_HR: Tensor | None = None
) -> AttentionState:
    """Of a copy, since logits become weights."""
    return attend_values(rows, RowsInLine.of([logits_HRX.clone()]), first, elsewhere_HR)


def score_bound(rows: ScalarRows, q_HRD: Tensor) -> Tensor:
    """[H, R, 1]: what rounding queries to 127 units may do to a logit."""
    units = (q_HRD[:, :, None].abs() * rows.key_scales_HBD[:, None].float()).amax(dim=(2, 3)) / 127
    return units[..., None] * (2**rows.key_bits - 1) / 4 * q_HRD.shape[2] + 1e-4


@crossed(
    {
        "bits": [2, 3, 4],
        "head_dim": [32, 40, 64, 80, 96, 128, 256],
        "count, first, end, lead": [(1, 0, 1, 0), (500, 4, 500, 0), (300, 127, 263, 77), (63, 0, 63, 100)],
        "row_count": [1, 6, 33],
    }
)
def test_scores_equal_the_reference(
    bits: int, head_dim: int, count: int, first: int, end: int, lead: int, row_count: int
) -> None:
    rows, q = coded(count, head_dim, (bits, 4), first_id=lead), queries(row_count, head_dim)
    out = torch.full((HEADS, row_count, end - first + 3), torch.nan)
    expected = torch.empty(HEADS, row_count, end - first)
    score(rows, q, first, out[..., 2:-1])
    score_keys_reference(rows, q, first, end, expected)
    assert out[..., [0, 1, -1]].isnan().all()
    error = (out[..., 2:-1] - expected).abs()
    assert (error <= score_bound(rows, q)).all()
    if error.numel() > 100:  # signs of errors differ
        assert error.mean() < 0.4 * head_dim**-0.5 * score_bound(rows, q).mean()


@crossed(
    {
        "bits": [2, 3, 4],
        "head_dim, groups": [(32, 1), (40, 1), (80, 5), (96, 3), (128, 1), (256, 2)],
        "count, first": [(1, 0), (2300, 4), (63, 100)],
        "row_count": [1, 6, 33],
    }
)
def test_attention_equals_the_reference(
    bits: int, head_dim: int, groups: int, count: int, first: int, row_count: int
) -> None:
    rows = coded(count + first + 1, head_dim, (4, bits), groups)
    logits = 2 * count**0.5 * queries(row_count, count)
    logits[:, :, 5::7] = -torch.inf
    logits[:, 0] = -torch.inf  # nothing counts
    found, expected = attend(rows, logits, first), attend_values_reference(rows, logits, first)
    assert (found.out[:, 0] == 0).all()
    assert (found.lse[:, 0] == -torch.inf).all()
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    # A weight is off by half a unit, which is 1/127 of the largest in its tile of 128.
    steps = rows.value_scales_HNV[:, first : first + count].float().amax(dim=(1, 2))[:, None, None]
    shares = torch.exp(logits - expected.lse[..., None]).nan_to_num_(0)
    units = sum(tile.amax(-1, keepdim=True) * tile.shape[-1] for tile in shares.split(128, dim=-1)) / 127
    bound = steps * units * (2**bits - 1) / 4 + 1e-4
    error = (found.out - expected.out).abs()
    assert (error <= bound).all()
    assert error.mean() < 0.15 * bound.mean() + 1e-4


@pytest.mark.parametrize("first", [0, 37])
def test_values_of_next_to_no_weight_are_not_read(first: int) -> None:
    """Row by row; keys that count elsewhere count for what is next to nothing."""
    rows = coded(1000 + first, 64, (4, 4))
    logits = queries(3, 1000)
    begin = BLOCK - first % BLOCK  # of the first whole block
    for number, below in ((0, 9.0), (3, 2.0), (4, 9.0)):
        logits[:, :2, begin + number * BLOCK :][..., :BLOCK] -= below
    poisoned = replace(rows, value_scales_HNV=rows.value_scales_HNV.clone())
    for number in (0, 4):
        poisoned.value_scales_HNV[:, first + begin + number * BLOCK :][:, :BLOCK] = torch.nan
    found = attend(poisoned, logits, first)
    assert found.out[:, :2].isfinite().all()
    assert found.out[:, 2].isnan().all()  # whose attention is flat
    whole, weights = logits.logsumexp(-1, keepdim=True), logits.softmax(-1)
    values = rows.decode_values(first, first + 1000)
    largest = 2 * NEGLIGIBLE * float(values.abs().max())
    assert float((found.out - weights @ values)[:, :2].abs().max()) < largest
    lost = 1 - (found.lse - whole[..., 0]).exp()[:, :2]
    assert float(lost.min()) > 0
    assert float(lost.max()) < NEGLIGIBLE
    beside = attend(rows, logits, first, whole[..., 0] + 20)
    assert (beside.lse == -torch.inf).all()
    assert (beside.out == 0).all()


def test_many_rows_are_attended_in_several_launches() -> None:
    rows = coded(200, 32, (4, 4))
    logits = queries(300, 200)
    torch.testing.assert_close(
        attend(rows, logits, 0).out, attend_values_reference(rows, logits, 0).out, atol=0.02, rtol=0
    )


def test_no_keys_and_no_rows_are_an_empty_state() -> None:
    rows = coded(5, 32, (4, 4))
    score(rows, queries(2, 32), 3, torch.empty(HEADS, 2, 0))
    for shape in ((HEADS, 2, 0), (HEADS, 0, 4)):
        state = attend(rows, torch.empty(shape), 0)
        assert state.out.shape == (*shape[:2], 32)
        assert (state.lse == -torch.inf).all()


def test_rows_of_several_tensors_are_scored_and_attended_as_alone() -> None:
    """Sessions search up to where each of them is, and their logits are columns of what each has."""
    rows, q = coded(2500, 64, (4, 4)), queries(37, 64)
    line = torch.full((HEADS * 37 * 2503,), torch.nan)
    shapes = ((HEADS, 30, 2300), (HEADS, 1, 2496), (HEADS, 6, 64))
    parts, place = [], 5
    for heads, count, columns in shapes:
        whole = line[place : place + heads * count * (columns + 3)].view(heads, count, columns + 3)
        parts.append(whole[..., 2:-1])
        place += whole.numel() + 1
    score_keys([CodedPass(rows, 4, range(37))], q, RowsInLine.of(parts))
    assert int((~line.isnan()).sum()) == sum(part.numel() for part in parts)
    logits = [part.clone() for part in parts]
    state = attend_values(rows, RowsInLine.of(parts), 4)
    first = 0
    for part in logits:
        own = slice(first, first + part.shape[1])
        alone = torch.empty(part.shape)
        score(rows, q[:, own], 4, alone)
        assert torch.equal(alone, part)
        by_itself = attend(rows, alone, 4)
        assert torch.equal(by_itself.out, state.out[:, own])
        assert torch.equal(by_itself.lse, state.lse[:, own])
        first = own.stop


def test_rows_that_no_line_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected rows in one"):
        RowsInLine.of([torch.empty(2, 5, HEADS).transpose(1, 2)])
    with pytest.raises(ValueError, match="2 pieces of memory"):
        RowsInLine.of([torch.empty(HEADS, 2, 5), torch.empty(HEADS, 2, 5)])


@pytest.mark.parametrize("sets", [frozenset(), frozenset({"avx2"}), instruction_sets()])
def test_products_of_bytes_are_exact_with_any_instructions(sets: frozenset[str]) -> None:
    if not sets <= instruction_sets():
        sets = frozenset()  # what this processor lacks cannot run
    block = make_block_product(4, 1, sets)

    @njit
    def run(codes, weights, sums):  # type: ignore[no-untyped-def]
        block(codes, 0, weights, 0, len(codes), sums, 0, 0)

    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (9, LANES, 4), dtype=np.uint8)
    codes[0] = 15
    weights = generator.integers(-127, 128, (4, 9, 4), dtype=np.int8)
    weights[:2, 0] = [[127] * 4, [-127] * 4]
    sums = np.empty((4, LANES), np.int32)
    run(codes.view(np.uint32)[..., 0], weights.reshape(4, -1), sums)
    expected = np.einsum("knb,rkb->rn", codes.astype(np.int32), weights.astype(np.int32))
    assert (sums == expected).all()


HEAD_DIM = 64
TABLES = ((5000, 0, 4), (128, 5000, 0), (300, 5000, 0), (5000, 0, 1500), (2100, 5000, 0))
"""Rows of each table, the id of the first one, and the row that its pass begins with."""
QUERIES = (6, 2, 2, 3, 1)
RESULTS = ((0, 1, 2, 3, 4, 5), (0, 1), (2, 3), (6, 7, 8), (7,))
"""Rows of results that the rows of queries of each pass add to."""


def coded_table(count: int, first_id: int) -> ScalarRows:
    generator = torch.Generator().manual_seed(count + first_id)
    return code_rows(torch.randn(HEADS, count, 2, HEAD_DIM, generator=generator), first_id, 4, 4, 1)


def make_passes() -> list[CodedPass]:
    begins = np.cumsum((0, *QUERIES))
    return [
        CodedPass(coded_table(count, first_id), first, range(begins[number], begins[number + 1]))
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


def added(passes: list[CodedPass], weights: RowsInLine, spans: Spans) -> AttentionState:
    state = AttentionState.empty((HEADS, spans.peaks_HRS.shape[1]), HEAD_DIM)
    add_values(passes, weights, spans, state)
    return state


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
    monkeypatch.setattr(coded_steps_numba, "_MOST_ROWS", most_rows)
    passes = make_passes()
    queries = torch.randn(HEADS, sum(QUERIES), HEAD_DIM, generator=torch.Generator().manual_seed(2)) / 8
    weights, spans = layout(passes)
    score_keys(passes, queries, weights, spans)
    together = added(passes, weights, spans)
    states = []
    for each in passes:
        again, few, own = alone(each, weights, spans)
        own.peaks_HRS[:], own.totals_HRS[:] = spans.peaks_HRS, spans.totals_HRS
        states.append(added([again], few, own))
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
    rows = coded_table(300, 0)
    weights = RowsInLine(np.zeros(64, np.float32), np.zeros((HEADS, 2), np.int64), np.zeros(2, np.int64))
    spans = Spans.empty(HEADS, 2, 1)
    passes = [CodedPass(rows, 0, range(1)), CodedPass(rows, 300, range(1, 2))]
    score_keys(passes, torch.zeros(HEADS, 2, HEAD_DIM), weights, spans)
    state = added(passes, weights, spans)
    assert (state.lse == -torch.inf).all()
    assert not state.out.any()
    assert not weights.numbers.any()


GROUP = 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("count", "shift"), [(1, 0), (15, 3), (SPAN, 0), (SPAN, 5), (2 * SPAN + 77, SPAN - 1)]
)
def test_weights_equal_the_reference(count: int, shift: int) -> None:
    logits = 4 * random(HEADS, 5, count)
    logits[:, :, 2::7] = -torch.inf
    logits[:, 1] = -torch.inf
    logits[:, 2, ::3] -= 200  # too little to be a float32 number beside the others
    weights, peaks, totals = weigh_reference(logits, shift)
    spans = Spans.empty(HEADS, 5, span_count(count, shift))
    weigh(RowsInLine.of([logits]), shift, spans)
    torch.testing.assert_close(logits, weights, rtol=1e-5, atol=1e-37)
    assert np.array_equal(spans.peaks_HRS, peaks.numpy())
    torch.testing.assert_close(torch.from_numpy(spans.totals_HRS), totals, rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows_each", [0, 1000])
@pytest.mark.parametrize(
    ("count", "shift", "keep"), [(1, 0, 1), (100, 7, 9), (2 * SPAN + 77, 19, 40), (60, 0, 60)]
)
def test_the_best_keys_are_those_of_the_reference(
    count: int, shift: int, keep: int, rows_each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a thread has whole rows or spans of them."""
    monkeypatch.setattr(coded_steps_numba, "_ROWS_EACH", rows_each)
    weights, peaks, totals = weigh_reference(5 * random(HEADS, GROUP, count), shift)
    ids, left = take_best_reference(weights, peaks, totals, shift, keep)
    columns = Columns.of(count, 0, shift, 0)
    line = torch.full((HEADS, GROUP, columns.room), torch.nan)
    here = slice(columns.lead, columns.lead + count)
    line[..., here] = weights
    spans = Spans(peaks.numpy(), totals.numpy(), np.arange(GROUP), np.zeros(GROUP, np.int64))
    found, counts = torch.zeros(HEADS, 1, keep, dtype=torch.int32), torch.zeros(HEADS, 1, dtype=torch.int32)
    places = columns.lead + columns.room * np.arange(HEADS * GROUP).reshape(HEADS, 1, GROUP)
    take_best(line.flatten().numpy(), spans, BestColumns(places, [columns], [keep], found, counts))
    assert (counts == keep).all()
    assert torch.equal(found[:, 0], ids)
    assert torch.equal(line[..., here], left)


def build(count: int, head_dim: int, bits: int = 4) -> CoarseRows:
    kv = random(HEADS, count, 2, head_dim, seed=count)
    source = SimpleNamespace(kv_HN2D=kv, keys_HND=kv[:, :, 0], values_HND=kv[:, :, 1])
    parameters = {**INDEX_SPECS["coarse_rows"].parameters, "key_bits": bits, "value_bits": bits}
    assert LayerSource.__dataclass_fields__.keys() >= {"kv_HN2D"}
    return CoarseRows.build(parameters, source, 0)  # type: ignore[arg-type]


def ask(index: CoarseRows, first: int, end: int, head_dim: int, seed: int) -> Asked:
    """Keys first..end-1, of which those that the context does not have are the session's own."""
    own = max(0, end - index.key_count)
    appended = index.start_appending() if own else None
    if appended is not None:
        appended.append(random(HEADS, own, 2, head_dim, seed=seed))
    queries = 3 * head_dim**-0.5 * random(HEADS, 1, GROUP, head_dim, seed=seed)
    return Asked(queries, first, end, appended, {}, end)


def by_rankings(index: CoarseRows, asked: Asked, keep: int) -> Best:
    """The general way."""
    ranking = index.rank(
        asked.queries_HTGD, asked.first_key, asked.end_key, asked.appended, {}, asked.position
    )
    selection = cut(TokenCount(keep), ranking, None)  # type: ignore[arg-type]
    read = sum(piece.remainder_bytes("none", True) for piece in ranking.pieces)
    width = torch.arange(selection.ids_HTK.shape[2])
    nothing = torch.empty(0)
    exact = ExactKeys(selection.ids_HTK, width < selection.counts_HT[..., None], nothing, nothing)
    others = remainder_state(COARSE, ranking.pieces, [exact])
    assert others is not None
    totals = ([ranking.vectors_read], [ranking.bytes_read], [read])
    return Best(selection.ids_HTK, selection.counts_HT, others, *totals)


def listed(best: Best) -> list[list[int]]:
    """Selected keys of every KV head, of one session."""
    counted = zip(best.ids_HSK[:, 0].tolist(), best.counts_HS[:, 0].tolist(), strict=True)
    return [ids[:count] for ids, count in counted]


SESSIONS = [(4, 700, 10), (4, 5000, 1), (0, 5000, 5000), (9, 5128, 300), (4, 5256, 40), (1900, 2100, 7)]
"""First and last searched key of sessions on a context of 5,000, and how many each keeps."""


@pytest.mark.parametrize(("head_dim", "bits"), [(32, 4), (40, 2), (128, 4), (64, 3)])
def test_a_step_equals_the_way_by_rankings(head_dim: int, bits: int) -> None:
    index = build(5000, head_dim, bits)
    asked = [ask(index, first, end, head_dim, seed) for seed, (first, end, _) in enumerate(SESSIONS)]
    keeps = [keep for *_, keep in SESSIONS]
    together = index.best_together(asked, keeps)
    for number, (one, keep) in enumerate(zip(asked, keeps, strict=True)):
        best, general = together.of([number]), by_rankings(index, one, keep)
        assert listed(best) == listed(general)
        assert together.kept[number] == sum(map(len, listed(general)))
        # The weights of a tile are rounded to 127 units, where tiles begin elsewhere.
        torch.testing.assert_close(best.others.out, general.others.out, rtol=0, atol=0.02)
        torch.testing.assert_close(best.others.lse, general.others.lse, rtol=1e-5, atol=1e-4)
        assert best.vectors_read == general.vectors_read
        assert best.bytes_read == pytest.approx(general.bytes_read)
        assert best.remainder_bytes == pytest.approx(general.remainder_bytes)


def test_a_session_gets_the_bits_that_it_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when KV heads are taken one after the other, because there are many weights."""
    index = build(5000, 32)
    asked = [ask(index, first, end, 32, seed) for seed, (first, end, _) in enumerate(SESSIONS)]
    keeps = [keep for *_, keep in SESSIONS]
    together = index.best_together(asked, keeps)
    monkeypatch.setattr(coarse_index, "_WEIGHTS", 10)
    monkeypatch.setattr(coarse_index, "thread_count", lambda: 1)
    for number, (one, keep) in enumerate(zip(asked, keeps, strict=True)):
        best, alone = together.of([number]), index.best_together([one], [keep])
        assert listed(alone) == listed(best)
        assert torch.equal(alone.others.out, best.others.out)
        assert torch.equal(alone.others.lse, best.others.lse)


def test_many_sessions_get_the_bits_that_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows of queries than one launch adds values of, every other session with rows of its own."""
    index = build(1500, 32)
    ends = [1500 if number % 2 else 1501 + number for number in range(90)]
    assert len(ends) * GROUP > coded_steps_numba._MOST_ROWS
    asked = [ask(index, 4, end, 32, seed) for seed, end in enumerate(ends)]
    keeps = [1 + number % 40 for number in range(90)]
    together = index.best_together(asked, keeps)
    monkeypatch.setattr(coded_steps_numba, "thread_count", lambda: 1)
    alone = index.best_together(asked, keeps)
    assert torch.equal(alone.ids_HSK, together.ids_HSK)
    assert torch.equal(alone.others.out, together.others.out)
    for number in (0, 1, 84, 85, 86, 89):  # of rows 252 to 260, the first launch has the first four
        best, single = together.of([number]), index.best_together([asked[number]], [keeps[number]])
        assert listed(single) == listed(best)
        assert torch.equal(single.others.out, best.others.out)
        assert torch.equal(single.others.lse, best.others.lse)


def test_nothing_is_left_of_keys_that_are_all_kept() -> None:
    index = build(300, 32)
    asked = [ask(index, 4, 300, 32, 0), ask(index, 4, 4, 32, 1)]
    best = index.best_together(asked, [296, 5])
    assert listed(best.of([0])) == [list(range(4, 300))] * HEADS
    assert best.kept == [296 * HEADS, 0]
    assert (best.others.lse == -torch.inf).all()
    assert (best.others.out == 0).all()


def test_a_peak_that_is_kept_leaves_the_others_their_weights() -> None:
    """Weights are relative to their span's largest: what is much smaller than that counts in the spans without it."""
    index = build(3 * SPAN, 32)
    asked = ask(index, 0, 3 * SPAN, 32, 0)
    key = index.rows.decode_keys(SPAN, SPAN + 1)[:, 0]
    queries = 0.02 * asked.queries_HTGD + 60 * (key / key.square().sum(-1, keepdim=True))[:, None, None]
    peaked = Asked(queries, 0, 3 * SPAN, None, {}, 0)
    best, general = index.best_together([peaked], [1]), by_rankings(index, peaked, 1)
    assert (best.ids_HSK == SPAN).all()
    torch.testing.assert_close(best.others.lse, general.others.lse, rtol=0, atol=1e-3)


def test_scores_do_not_depend_on_whether_they_are_weighed() -> None:
    rows = build(2500, 64).rows
    queries = random(HEADS, 5, 64)
    logits, weights = torch.empty(HEADS, 5, 2400), torch.empty(HEADS, 5, 2400)
    whole = [CodedPass(rows, 7, range(5))]
    score_keys(whole, queries, RowsInLine.of([logits]))
    spans = Spans.empty(HEADS, 5, span_count(2400, 7))
    score_keys(whole, queries, RowsInLine.of([weights]), spans)
    expected, peaks, _ = weigh_reference(logits, 7)
    assert np.array_equal(spans.peaks_HRS, peaks.numpy())
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-37)
