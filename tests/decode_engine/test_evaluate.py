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

from decode_engine.evaluation.evaluate import question_segment, share_questions
from decode_engine.evaluation.pictures import MASS_MAP, QUALITY, draw_pictures
from decode_engine.evaluation.prefill_command import PrefillCommand, PrefillFailedError
from decode_engine.evaluation.probe import LayerSample
from decode_engine.evaluation.progress import show_progress
from decode_engine.evaluation.report import results_table, tasks_table
from decode_engine.evaluation.results import Results, merge_results, read_results, write_results
from decode_engine.evaluation.scoring import (
    Segment,
    SegmentScore,
    Touched,
    reference_log_probs,
    score_segment,
    seconds_per_token,
)
from decode_engine.evaluation.settings import EvaluationConfig, Variant
from decode_engine.evaluation.summary import MassMap, Score, Tally, cluster_mean, standard_error
from decode_engine.evaluation.tasks import Document, Part, Question
from decode_engine.runner import ModelRunner
from index_store.context import ResidentContext
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.methods import Method, get_method
from index_store.models.loading import Tokenizer

VOCABULARY = 5
CONTEXT = cast(ResidentContext, None)
FULL, SPARSE = get_method("full"), get_method("csattention", 0.02)
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
    assert score.hit_T.tolist() == [True, True, True]
    assert runner.fed == [[0, 1, 2], [0, 1, 2]]
    assert all(session.closed for session in runner.sessions)


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


def layer_sample(layer: int, mass: float, recall: float = 0.5) -> LayerSample:
    ones_T = torch.ones(3)
    return LayerSample(
        layer,
        torch.tensor([[recall, torch.nan, recall]]),
        torch.full((1, 3, 2), mass),
        0.1 * ones_T,
        7 * ones_T,
        200 * ones_T,
        1000 * ones_T,
    )


def segment_score(
    exact: bool | None, kl_T: list[float], answers: int, task: str = "single", mass: float | None = None
) -> SegmentScore:
    answer_T = torch.arange(len(kl_T)) >= len(kl_T) - answers
    hit_T = torch.full((len(kl_T),), bool(exact))
    samples = () if mass is None else (layer_sample(1, mass), layer_sample(3, mass / 2))
    return SegmentScore(
        exact, torch.tensor(kl_T), answer_T, Touched(10, 100, 60, 150, 1, 4), hit_T, task, samples
    )


def make_tally(exact: Sequence[bool], mass: float | None = None, task: str = "single") -> Tally:
    tally = Tally()
    tally.scores = [segment_score(hit, [0.1, 0.2, 0.6], 1, task) for hit in exact]
    tally.scores[0] = segment_score(exact[0], [0.1, 0.2, 0.6], 1, task, mass)
    tally.scores.append(segment_score(None, [0.5, 0.7], 0, task, None if mass is None else mass + 0.1))
    tally.seconds = [0.002, 0.004, 0.003]
    return tally


ALL, SOME = Variant("full", FULL), Variant("csattention", SPARSE, keep=0.02)


def test_summary() -> None:
    full, sparse = make_tally([True, True, True, False]), make_tally([True, False, True, False], mass=0.8)
    score = sparse.summarise(8192, SOME, full, 512.0)
    assert (score.task, score.method, score.budget, score.keep) == ("all", "csattention", "2.00%", 0.02)
    assert (score.questions, score.exact_match, score.exact_match_loss) == (4, 0.5, 0.25)
    assert score.exact_match_se == pytest.approx(math.sqrt(1 / 3) / 2)
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
    assert score.corrected == pytest.approx(0.25)
    mass_map = sparse.mass_map(8192, SOME)
    assert mass_map is not None
    assert mass_map.layers == (1, 3)
    assert [value for row in mass_map.captured for value in row] == pytest.approx([0.85, 0.85, 0.425, 0.425])


def test_what_was_not_observed_is_not_reported() -> None:
    full = make_tally([True, True])
    score = full.summarise(8192, ALL, full, 0.0)
    assert (score.budget, score.keep, score.mass) == ("all", None, None)
    assert (score.recall, score.captured_mass, score.output_error, score.bytes_share) == (None,) * 4
    assert full.mass_map(8192, ALL) is None


def test_tasks_are_summarised_apart() -> None:
    full, sparse = make_tally([True, True]), make_tally([True, False])
    for tally, more in (
        (full, make_tally([True] * 4, task="keys")),
        (sparse, make_tally([False] * 4, task="keys")),
    ):
        tally.scores += more.scores
    assert full.tasks == ["single", "keys"]
    scores = [sparse.summarise(8192, SOME, full, 0.0, task) for task in ("all", *full.tasks)]
    assert [(score.questions, score.exact_match) for score in scores] == [(6, 1 / 6), (2, 0.5), (4, 0.0)]


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


