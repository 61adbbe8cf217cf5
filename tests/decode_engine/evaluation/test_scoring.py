"""Scores follow from predictions as documented, the figures of probes from looking at every key; memory of commands."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from decode_engine.evaluation import machine
from decode_engine.evaluation.machine import arena_for
from decode_engine.evaluation.probe import LayerSample, Probe, sample_layer
from decode_engine.evaluation.scoring import (
    Segment,
    reference_log_probs,
    score_segment,
    seconds_per_token,
)
from decode_engine.evaluation.summary import StoredBytes, cluster_mean
from decode_engine.evaluation.tasks.documents import held_out_text
from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import KeyRows, Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.command_options import Prompts
from index_store.cli.console import LineReporter
from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import load_tokenizer, resolve_model
from index_store.selection.ranking import Selection
from index_store.store.catalog import Store
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import run_job
from tests.decode_engine.evaluation.evaluation_samples import ALL, FULL, SOME, SPARSE, make_tally
from tests.index_store.methods.test_methods import context as context_with_all_indexes
from tests.support.layers import ALL_METHODS, build_layer, with_budget
from tests.support.memory import resident_bytes
from tests.support.store import SyntheticContext, synthetic_context

NOTHING_STORED = StoredBytes(0.0, 0.0, 0.0)

VOCABULARY = 5
CONTEXT = cast(ResidentContext, SimpleNamespace(manifest=context_with_all_indexes()))
STEPWISE = get_method("csattention@period=2", 0.02)


@dataclass
class FakeFigures:
    sparse_attended: int = 10
    sparse_available: int = 100
    attended: int = 60
    available: int = 150


@dataclass
class FakeSession:
    method: Method
    figures: FakeFigures = field(default_factory=FakeFigures)
    closed: bool = False
    position: int = 100

    def close(self) -> None:
        self.closed = True


class FakeRunner:
    """Predicts token (input + 1) mod V; the sparse method is less sure, and wrong after input 3."""

    device = torch.device("cpu")

    def __init__(self, graphs: bool = False, prompts: Prompts = Prompts.EACH) -> None:
        self.graphs = graphs
        self.prompts = prompts
        self.read_tokens: list[list[int]] = []
        self.sessions: list[FakeSession] = []
        self.fed: list[list[int]] = []

    def start(self, context: ResidentContext, fitted: FittedMethod) -> FakeSession:
        assert context is CONTEXT
        self.sessions.append(FakeSession(fitted.method))
        return self.sessions[-1]

    def forward(
        self, sessions: Sequence[FakeSession], token_ids: Sequence[Sequence[int]], all_logits: bool = False
    ) -> list[Tensor]:
        self.fed.append(list(token_ids[0]))
        sparse = sessions[0].method.sparse
        logits = torch.zeros(len(token_ids[0]), VOCABULARY)
        for row, token in enumerate(token_ids[0]):
            wrong = sparse and token == 3
            logits[row, (token + (2 if wrong else 1)) % VOCABULARY] = 2.0 if sparse else 4.0
        return [logits if all_logits else logits[-1:]]

    def read(
        self, sessions: Sequence[FakeSession], token_ids: Sequence[Sequence[int]], all_logits: bool = False
    ) -> list[Tensor]:
        self.read_tokens.append(list(token_ids[0]))
        return self.forward(sessions, token_ids, all_logits)

    def has_graph(self, session: FakeSession) -> bool:
        return self.graphs

    def feed(self, session: FakeSession, token: int) -> Tensor:
        return self.forward([session], [[token]])[0]


def kl(p: Tensor, q: Tensor) -> float:
    return float((p * (p / q).log()).sum())


def test_score_of_a_segment_compares_every_prediction_with_the_reference() -> None:
    runner = FakeRunner()
    segment = Segment((0, 1, 2, 3), answer_start=2)
    reference = reference_log_probs(cast(ModelRunner, runner), CONTEXT, FULL, segment)
    score = score_segment(cast(ModelRunner, runner), CONTEXT, SPARSE, segment, reference)
    sure = torch.tensor([4.0, 0, 0, 0, 0]).softmax(0)
    less = torch.tensor([2.0, 0, 0, 0, 0]).softmax(0)
    assert score.kl_T.tolist() == pytest.approx([kl(sure, less)] * 3, rel=1e-5)
    assert score.answer_T.tolist() == [False, True, True]
    assert score.exact is True
    assert score.hit_T.tolist() == [True, True, True]
    assert runner.fed == [[0, 1, 2], [0, 1, 2]]
    assert all(session.closed for session in runner.sessions)


def test_steps_that_run_in_graphs_are_scored_as_they_are_served() -> None:
    runner = FakeRunner(graphs=True)
    segment = Segment((0, 1, 2, 3), answer_start=2)
    log_probs = reference_log_probs(cast(ModelRunner, runner), CONTEXT, FULL, segment)
    assert runner.fed == [[0, 1], [2]]
    assert log_probs.shape == (3, VOCABULARY)


@pytest.mark.parametrize("method", [SPARSE, STEPWISE])
def test_questions_that_share_a_selection_are_read_apart(method: Method) -> None:
    runner = FakeRunner(prompts=Prompts.SPARSE)
    question, text = Segment((0, 1, 2, 3, 4), answer_start=2), Segment((0, 1, 2, 3))
    reference = reference_log_probs(cast(ModelRunner, runner), CONTEXT, FULL, question)
    assert (runner.read_tokens, runner.fed) == ([[0, 1]], [[0, 1], [2, 3]])
    assert reference.shape == (4, VOCABULARY)
    reference_log_probs(cast(ModelRunner, runner), CONTEXT, FULL, text)
    reference_log_probs(cast(ModelRunner, runner), CONTEXT, FULL, Segment((0, 1, 2), answer_start=2))
    assert runner.read_tokens == [[0, 1], [0, 1]]
    assert runner.fed[2:] == [[0, 1, 2], [0, 1]]
    runner.fed.clear()
    score_segment(cast(ModelRunner, runner), CONTEXT, method, question, reference)
    assert runner.fed == ([[0, 1], [2, 3]] if method is SPARSE else [[0, 1], [2], [3]])


@pytest.mark.parametrize(
    ("answer_start", "fed"),
    [(3, [[0, 1, 2], [3], [4]]), (None, [[0], [1], [2], [3], [4]])],
    ids=["question", "text"],
)
def test_methods_that_depend_on_steps_are_fed_step_by_step(
    answer_start: int | None, fed: list[list[int]]
) -> None:
    assert SPARSE.one_pass
    assert not STEPWISE.one_pass
    assert not get_method("squeezed").one_pass
    runner = FakeRunner()
    segment = Segment((0, 1, 2, 3, 4, 0), answer_start)
    reference = reference_log_probs(cast(ModelRunner, runner), CONTEXT, FULL, segment)
    runner.fed.clear()
    steps = score_segment(cast(ModelRunner, runner), CONTEXT, STEPWISE, segment, reference)
    assert runner.fed == fed
    at_once = score_segment(cast(ModelRunner, runner), CONTEXT, SPARSE, segment, reference)
    assert torch.equal(steps.kl_T, at_once.kl_T)
    assert steps.exact is at_once.exact


@pytest.mark.parametrize(
    ("tokens", "answer_start", "offsets"),
    [
        (31, 20, [0, 9, 18, 19, 24, 29]),
        (31, None, [0, 6, 12, 17, 23, 29]),
        (3, 1, [0, 1]),
        (8, 7, [0, 2, 5, 6]),
    ],
)
def test_observed_positions_spread_over_question_and_answer(
    tokens: int, answer_start: int | None, offsets: list[int]
) -> None:
    segment = Segment(tuple(range(tokens)), answer_start, observed=True)
    assert sorted(set(segment.observed_offsets())) == offsets
    assert replace(segment, observed=False).observed_offsets() == []


@pytest.mark.parametrize(
    ("token_ids", "answer_start", "exact"),
    [
        ((2, 3, 4), 1, False),  # the sparse method errs after a 3
        ((3, 4, 0, 1), 2, True),  # it errs inside the prompt only
        ((3, 4, 0, 1), 1, False),
        ((0, 1, 2), None, None),
    ],
)
def test_exact_match_looks_at_answer_tokens_only(
    token_ids: tuple[int, ...], answer_start: int | None, exact: bool | None
) -> None:
    runner = cast(ModelRunner, FakeRunner())
    segment = Segment(token_ids, answer_start)
    reference = reference_log_probs(runner, CONTEXT, FULL, segment)
    assert score_segment(runner, CONTEXT, SPARSE, segment, reference).exact is exact
    assert score_segment(runner, CONTEXT, FULL, segment, reference).kl_T.tolist() == pytest.approx(
        [0.0] * (len(token_ids) - 1), abs=1e-6
    )


def test_decode_steps_are_timed_one_token_at_a_time() -> None:
    runner = FakeRunner()
    assert seconds_per_token(cast(ModelRunner, runner), CONTEXT, SPARSE, [1, 2, 3, 4]) > 0.0
    assert runner.fed == [[1], [2], [3], [4]]
    assert runner.sessions[0].closed


def test_summary() -> None:
    full, sparse = make_tally([True, True, True, False]), make_tally([True, False, True, False], mass=0.8)
    score = sparse.summarise(8192, SOME, full, StoredBytes(512.0, 300.0, 400.0))
    assert (score.task, score.method, score.budget, score.keep) == ("all", "csattention", "2.00%", 0.02)
    assert (score.questions, score.exact_match, score.exact_match_loss) == (4, 0.5, 0.25)
    # The first context's questions are answered, the second's are not: as uncertain as two questions, not four.
    assert score.contexts == 2
    assert score.exact_match_se == pytest.approx(0.5)
    assert score.exact_match_loss_se == pytest.approx(0.25)
    assert score.answer_tokens_hit == pytest.approx(0.5)
    assert (score.kl, score.kl_answer, score.kl_text) == pytest.approx((0.3, 0.6, 0.6))
    assert (score.touched_sparse, score.touched_all) == pytest.approx((0.1, 0.4))
    assert score.milliseconds_per_token == pytest.approx(3.0)
    # Two observed texts: 0.8 and 0.9 in one layer, half of that in the other.
    assert score.captured_mass == pytest.approx(0.75 * 0.85)
    assert score.captured_mass_se == pytest.approx(0.75 * 0.1 / 2)
    assert (score.recall, score.output_error) == pytest.approx((0.5, 0.1))
    assert (score.vectors_read, score.bytes_per_step, score.bytes_share) == pytest.approx((7.0, 200.0, 0.2))
    # Two layers of three search, and read a fifth; the other one is read whole.
    assert score.bytes_all == pytest.approx(2 / 3 * 0.2 + 1 / 3)
    shares = (score.search_share, score.exact_share, score.remainder_share)
    assert (*shares, score.bytes_per_token) == pytest.approx((0.02, 0.1, 0.08, 4.0))
    stored = (score.index_bytes_per_token, score.device_bytes_per_token, score.host_bytes_per_token)
    assert stored == (512.0, 300.0, 400.0)
    mass_map = sparse.mass_map(8192, SOME)
    assert mass_map.layers == (1, 3)
    assert [value for row in mass_map.captured for value in row] == pytest.approx([0.85, 0.85, 0.425, 0.425])


def test_what_was_not_observed_is_not_reported() -> None:
    full = make_tally([True, True])
    score = full.summarise(8192, ALL, full, NOTHING_STORED)
    assert (score.budget, score.keep, score.mass) == ("all", None, None)
    assert (score.recall, score.captured_mass, score.output_error, score.bytes_share) == (None,) * 4
    assert score.bytes_all == score.touched_all or score.bytes_all is None
    assert full.mass_map(8192, ALL) is None


def test_tasks_are_summarised_apart() -> None:
    full, sparse = make_tally([True, True]), make_tally([True, False])
    for tally, more in (
        (full, make_tally([True] * 4, task="keys")),
        (sparse, make_tally([False] * 4, task="keys")),
    ):
        tally.scores += more.scores
        tally.contexts += [context + 2 for context in more.contexts]
    assert full.tasks == ["single", "keys"]
    scores = [sparse.summarise(8192, SOME, full, NOTHING_STORED, task) for task in ("all", *full.tasks)]
    assert [(score.questions, score.exact_match) for score in scores] == [(6, 1 / 6), (2, 0.5), (4, 0.0)]


def test_standard_errors() -> None:
    assert cluster_mean([torch.ones(3)], [7]) == (1.0, None)
    # Two contexts whose values agree inside: as uncertain as two draws, however many values and parts they hold.
    assert cluster_mean([torch.zeros(50), torch.ones(50)], [0, 1]) == pytest.approx((0.5, 0.5))
    assert cluster_mean([torch.tensor([0.0]), torch.tensor([1.0])], [0, 1]) == pytest.approx((0.5, 0.5))
    parts = [torch.tensor([float(part % 2)]) for part in range(20)]
    assert cluster_mean(parts, [part % 2 for part in range(20)]) == pytest.approx((0.5, 0.5))
    # Each part its own context: the error of independent draws.
    assert cluster_mean(parts, range(20))[1] == pytest.approx(torch.cat(parts).std() / 20**0.5)


HEADS, GROUP, DIM, KEYS = 2, 3, 8, 300


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
        KEYS + 20,
        sinks,
        search_end,
        Selection(ids.int(), counts.int()),
        KeyRows(make_keys(KEYS), make_keys(tail, seed=3)),
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
    kv = make_keys(KEYS)
    index = INDEX_CLASSES[method.index.kind].from_arrays(method.index.parameters, {}, kv)
    return SparseLayer(kv, LayerSearch(index), method, Figures())


class LayersAlone:
    """Layers without a model."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers


