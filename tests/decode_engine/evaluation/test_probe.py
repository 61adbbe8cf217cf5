"""The probe's figures equal those of a computation that looks at every key of every head by itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from decode_engine.evaluation.probe import LayerSample, Probe, sample_layer
from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import KeyRows, Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer
from index_store.indexes.classes import INDEX_CLASSES
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.selection.ranking import Selection
from tests.support.layers import ALL_METHODS, build_layer, with_budget

HEADS, GROUP, DIM, CONTEXT = 2, 3, 8, 300


def make_keys(count: int, seed: int = 0) -> Tensor:
    return torch.randn(HEADS, count, 2, DIM, generator=torch.Generator().manual_seed(seed)).half()


def make_queries(count: int, seed: int = 1) -> Tensor:
    return torch.randn(HEADS, count, GROUP, DIM, generator=torch.Generator().manual_seed(seed))


def make_observation(positions: int, shared: bool, tail: int = 40) -> Observation:
    """A selection of random keys of random numbers, with rubbish beyond; sinks 4, searched up to key 310."""
    generator = torch.Generator().manual_seed(2)
    sinks, search_end = 4, 310
    rows = 1 if shared else positions
    ids = torch.stack(
        [
            torch.randperm(search_end - sinks, generator=generator)[:30].sort().values + sinks
            for _ in range(HEADS * rows)
        ]
    ).view(HEADS, rows, 30)
    counts = torch.randint(1, 31, (HEADS, rows), generator=generator)
    return Observation(
        make_queries(positions),
        CONTEXT + 20,
        sinks,
        search_end,
        Selection(ids.int(), counts.int()),
        KeyRows(make_keys(CONTEXT), make_keys(tail, seed=3)),
        torch.randn(HEADS, positions, GROUP, DIM, generator=generator),
        vectors_read=50.0,
        bytes_read=1000.0,
    )


@dataclass(frozen=True)
class Expected:
    recall_H: list[float]
    mass_HG: list[list[float]]
    error: float
    bytes_read: float


def look_at_every_key(seen: Observation, row: int) -> Expected:
    """Loops in float64 over heads and keys for one position."""
    position = seen.position + row
    keys = torch.cat([seen.rows.context_HN2D, seen.rows.tail_Ht2D], dim=1)[:, : position + 1].double()
    recall, mass, outs, kept_rows = [], [], [], 0
    at = 0 if seen.selection.ids_HTK.shape[1] == 1 else row
    for head in range(HEADS):
        count = int(seen.selection.counts_HT[head, at])
        chosen = set(seen.selection.ids_HTK[head, at, :count].tolist())
        weights = [(keys[head, :, 0] @ seen.q_HTGD[head, row, g].double()).softmax(0) for g in range(GROUP)]
        searched = slice(seen.sinks, seen.search_end)
        together = torch.stack([w / w[searched].sum() for w in weights]).sum(0).tolist()
        best = sorted(range(seen.sinks, seen.search_end), key=lambda i: -together[i])[:count]
        recall.append(len(chosen & set(best)) / count)
        exact = chosen | set(range(seen.sinks)) | set(range(seen.search_end, position + 1))
        mass.append([sum(float(w[i]) for i in exact) for w in weights])
        outs.append(torch.stack([w @ keys[head, :, 1] for w in weights]))
        kept_rows += len(exact)
    full = torch.stack(outs)
    error = float((seen.out_HTGD[:, row].double() - full).norm() / full.norm())
    return Expected(recall, mass, error, kept_rows * 2 * DIM * 2 + HEADS * seen.bytes_read)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [[0], [1, 4, 5]])
def test_figures_equal_those_of_a_look_at_every_key(rows: list[int], shared: bool) -> None:
    seen = make_observation(6, shared)
    sample = sample_layer(7, seen, torch.tensor(rows))
    assert sample.layer == 7
    for t, row in enumerate(rows):
        expected = look_at_every_key(seen, row)
        assert sample.recall_HT[:, t].tolist() == pytest.approx(expected.recall_H)
        for head in range(HEADS):
            assert sample.mass_HTG[head, t].tolist() == pytest.approx(expected.mass_HG[head], abs=1e-5)
        assert float(sample.error_T[t]) == pytest.approx(expected.error, rel=1e-4)
        assert float(sample.bytes_T[t]) == expected.bytes_read
        assert float(sample.full_bytes_T[t]) == HEADS * (seen.position + row + 1) * 2 * DIM * 2
    assert sample.vectors_T.tolist() == [50.0] * len(rows)


def test_heads_that_selected_nothing_have_no_recall() -> None:
    seen = make_observation(2, shared=False)
    counts = torch.tensor([[0, 3], [0, 0]], dtype=torch.int32)
    sample = sample_layer(
        0, replace(seen, selection=replace(seen.selection, counts_HT=counts)), torch.arange(2)
    )
    assert sample.recall_HT.isnan().tolist() == [[True, False], [True, True]]
    none = replace(seen, selection=replace(seen.selection, counts_HT=torch.zeros_like(counts)))
    assert sample_layer(0, none, torch.arange(2)).recall_HT.isnan().all()


def sparse_layer(method: Method) -> SparseLayer:
    kv = make_keys(CONTEXT)
    assert method.index is not None
    index = INDEX_CLASSES[method.index.kind].from_arrays(method.index.parameters, {}, kv)
    return SparseLayer(kv, LayerSearch(index), method, Figures())


class FakeSession:
    """Layers without a model."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers


