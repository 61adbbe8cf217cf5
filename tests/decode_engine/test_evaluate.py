"""Evaluation: scores follow from predictions as documented, reports hold them all, and the command works end to end."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor

from decode_engine.evaluation.evaluate import EvaluationConfig, question_segment
from decode_engine.evaluation.prefill_command import PrefillCommand, PrefillFailedError
from decode_engine.evaluation.progress import show_progress
from decode_engine.evaluation.report import draw_picture, results_table, write_results
from decode_engine.evaluation.scoring import (
    Score,
    Segment,
    SegmentScore,
    Tally,
    Touched,
    cluster_mean,
    reference_log_probs,
    score_segment,
    seconds_per_token,
    standard_error,
)
from decode_engine.evaluation.tasks import Question, parse_length
from decode_engine.runner import ModelRunner
from index_store.context import ResidentContext
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.methods import Method, get_method
from index_store.models.loading import Tokenizer

VOCABULARY = 5
CONTEXT = cast(ResidentContext, None)
FULL, SPARSE = get_method("full"), get_method("csattention", 0.02)


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

    def close(self) -> None:
        self.closed = True


class FakeRunner:
    """Predicts token (input + 1) mod V; the sparse method is less sure, and wrong after input 3."""

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []
        self.fed: list[list[int]] = []

    def start(self, context: ResidentContext, method: Method) -> FakeSession:
        self.sessions.append(FakeSession(method))
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
    assert runner.fed == [[0, 1, 2], [0, 1, 2]]
    assert all(session.closed for session in runner.sessions)


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


def segment_score(exact: bool | None, kl_T: list[float], answers: int) -> SegmentScore:
    answer_T = torch.arange(len(kl_T)) >= len(kl_T) - answers
    return SegmentScore(exact, torch.tensor(kl_T), answer_T, Touched(10, 100, 60, 150))


def make_tally(exact: Sequence[bool]) -> Tally:
    tally = Tally()
    tally.scores = [segment_score(hit, [0.1, 0.2, 0.6], 1) for hit in exact]
    tally.scores.append(segment_score(None, [0.5, 0.7], 0))
    tally.seconds = [0.002, 0.004, 0.003]
    return tally


def test_summary() -> None:
    full, sparse = make_tally([True, True, True, False]), make_tally([True, False, True, False])
    score = sparse.summarise(8192, SPARSE, 0.02, full, 512.0)
    assert (score.questions, score.exact_match, score.exact_match_loss) == (4, 0.5, 0.25)
    assert score.exact_match_se == pytest.approx(math.sqrt(1 / 3) / 2)
    assert score.exact_match_loss_se == pytest.approx(0.25)
    assert (score.kl, score.kl_answer, score.kl_text) == pytest.approx((0.3, 0.6, 0.6))
    assert (score.touched_sparse, score.touched_all) == pytest.approx((0.1, 0.4))
    assert score.milliseconds_per_token == pytest.approx(3.0)


def test_standard_errors() -> None:
    assert standard_error([1.0]) is None
    assert cluster_mean([torch.ones(3)]) == (1.0, None)
    assert standard_error([0.0, 1.0]) == pytest.approx(0.5)
    # Two clusters whose values agree inside: as uncertain as two draws, however many values they hold.
    mean, error = cluster_mean([torch.zeros(50), torch.ones(50)])
    assert (mean, error) == pytest.approx((0.5, 0.5))
    mean, error = cluster_mean([torch.tensor([0.0]), torch.tensor([1.0])])
    assert (mean, error) == pytest.approx((0.5, 0.5))


class Characters:
    """One token per character, except that a space joins the digit that follows it."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


class Contextual(Characters):
    """A tokenizer whose prompt does not stay the same when an answer follows."""

    def encode(self, text: str) -> list[int]:
        return [*super().encode(text), len(text)]


def test_question_segment_splits_prompt_and_answer() -> None:
    question = Question("?", "48213", "It is", token=0, depth=0.0)
    plain = question_segment(cast(Tokenizer, Characters()), question)
    assert "".join(map(chr, plain.token_ids)) == "It is 48213.\n"
    assert plain.answer_start == 5
    awkward = question_segment(cast(Tokenizer, Contextual()), question)
    assert awkward.answer_start == 6
    assert awkward.token_ids[:6] == tuple(Contextual().encode("It is"))
    assert awkward.token_ids[6:] == tuple(Contextual().encode(" 48213.\n"))


def test_lengths() -> None:
    assert [parse_length(text) for text in ("8192", "8k", " 32K ")] == [8192, 8192, 32768]
    for text in ("", "0", "8m", "-1", "1.5k"):
        with pytest.raises(InvalidArgumentError, match="expected a number of tokens"):
            parse_length(text)


