"""Scores follow from predictions as documented, and so do means and standard errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from decode_engine.evaluation.comparison.summary import StoredBytes, cluster_mean
from decode_engine.evaluation.scoring import (
    Segment,
    reference_log_probs,
    score_segment,
    seconds_per_token,
)
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.command_options import Prompts
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import get_method
from tests.decode_engine.evaluation.evaluation_samples import ALL, FULL, SOME, SPARSE, make_tally
from tests.index_store.methods.test_methods import context as context_with_all_indexes

NOTHING_STORED = StoredBytes(0.0, 0.0, 0.0)

VOCABULARY = 5
CONTEXT = cast(ResidentContext, SimpleNamespace(manifest=context_with_all_indexes()))
STEPWISE = get_method("csattention@lag", 0.02)


@dataclass
class FakeFigures:
    sparse_attended: int = 10
    sparse_available: int = 100
    attended: int = 60
    available: int = 150
    corrected: int = 0
    correctable: int = 0


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
    assert score.corrected == pytest.approx(0.25)
    mass_map = sparse.mass_map(8192, SOME)
    assert mass_map is not None
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
