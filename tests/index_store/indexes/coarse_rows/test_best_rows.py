"""The step that scores, chooses and attends in one go equals its parts, and what is made of them by rankings."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.indexes.coarse_rows import best_keys_numba
from index_store.indexes.coarse_rows import index as coarse_index
from index_store.indexes.coarse_rows.best_keys_numba import Columns, take_best
from index_store.indexes.coarse_rows.coded_passes_numba import SPAN, CodedPass, Spans, span_count
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.key_scores_numba import score_keys, weigh
from index_store.indexes.coarse_rows.reference import take_best_reference, weigh_reference
from index_store.indexes.interface.layer_index import Asked, Best, LayerSource
from index_store.methods.index_specs import INDEX_SPECS
from index_store.selection.budgets import COARSE, TokenCount
from index_store.selection.cutting import cut
from index_store.selection.remainder_states import ExactKeys, remainder_state

HEADS, GROUP = 2, 3


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


@pytest.mark.parametrize("threads", [0, 1000])
@pytest.mark.parametrize(
    ("count", "shift", "keep"), [(1, 0, 1), (100, 7, 9), (2 * SPAN + 77, 19, 40), (60, 0, 60)]
)
def test_the_best_keys_are_those_of_the_reference(
    count: int, shift: int, keep: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether a thread has whole rows or spans of them."""
    monkeypatch.setattr(best_keys_numba, "thread_count", lambda: threads)
    weights, peaks, totals = weigh_reference(5 * random(HEADS, GROUP, count), shift)
    ids, left = take_best_reference(weights, peaks, totals, shift, keep)
    columns = Columns.of(count, 0, shift, 0)
    line = torch.full((HEADS, GROUP, columns.room), torch.nan)
    here = slice(columns.lead, columns.lead + count)
    line[..., here] = weights
    spans = Spans(peaks.numpy(), totals.numpy(), np.arange(GROUP), np.zeros(GROUP, np.int64))
    found, counts = torch.zeros(HEADS, 1, keep, dtype=torch.int32), torch.zeros(HEADS, 1, dtype=torch.int32)
    places = columns.lead + columns.room * np.arange(HEADS * GROUP).reshape(HEADS, 1, GROUP)
    take_best(line.flatten().numpy(), places, spans, [columns], [keep], found, counts)
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