def test_question_segment_ends_as_the_question_says() -> None:
    question = Question("?", "48213", "It is", token=0, depth=0.0, family="keys", ending=".")
    segment = question_segment(cast(Tokenizer, Characters()), question, observed=True)
    assert "".join(map(chr, segment.token_ids)) == "It is 48213."
    assert (segment.task, segment.observed) == ("keys", True)


def test_variants_cross_methods_with_their_budgets_after_full_attention() -> None:
    config = EvaluationConfig(
        "reader",
        Path("x"),
        methods=("csattention@lag", "full", "tactic", "squeezed"),
        keep=(0.01, 0.05),
        mass=(0.5, 0.9),
    )
    assert [(v.expression, v.budget, v.keep, v.mass) for v in config.variants()] == [
        ("full", "all", None, None),
        ("csattention@lag", "1.00%", 0.01, None),
        ("csattention@lag", "5.00%", 0.05, None),
        ("tactic", "mass 0.5", None, 0.5),
        ("tactic", "mass 0.9", None, 0.9),
        ("squeezed", "1.00%", 0.01, None),
        ("squeezed", "5.00%", 0.05, None),
    ]
    assert config.variants()[0].method == FULL
    assert config.variants()[1].method.name == "csattention@lag"


def test_contexts_are_indexed_once_for_methods_that_share_indexes() -> None:
    config = EvaluationConfig(
        "reader",
        Path("x"),
        methods=("full", "oracle", "tactic", "squeezed", "csattention@lag"),
        index_for=("csattention",),
    )
    assert sorted(config.indexed()) == ["csattention@lag", "tactic"]
    assert set(replace(config, index_for=("quest", "squeezed-tree")).indexed()) > set(config.indexed())


def test_questions_are_shared_among_tasks_and_contexts() -> None:
    config = EvaluationConfig("reader", Path("x"), questions=216, facts=24)
    assert config.parts(8192) == [Part(9, 24)]
    assert replace(config, questions=25).parts(8192) == [Part(2, 24)]
    several = replace(config, tasks=("single", "words"), questions=31, distractors=1)
    assert several.questions_by_task() == {"single": 16, "words": 15}
    assert several.parts(8192) == [Part(1, 24, "single", 1), Part(2, 8, "words", 1)]


def test_a_context_with_too_many_questions_is_asked_at_every_depth() -> None:
    def document(family: str, count: int) -> Document:
        questions = tuple(Question(str(i), "a", "p", i, i / count, family=family) for i in range(count))
        return Document("", 10, questions, "", family)

    config = EvaluationConfig("reader", Path("x"), tasks=("single", "chain"), questions=12)
    documents = [document("single", 4), document("single", 8), document("chain", 6)]
    shared = share_questions(config, documents)
    assert [[int(question.question) for question in chosen] for _, chosen in shared] == [
        [0, 1, 2, 3],
        [2, 6],
        [0, 1, 2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"methods": ("nearest",)}, MethodUnsupportedError),
        ({"methods": ("oracle+nothing",)}, MethodUnsupportedError),
        ({"index_for": ("nearest",)}, MethodUnsupportedError),
        ({"keep": (0.0,)}, InvalidArgumentError),
        ({"mass": (1.5,)}, InvalidArgumentError),
        ({"tasks": ("riddles",)}, InvalidArgumentError),
        ({"tasks": ("single", "single")}, InvalidArgumentError),
        ({"tasks": ("single", "keys"), "questions": 1}, InvalidArgumentError),
        ({"distractors": -1}, InvalidArgumentError),
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


SETTING: dict[str, Any] = {
    "settings": {
        "model": "reader",
        "out": "a",
        "context_lengths": [8192, 32768],
        "tasks": ["single", "keys"],
        "questions": 2,
        "seed": 0,
        "text": [],
        "methods": ["csattention"],
        "keep": [0.02, 0.05],
        "mass": [],
        "index_for": [],
    },
    "text_sha256": "0123456789abcdef",
    "machine": {"cores": 2},
    "model": {"name": "reader", "fingerprint": "f00"},
    "complete": True,
}


def some_scores(methods: Sequence[str] = ("csattention",)) -> list[Score]:
    full = make_tally([True, True])
    base = full.summarise(8192, ALL, full, 0.0)
    rows = [base]
    for method in methods:
        sparse = make_tally([True, False], mass=0.8).summarise(
            8192, Variant(method, SPARSE, keep=0.02), full, 512.0
        )
        rows += [sparse, replace(sparse, keep=0.05, budget="5.00%", kl=0.01)]
    rows += [replace(row, task=task) for task in ("single", "keys") for row in rows]
    return [*rows, *(replace(row, context_length=32768) for row in rows)]