def test_variants_cross_methods_with_ratios_after_full_attention() -> None:
    config = EvaluationConfig(
        "reader", Path("x"), methods=("csattention", "full", "oracle"), keep=(0.01, 0.05)
    )
    assert [(method.name, keep) for method, keep in config.variants()] == [
        ("full", None),
        ("csattention", 0.01),
        ("csattention", 0.05),
        ("oracle", 0.01),
        ("oracle", 0.05),
    ]
    assert EvaluationConfig("reader", Path("x"), questions=216, facts=24).contexts == 9
    assert EvaluationConfig("reader", Path("x"), questions=25, facts=24).contexts == 2


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"methods": ("nearest",)}, MethodUnsupportedError),
        ({"keep": (0.0,)}, InvalidArgumentError),
        ({"questions": 0}, InvalidArgumentError),
        ({"context_lengths": ()}, InvalidArgumentError),
        ({"text_tokens": 3}, InvalidArgumentError),
    ],
)
def test_a_wrong_configuration_is_refused_before_any_work(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        EvaluationConfig("reader", Path("x"), **wrong)


def some_scores() -> list[Score]:
    full = make_tally([True, True])
    base = full.summarise(8192, FULL, None, full, 0.0)
    sparse = make_tally([True, False]).summarise(8192, SPARSE, 0.02, full, 512.0)
    rows = [base, sparse, replace(sparse, keep=0.05, kl=0.01)]
    return [*rows, *(replace(row, context_length=32768) for row in rows)]


def test_reports_hold_every_score(tmp_path: Path) -> None:
    scores = some_scores()
    returned = write_results(tmp_path, scores, {"settings": {"seed": 0}})
    read = json.loads((tmp_path / "results.json").read_text())
    assert read == returned
    assert [Score(**row) for row in read["scores"]] == scores
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in rows] == [score.kl for score in scores]
    table = (tmp_path / "results.md").read_text().splitlines()
    assert len(table) == 2 + len(scores)
    assert len({line.count("|") for line in table}) == 1
    console = Console(width=170, record=True, file=(tmp_path / "table").open("w"))
    console.print(results_table(scores, "title"))
    text = console.export_text()
    assert text.count("csattention") == 4
    assert "n = 2 questions" in text


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw_picture(tmp_path / "quality.png", some_scores())
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_prefill_is_quoted(tmp_path: Path) -> None:
    command = PrefillCommand("no-such-model", tmp_path / "store", ["csattention"])
    (tmp_path / "text").write_text("Some text.")
    with pytest.raises(PrefillFailedError, match="no-such-model"):
        command.run(tmp_path / "text", "name")


ARGUMENTS = [
    "--context-length",
    "1k",
    "--questions",
    "3",
    "--facts",
    "2",
    "--text-tokens",
    "20",
    "--keep",
    "0.05,1",
]


def test_progress_in_a_pipe_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 4.0, 12.0, 16.0])
    monkeypatch.setattr("decode_engine.evaluation.progress.time.monotonic", lambda: next(seconds))
    stream = io.StringIO()
    with show_progress(stream) as start_stage:
        advance = start_stage("asking", 3)
        for _ in range(3):
            advance()
    assert stream.getvalue().splitlines() == [
        "asking: 0 of 3",
        "asking: 2 of 3, about 6 s left",
        "asking: 3 of 3, 16 s",
    ]


@pytest.mark.slow
def test_evaluate_command_end_to_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "decode_engine", "evaluate", "--out", str(tmp_path), "--format", "json"]
    first = subprocess.run([*command, *ARGUMENTS], capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    results = json.loads(first.stdout)
    scores = [Score(**row) for row in results["scores"]]
    assert [(score.context_length, score.method, score.keep) for score in scores] == [
        (1024, method, keep)
        for method, keeps in (
            ("full", [None]),
            ("oracle", [0.05, 1.0]),
            ("csattention", [0.05, 1.0]),
            ("csattention-paper", [0.05, 1.0]),
        )
        for keep in keeps
    ]
    for score in scores:
        assert score.questions == 3
        if score.method == "full":
            assert (score.kl, score.kl_text, score.exact_match_loss) == pytest.approx(
                (0.0, 0.0, 0.0), abs=1e-5
            )
            assert (score.touched_sparse, score.touched_all) == (None, 1.0)
        elif score.keep == 1.0 and score.method != "csattention-paper":
            assert score.kl == pytest.approx(0.0, abs=1e-4)
            assert score.touched_all == pytest.approx(1.0)
        elif score.keep == 0.05:
            assert score.touched_sparse is not None
            assert score.touched_sparse < score.touched_all < 1.0
    assert (tmp_path / "quality.png").exists()
    stored = sorted(path.name for path in (tmp_path / "store" / "contexts").iterdir())
    assert len(stored) == 2

    few = [*ARGUMENTS, "--methods", "csattention,csattention-paper", "--no-picture"]
    again = subprocess.run([*command, *few], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in (tmp_path / "store" / "contexts").iterdir()) == stored
    repeated = [Score(**row) for row in json.loads(again.stdout)["scores"]]
    before = [score.kl for score in scores if score.method != "oracle"]
    assert [score.kl for score in repeated] == pytest.approx(before, abs=1e-5)


@pytest.mark.slow
def test_make_document_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "decode_engine", "make-document", "--tokens", "2000", "--facts", "5"]
    command += ["--out", str(tmp_path / "doc.txt"), "--questions", str(tmp_path / "q.jsonl")]
    done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 2000
    questions = [json.loads(line) for line in (tmp_path / "q.jsonl").read_text().splitlines()]
    text = (tmp_path / "doc.txt").read_text()
    assert len(questions) == 5
    assert all(f" is {question['answer']}." in text for question in questions)
    short = subprocess.run(
        [*command, "--text", str(tmp_path / "q.jsonl")], capture_output=True, text=True, check=False
    )
    assert short.returncode == 1
    assert short.stderr.startswith("error: the text has")
    assert len(short.stderr.strip().splitlines()) == 1