def probe_oracle(keep: float, steps: int, positions: set[int]) -> list[LayerSample]:
    """Feeds a layer of the oracle `steps` tokens, all at once when the number is even, else one by one."""
    method = get_method("oracle", keep)
    layer = sparse_layer(method)
    probe = Probe(positions)
    layers = [DenseLayer(make_keys(KEYS), Figures()), layer]
    probe.attach(cast(Session, LayersAlone(layers)))
    queries, tail = make_queries(steps) * 2, make_keys(steps, seed=5)
    pieces = [slice(0, steps)] if steps % 2 == 0 else [slice(i, i + 1) for i in range(steps)]
    for piece in pieces:
        layer.attend(queries[:, piece], tail[:, piece, 0], tail[:, piece, 1], KEYS + piece.start)
    return probe.samples


@pytest.mark.parametrize("steps", [20, 21], ids=["one pass", "step by step"])
def test_the_oracle_finds_every_top_key(steps: int) -> None:
    positions = {KEYS, KEYS + 3, KEYS + 19, KEYS + 99}
    samples = probe_oracle(0.05, steps, positions)
    assert {sample.layer for sample in samples} == {1}
    recall = torch.cat([sample.recall_HT for sample in samples], dim=1)
    assert recall.shape == (HEADS, 3)
    assert torch.equal(recall, torch.ones(HEADS, 3))
    mass = torch.cat([sample.mass_HTG for sample in samples], dim=1)
    assert float(mass.min()) > 0.2
    assert float(mass.max()) < 1.0
    assert all(float(sample.error_T.min()) > 0.0 for sample in samples)