def some_results(methods: Sequence[str] = ("csattention",), **settings: object) -> Results:
    maps = [
        MassMap(length, method, f"{keep:.2%}", keep, None, (0, 2), ((0.5, 0.6), (1.0, 0.1)))
        for length in (8192, 32768)
        for method in methods
        for keep in (0.02, 0.05)
    ]
    changed = {**SETTING["settings"], "methods": list(methods), **settings}
    return Results({**SETTING, "settings": changed}, some_scores(methods), maps)


def test_results_hold_every_score(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    write_results(tmp_path, results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "results.md"]
    read = read_results(tmp_path)
    assert read == results
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.as_json()))
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in rows] == [score.kl for score in results.scores]
    blocks = (tmp_path / "results.md").read_text().split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert [len(table) for table in tables] == [2 + 6, 2 + 6]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


def test_tables_on_the_terminal(tmp_path: Path) -> None:
    scores = some_scores()
    console = Console(width=200, record=True, file=(tmp_path / "table").open("w"))
    console.print(results_table(scores, "title"))
    by_task = tasks_table(scores)
    assert by_task is not None
    console.print(by_task)
    text = console.export_text()
    assert text.count("csattention") == 8
    assert "n = 2 questions" in text
    assert "keys" in text
    assert tasks_table([score for score in scores if score.task == "all"]) is None


def test_many_methods_are_drawn(tmp_path: Path) -> None:
    results = some_results([*(f"method-{number}" for number in range(13)), "csattention"])
    names = draw_pictures(tmp_path, results.scores, results.maps)
    assert names == [QUALITY, MASS_MAP]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    only_full = [score for score in results.scores if score.method == "full"]
    assert draw_pictures(tmp_path, only_full, []) == [QUALITY]


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    (tmp_path / "results.json").chmod(0o444)
    write_results(tmp_path, results)  # replaced as a whole, not written into
    assert read_results(tmp_path / "results.json") == results


def merged(tmp_path: Path, *runs: Results) -> Results:
    folders = []
    for number, run in enumerate(runs):
        folder = tmp_path / f"run{number}"
        folder.mkdir(exist_ok=True)
        write_results(folder, run)
        folders.append(folder)
    return merge_results(folders)


def test_runs_of_other_methods_merge(tmp_path: Path) -> None:
    first, second = some_results(["oracle", "pq"]), some_results(["quest", "pq"], out="b", keep=[0.05, 0.1])
    both = merged(tmp_path, first, second)
    assert both.setting["settings"]["methods"] == ["oracle", "pq", "quest"]
    assert both.setting["settings"]["keep"] == [0.02, 0.05, 0.1]
    assert both.setting["complete"] is True
    expected = some_results(["oracle", "pq", "quest"])
    assert both.scores == expected.scores
    assert {(m.context_length, m.method, m.budget) for m in both.maps} == {
        (m.context_length, m.method, m.budget) for m in expected.maps
    }
    write_results(tmp_path, both)
    assert read_results(tmp_path) == both
    unfinished = replace(second, setting={**second.setting, "complete": False})
    assert merged(tmp_path, first, unfinished).setting["complete"] is False


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"context_lengths": [8192]}, r"context_lengths is \[8192, 32768\] in one and \[8192\] in the other"),
        ({"seed": 3}, "seed is 0 in one and 3 in the other"),
        ({"questions": 4}, "questions is 2"),
        ({"tasks": ["single"]}, "tasks is"),
    ],
)
def test_runs_of_other_questions_do_not_merge(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        merged(tmp_path, some_results(["oracle"]), some_results(["pq"], **changed))


def test_runs_of_another_model_or_with_other_answers_do_not_merge(tmp_path: Path) -> None:
    first, second = some_results(["oracle"]), some_results(["pq"])
    other_model = {**SETTING, "model": {"name": "other", "fingerprint": "f01"}}
    with pytest.raises(InvalidArgumentError, match="model is 'reader' in one and 'other' in the other"):
        merged(tmp_path, first, replace(second, setting=other_model))
    with pytest.raises(InvalidArgumentError, match="text is '0123456789ab' in one and 'ff' in the other"):
        merged(tmp_path, first, replace(second, setting={**SETTING, "text_sha256": "ff"}))
    scores = [replace(score, exact_match=0.5) for score in second.scores]
    with pytest.raises(InvalidArgumentError, match="these were not the same questions"):
        merged(tmp_path, first, replace(second, scores=scores))
    with pytest.raises(InvalidArgumentError, match="no results to merge"):
        merge_results([])


@pytest.mark.parametrize("content", ["", "[]", '{"scores": []}', '{"scores": [{"kl": 1}], "mass_maps": []}'])
def test_what_are_no_results_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(InvalidArgumentError, match=r"results\.json holds no results of this version"):
        read_results(tmp_path)


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