def probe_oracle(keep: float, steps: int, positions: set[int]) -> list[LayerSample]:
    """Feeds a layer of the oracle `steps` tokens, all at once when the number is even, else one by one."""
    method = get_method("oracle", keep)
    layer = sparse_layer(method)
    probe = Probe(positions)
    layers = [DenseLayer(make_keys(CONTEXT), Figures()), layer]
    probe.attach(cast(Session, FakeSession(layers)))
    queries, tail = make_queries(steps) * 2, make_keys(steps, seed=5)
    pieces = [slice(0, steps)] if steps % 2 == 0 else [slice(i, i + 1) for i in range(steps)]
    for piece in pieces:
        layer.attend(queries[:, piece], tail[:, piece, 0], tail[:, piece, 1], CONTEXT + piece.start)
    return probe.samples


@pytest.mark.parametrize("steps", [20, 21], ids=["one pass", "step by step"])
def test_the_oracle_finds_every_top_key(steps: int) -> None:
    positions = {CONTEXT, CONTEXT + 3, CONTEXT + 19, CONTEXT + 99}
    samples = probe_oracle(0.05, steps, positions)
    assert {sample.layer for sample in samples} == {1}
    recall = torch.cat([sample.recall_HT for sample in samples], dim=1)
    assert recall.shape == (HEADS, 3)
    assert torch.equal(recall, torch.ones(HEADS, 3))
    mass = torch.cat([sample.mass_HTG for sample in samples], dim=1)
    assert float(mass.min()) > 0.2
    assert float(mass.max()) < 1.0
    assert all(float(sample.error_T.min()) > 0.0 for sample in samples)


def test_everything_kept_captures_everything() -> None:
    (sample,) = probe_oracle(1.0, 8, {CONTEXT + 7})
    assert torch.allclose(sample.mass_HTG, torch.ones(HEADS, 1, GROUP), atol=1e-5)
    assert float(sample.error_T) < 1e-5
    assert float(sample.recall_HT.min()) == 1.0


def test_bytes_of_the_remainder_and_of_silent_indexes_count() -> None:
    seen = make_observation(1, shared=False)
    plain = sample_layer(0, seen, torch.tensor([0]))
    more = sample_layer(0, replace(seen, bytes_read=0.0, remainder_bytes=123.0), torch.tensor([0]))
    assert float(plain.search_bytes_T) == HEADS * 1000
    assert float(more.search_bytes_T) == HEADS * 50 * DIM * 4
    assert float(more.remainder_bytes_T) == HEADS * 123
    assert float(more.exact_bytes_T) == float(plain.exact_bytes_T)
    assert float(more.tokens_T) == CONTEXT + 21


ROW, KEY = 2 * DIM * 2, DIM * 2
"""Bytes of a key with its value, and of a key, in float16."""

BITS = {"refined": (4, 4), "refined-3": (3, 3)}


def clusters_of(layer: SparseLayer) -> int:
    index = layer._indexes[-1]
    return int(index.arrays()["counts"].shape[1])


@pytest.mark.parametrize("name", ALL_METHODS)
def test_bytes_equal_a_count_by_hand(name: str) -> None:
    """A first step after the context: nothing is appended, the search goes from the sinks to the recent window."""
    method = with_budget(ALL_METHODS[name], 0.1)
    method = replace(method, sinks=8, recent=32, append_block=1)
    layer = build_layer(method, make_keys(CONTEXT), GROUP)
    probe = Probe({CONTEXT})
    probe.attach(cast(Session, FakeSession([layer])))
    new = make_keys(1, seed=9)
    layer.attend(make_queries(1), new[:, :, 0], new[:, :, 1], CONTEXT)
    (sample,) = probe.samples
    searched = CONTEXT - 32 - 8
    kept = layer._figures.kept
    assert float(sample.exact_bytes_T) == (kept + HEADS * (8 + 32 + 1)) * ROW
    assert float(sample.full_bytes_T) == HEADS * (CONTEXT + 1) * ROW
    assert float(sample.tokens_T) == CONTEXT + 1

    assert method.index is not None
    kind = method.index.kind
    arrays = layer._index.arrays()
    coarse_key = BITS.get(name, (4, 4))[0] * DIM / 8 + 4 * DIM / 128
    coarse_value = BITS.get(name, (4, 4))[1] * DIM / 8 + 4
    by_hand = {
        "exact": lambda: searched * KEY,
        "pages": lambda: 2 * -(-searched // 4) * DIM * 2,
        "product_codes": lambda: searched * 4 + 4 * 256 * (DIM // 4) * 4,
        "coarse_rows": lambda: searched * coarse_key,
        "query_tables": lambda: 4 * GROUP * searched,
        "key_clusters": lambda: arrays["counts"].shape[1] * DIM * 4,
    }
    if kind in by_hand and "ids" not in arrays:
        assert float(sample.search_bytes_T) == pytest.approx(HEADS * by_hand[kind]())
    moments = {"none": 0, "diagonal": DIM, "full": DIM + DIM * DIM}[method.remainder.moments]
    if method.remainder.name == "dropped":
        assert float(sample.remainder_bytes_T) == 0
    elif method.remainder.name == "coarse":
        own = method.partition is None
        expected = searched * (coarse_value + (0 if own else coarse_key))
        assert float(sample.remainder_bytes_T) == pytest.approx(HEADS * expected)
    elif "coarse_counts" not in layer._indexes[-1].arrays():
        means = 0 if method.partition is None else DIM
        each = 4 * (1 + DIM + means + moments)
        assert float(sample.remainder_bytes_T) == HEADS * clusters_of(layer) * each


def test_positions_that_nobody_asked_for_leave_nothing() -> None:
    assert probe_oracle(0.05, 8, {CONTEXT + 8, 3}) == []