def test_bytes_of_the_remainder_and_of_silent_indexes_count() -> None:
    seen = make_observation(1, shared=False)
    plain = sample_layer(0, seen, torch.tensor([0]))
    more = sample_layer(0, replace(seen, bytes_read=0.0, remainder_bytes=123.0), torch.tensor([0]))
    assert float(plain.search_bytes_T) == HEADS * 1000
    assert float(more.search_bytes_T) == HEADS * 50 * DIM * 4
    assert float(more.remainder_bytes_T) == HEADS * 123
    assert float(more.exact_bytes_T) == float(plain.exact_bytes_T)
    assert float(more.tokens_T) == KEYS + 21


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
    layer = build_layer(method, make_keys(KEYS), GROUP)
    probe = Probe({KEYS})
    probe.attach(cast(Session, LayersAlone([layer])))
    new = make_keys(1, seed=9)
    layer.attend(make_queries(1), new[:, :, 0], new[:, :, 1], KEYS)
    (sample,) = probe.samples
    searched = KEYS - 32 - 8
    kept = layer._figures.kept
    assert float(sample.exact_bytes_T) == (kept + HEADS * (8 + 32 + 1)) * ROW
    assert float(sample.full_bytes_T) == HEADS * (KEYS + 1) * ROW
    assert float(sample.tokens_T) == KEYS + 1

    kind = method.index.kind
    arrays = layer._index.arrays()
    coarse_key = BITS.get(name, (4, 4))[0] * DIM / 8 + 4 * DIM / 128
    coarse_value = BITS.get(name, (4, 4))[1] * DIM / 8 + 4
    by_hand = {
        "exact": lambda: searched * KEY,
        "pages": lambda: 2 * -(-searched // 4) * DIM * 2,
        "coarse_rows": lambda: searched * coarse_key,
        "query_tables": lambda: 4 * GROUP * searched,
        "key_clusters": lambda: arrays["counts"].shape[1] * DIM * 4,
    }
    assert kind in {*by_hand, "cluster_tree"}, f"by_hand tells what a search reads; add it for {kind}"
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
    assert probe_oracle(0.05, 8, {KEYS + 8, 3}) == []


CPU = torch.device("cpu")


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[Store, list[SyntheticContext]]:
    store = Store(tmp_path / "store", create=True)
    made = [synthetic_context(tokens=tokens) for tokens in (20, 400)]
    for context in made:
        context.write(store)
    return store, made


def test_without_a_gpu_there_is_one_memory(contexts: tuple[Store, list[SyntheticContext]]) -> None:
    store, made = contexts
    for placement in ("auto", "device"):
        arena = arena_for([context.manifest for context in made], CPU, placement)
        assert arena.stats().budget == MemoryBytes(host=resident_bytes(made[1].manifest))
        for context in made:
            with arena.acquire(store, context.id) as resident:
                assert resident.placement is Placement.DEVICE
    with pytest.raises(InvalidArgumentError, match="use auto or device"):
        arena_for([made[0].manifest], CPU, "hybrid")


@pytest.mark.parametrize(
    ("placement", "room", "expected"),
    [
        ("auto", 2**30, ["device", "device"]),
        ("auto", 0, ["device", "hybrid"]),
        ("device", 0, ["device", "device"]),
        ("hybrid", 0, ["hybrid", "hybrid"]),
    ],
)
def test_beside_a_gpu_each_context_has_room(
    contexts: tuple[Store, list[SyntheticContext]],
    placement: str,
    room: int,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, made = contexts
    room = room or resident_bytes(made[1].manifest, CPU) - 1
    monkeypatch.setattr(machine, "context_device", lambda device: device)
    monkeypatch.setattr(machine, "default_budget", lambda device: room)
    arena = arena_for([context.manifest for context in made], CPU, placement)
    found = []
    for context in made:
        with arena.acquire(store, context.id) as resident:
            found.append(resident.placement.value)
    assert found == expected


CHARACTERS = 6_000


def test_refined_predicts_the_text_that_follows_as_full_attention_does(tmp_path: Path) -> None:
    """With one key in a hundred attended exactly: closer by far than clusters for the rest of the keys."""
    text, folder = held_out_text(), resolve_model("reader")
    (tmp_path / "text.txt").write_text(text[:CHARACTERS])
    compared = ("refined", "refined-3", "multipole")
    config = PrefillConfig(
        model="reader",
        input=(tmp_path / "text.txt",),
        store=tmp_path / "store",
        method=compared,
        index=("key_clusters:iterations=2",),
        query_sample=512,
    )
    manifest = run_job(config, LineReporter(io.StringIO()), io.BytesIO()).manifest
    following = load_tokenizer(folder).encode(text[CHARACTERS : CHARACTERS + 250])
    segment, runner = Segment(tuple(following)), ModelRunner(folder)
    with Arena(1 << 28).acquire(Store(config.store), manifest.id) as context:
        reference = reference_log_probs(runner, context, METHODS["full"], segment)
        divergence = {
            name: float(
                score_segment(runner, context, get_method(name, 0.01), segment, reference).kl_T.mean()
            )
            for name in compared
        }
    assert divergence["refined"] < 4e-4
    assert divergence["refined"] < divergence["refined-3"] < 3e-3
    assert 10 * divergence["refined"] < divergence["multipole"]
