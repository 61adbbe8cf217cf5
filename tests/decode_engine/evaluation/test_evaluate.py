"""Evaluation from its command to its tables, on a small model: contexts, questions, variants, results."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from decode_engine.__main__ import main
from decode_engine.evaluation.evaluate import evaluate, question_segment, share_questions
from decode_engine.evaluation.pictures import COSTS, MASS_MAP, QUALITY, draw_pictures, pareto_front
from decode_engine.evaluation.prefill_command import PrefillCommand, PrefillFailedError, attention_flags
from decode_engine.evaluation.results import figures_by_task, tables, warnings, write_results
from decode_engine.evaluation.settings import EvaluationConfig
from decode_engine.evaluation.summary import ALL_TASKS, Score
from decode_engine.evaluation.tasks.documents import Document, DocumentSet, Question, held_out_text
from index_store.cli.console import show_stages
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.models.loading import Tokenizer
from index_store.store.catalog import Store
from tests.decode_engine.evaluation.evaluation_samples import FULL, some_results, some_scores
from tests.support.models import write_model_folder


class Characters:
    """One token per character, except that a space joins the digit that follows it."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_behind(self, text: str) -> list[int]:
        return self.encode(text)


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
        Path("x"),
        methods=("csattention@period=2", "full", "tactic", "squeezed"),
        keep=(0.01, 0.05),
        mass=(0.5, 0.9),
    )
    assert [(v.expression, v.budget, v.keep, v.mass) for v in config.variants()] == [
        ("full", "all", None, None),
        ("csattention@period=2", "1.00%", 0.01, None),
        ("csattention@period=2", "5.00%", 0.05, None),
        ("tactic", "mass 0.5", None, 0.5),
        ("tactic", "mass 0.9", None, 0.9),
        ("squeezed", "1.00%", 0.01, None),
        ("squeezed", "5.00%", 0.05, None),
    ]
    assert config.variants()[0].method == FULL
    assert config.variants()[1].method.name == "csattention@period=2"


def test_contexts_get_the_same_indexes_whichever_run_measures_them() -> None:
    def config(methods: str, index_for: str) -> EvaluationConfig:
        return EvaluationConfig(Path("x"), methods=tuple(methods.split()), index_for=tuple(index_for.split()))

    one = config("full oracle tactic csattention@period=2", "squeezed tactic")
    assert one.indexed() == ["csattention@period=2", "squeezed", "tactic"]
    assert config("squeezed", "csattention@period=2 tactic").indexed() == one.indexed()


def test_questions_are_shared_among_tasks_and_contexts() -> None:
    config = EvaluationConfig(Path("x"), questions=216, facts=24)
    assert config.document_sets(8192) == [DocumentSet(9, 24)]
    assert replace(config, questions=25).document_sets(8192) == [DocumentSet(2, 24)]
    several = replace(config, tasks=("single", "words"), questions=31, distractors=1)
    assert several.questions_by_task() == {"single": 16, "words": 15}
    assert several.document_sets(8192) == [DocumentSet(1, 24, "single", 1), DocumentSet(2, 8, "words", 1)]


def test_a_context_with_too_many_questions_is_asked_at_every_depth() -> None:
    def document(family: str, count: int) -> Document:
        questions = tuple(Question(str(i), "a", "p", i, i / count, family=family) for i in range(count))
        return Document("", 10, questions, "", family)

    config = EvaluationConfig(Path("x"), tasks=("single", "chain"), questions=12)
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
        ({"placement": "disk"}, InvalidArgumentError),
        ({"placement": "hybrid", "device": "cpu"}, InvalidArgumentError),
        ({"placement": "host", "device": "cpu"}, InvalidArgumentError),
    ],
)
def test_a_wrong_configuration_is_refused_before_any_work(
    wrong: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        EvaluationConfig(Path("x"), **wrong)


@pytest.mark.nightly
def test_a_context_is_prefilled_by_a_process_of_its_own(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", "llama", head_dim=32)
    (tmp_path / "text").write_text("Some text. " * 20)
    report = PrefillCommand(str(model), tmp_path / "store", ["csattention"]).run(tmp_path / "text", "name")
    (stored,) = Store(tmp_path / "store").list()
    assert (report["id"], report["tokens"]) == (stored.id, stored.token_count)


def test_progress_in_a_pipe_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.0, 4.0, 12.0, 16.0])
    # Of this module alone: servers of other tests in this process ask for the time, too.
    monkeypatch.setattr("index_store.cli.console.time", SimpleNamespace(monotonic=lambda: next(seconds)))
    stream = io.StringIO()
    with show_stages(stream) as start_stage:
        advance = start_stage("asking", 3)
        for _ in range(3):
            advance()
    assert stream.getvalue().splitlines() == [
        "asking: 0 of 3",
        "asking: 2 of 3, about 6 s left",
        "asking: 3 of 3, 16 s",
    ]


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process, where everything is imported, and reads its JSON."""

    def run_here(*arguments: str, fails: bool = False) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["decode-engine", *arguments, "--format", "json"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capsys.readouterr()
        assert ((caught.value.code or 0) in (1, 2)) == fails, printed.err
        return {"error": printed.err} if fails else json.loads(printed.out)

    return run_here


READER = [
    "--context-length",
    "1k",
    "--questions",
    "2",
    "--facts",
    "2",
    "--text-tokens",
    "20",
    "--keep",
    "0.05,1",
]


@pytest.mark.slow
@pytest.mark.usefixtures("prefilled_here")
def test_evaluate_command_end_to_end(run: Run, tmp_path: Path) -> None:
    methods = "oracle,csattention,csattention-paper"
    arguments = [*READER, "--methods", methods, "--store", str(tmp_path / "store")]
    results = run("evaluate", "--out", str(tmp_path / "a"), *arguments)
    assert results["settings"]["prompts"] == "each"
    scores = [Score(**row) for row in results["scores"]]
    assert [(score.context_length, score.task, score.method, score.keep) for score in scores] == [
        (1024, "all", "full", None),
        *((1024, "all", method, keep) for method in methods.split(",") for keep in (0.05, 1.0)),
    ]
    for score in scores:
        assert score.questions == 2
        if score.method == "full":
            assert (score.kl, score.kl_text, score.exact_match_loss) == pytest.approx(
                (0.0, 0.0, 0.0), abs=1e-5
            )
            assert (score.touched_sparse, score.touched_all, score.recall) == (None, 1.0, None)
            assert score.bytes_all == 1.0
            continue
        assert score.touched_sparse is not None
        shares = [score.search_share or 0.0, score.exact_share or 0.0, score.remainder_share or 0.0]
        assert sum(shares) == pytest.approx(score.bytes_share, rel=1e-6)
        assert score.bytes_all is not None
        assert score.bytes_share is not None
        assert min(score.bytes_share, 1.0) - 1e-6 <= score.bytes_all  # what does not search is read whole
        # The reader has two KV heads of 64 in each of its layers; what is left are token ids and padding.
        layers = len(json.loads((tmp_path / "a" / "results.json").read_text())["mass_maps"][0]["layers"])
        assert score.device_bytes_per_token == 0
        least = 2 * 2 * 64 * 2 * layers + score.index_bytes_per_token
        assert least < (score.host_bytes_per_token or 0.0)
        assert score.output_error is not None
        assert score.captured_mass is not None
        if score.keep == 1.0 and score.method != "csattention-paper":
            assert score.kl == pytest.approx(0.0, abs=1e-4)
            assert score.output_error == pytest.approx(0.0, abs=1e-3)
            assert (score.touched_all, score.captured_mass) == pytest.approx((1.0, 1.0), abs=1e-4)
        elif score.keep == 0.05:
            assert score.touched_sparse < 1.0
            assert 0.0 < score.captured_mass < 1.0
            assert score.method != "oracle" or score.recall == pytest.approx(1.0, abs=0.01)
    assert (tmp_path / "a" / "quality.png").exists()
    assert (tmp_path / "a" / "costs.png").exists()
    assert (tmp_path / "a" / "mass_map.png").exists()
    stored = sorted(path.name for path in (tmp_path / "store" / "contexts").iterdir())
    assert len(stored) == 1

    few = [*READER, "--methods", "csattention", "--index-for", "csattention-paper"]
    few += ["--store", str(tmp_path / "store"), "--no-picture"]
    again = run("evaluate", "--out", str(tmp_path / "b"), *few)
    assert sorted(path.name for path in (tmp_path / "store" / "contexts").iterdir()) == stored
    repeated = [Score(**row) for row in again["scores"]]
    before = [score.kl for score in scores if score.method in {"full", "csattention"}]
    assert [score.kl for score in repeated] == pytest.approx(before, abs=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("prefilled_here")
def test_a_folder_of_ones_own_is_evaluated_with_ones_own_texts(run: Run, tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", "qwen3", add_begin=True)
    novels = held_out_text()
    for number in range(2):
        (tmp_path / f"text{number}").write_text(novels[number * 20_000 : (number + 1) * 20_000])
    arguments = ["--model", str(model), "--out", str(tmp_path / "out"), "--context-length", "1500"]
    arguments += ["--text", str(tmp_path / "text0"), "--text", str(tmp_path / "text1"), "--chat"]
    arguments += ["--tasks", "chain,words", "--questions", "2", "--facts", "1", "--text-tokens", "16"]
    arguments += ["--methods", "tactic,squeezed,oracle@period=2,multipole", "--keep", "0.05", "--mass", "0.8"]
    arguments += ["--dense-layers", "none", "--index", "key_clusters:keys_per_cluster=32"]
    results = run("evaluate", *arguments, "--no-picture")
    for context in Store(tmp_path / "out" / "store").list():
        assert [entry.parameters["keys_per_cluster"] for entry in context.indexes] == [32]
    scores = [Score(**row) for row in results["scores"]]
    assert [(score.method, score.budget) for score in scores[:5]] == [
        ("full", "all"),
        ("tactic", "mass 0.8"),
        ("squeezed", "5.00%"),
        ("oracle@period=2", "5.00%"),
        ("multipole", "5.00%"),
    ]
    assert [(score.task, score.questions) for score in scores[::5]] == [
        ("all", 2),
        ("chain", 1),
        ("words", 1),
    ]
    assert all(score.method == "full" or 0.0 < (score.captured_mass or 0.0) <= 1.0 for score in scores)
    without = write_model_folder(tmp_path / "plain", chat_template=None)
    arguments = ["--model", str(without), "--chat", "--out", str(tmp_path / "x")]
    assert "has no chat template" in run("evaluate", *arguments, fails=True)["error"]


@pytest.mark.slow
@pytest.mark.usefixtures("prefilled_here")
def test_contexts_that_share_text_are_one_draw(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(held_out_text()[:3600])
    config = EvaluationConfig(
        tmp_path / "out",
        context_lengths=(512,),
        text=(text,),
        questions=4,
        facts=2,
        methods=("full",),
        text_tokens=20,
        device="cpu",
    )
    with show_stages(io.StringIO()) as start_stage:
        (score,) = evaluate(config, start_stage).scores
    assert (score.questions, score.contexts, score.exact_match_se, score.kl_se) == (4, 1, None, None)


def test_expressions_become_flags() -> None:
    assert attention_flags("exact") == []
    assert attention_flags("muse") == ["--attention", "muse"]
    assert attention_flags("muse:block=1024, cap=2.0,monopole") == [
        *("--attention", "muse", "--muse-block", "1024", "--muse-cap", "2.0", "--no-muse-dipole")
    ]
    for expression in (
        "fast",
        "exact:block=3",
        "muse:",
        "muse:block",
        "muse:speed=2",
        "muse:dipole",
        "muse:block=x",
        "muse:block=1.5",
    ):
        with pytest.raises(InvalidArgumentError, match="attention is"):
            attention_flags(expression)


def test_what_a_usage_error_says_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "computing on cpu\nerror: invalid value for '--chunk'\n"
    done = subprocess.CompletedProcess([], 2, stdout="", stderr=said)
    monkeypatch.setattr("decode_engine.evaluation.prefill_command.subprocess.run", lambda *_, **__: done)
    with pytest.raises(PrefillFailedError, match=r"text: invalid value for '--chunk'$"):
        PrefillCommand("reader", tmp_path, ["full"]).run(tmp_path / "text", "name")


def test_variants_are_there_twice() -> None:
    config = EvaluationConfig(Path("o"), methods=("full",), attention="muse:block=512")
    assert [variant.name for variant in config.variants()] == ["full"]
    assert [variant.name for variant in config.approximated()] == ["full after muse:block=512"]
    assert EvaluationConfig(Path("o")).approximated() == []
    with pytest.raises(InvalidArgumentError, match="cannot read 'speed=2'"):
        EvaluationConfig(Path("o"), attention="muse:speed=2")


@pytest.mark.slow
@pytest.mark.usefixtures("prefilled_here")
def test_the_cost_of_an_approximate_prefill_is_shown(run: Run, tmp_path: Path) -> None:
    attention = "muse:block=128,clusters=4"
    results = run(
        *("evaluate", "--out", str(tmp_path), "--context-length", "700", "--questions", "2"),
        *("--facts", "2", "--text-tokens", "16", "--methods", "full", "--attention", attention),
        "--no-picture",
    )
    exact, approximated = results["scores"]
    assert exact["method"] == "full"
    assert exact["kl"] == 0.0
    assert approximated["method"] == f"full after {attention}"
    assert approximated["kl_text"] > 0.0
    assert approximated["questions"] == exact["questions"] == 2
    kept = {manifest.prefill["attention"] for manifest in Store(tmp_path / "store").list()}
    assert kept == {"exact", "muse"}
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["attention"] == attention


def test_results_hold_every_score(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    write_results(tmp_path, results)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.csv", "results.json", "results.md"]
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.as_json()))
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in rows] == [score.kl for score in results.scores]
    blocks = (tmp_path / "results.md").read_text().split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert [len(table) for table in tables] == [2 + 6, 2 + 6, 2 + 4]
    assert all(len({line.count("|") for line in table}) == 1 for table in tables)


def test_tables_on_the_terminal(tmp_path: Path) -> None:
    scores = some_scores()
    console = Console(width=200, record=True, file=(tmp_path / "table").open("w"))
    for table in tables(scores, "title", "exact"):
        console.print(table)
    text = console.export_text()
    assert text.count("csattention") == 12
    assert "20.0% │   2.0% │ 10.0% │      8.0%" in text.replace("\u2502", "│")
    assert "n = 2 questions about 2 contexts" in text
    assert "prompts exact" in text
    assert "keys" in text
    assert figures_by_task([score for score in scores if score.task == ALL_TASKS]) is None


def test_many_methods_are_drawn(tmp_path: Path) -> None:
    results = some_results([*(f"method-{number}" for number in range(13)), "csattention"])
    names = draw_pictures(tmp_path, results.scores, results.maps)
    assert names == [QUALITY, COSTS, MASS_MAP]
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    only_full = [score for score in results.scores if score.method == "full"]
    assert draw_pictures(tmp_path, only_full, []) == [QUALITY]


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(3.0, 0.1), (1.0, 0.5), (2.0, 0.6), (4.0, 0.1), (1.0, 0.7), (5.0, 0.01)]
    assert pareto_front(points) == [(1.0, 0.5), (3.0, 0.1), (5.0, 0.01)]
    assert pareto_front([]) == []


def test_results_are_replaced_as_a_whole(tmp_path: Path) -> None:
    results = some_results()
    write_results(tmp_path, results)
    (tmp_path / "results.json").chmod(0o444)
    write_results(tmp_path, results)  # replaced as a whole, not written into
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(json.dumps(results.as_json()))


def test_a_method_far_from_full_attention_is_warned_of() -> None:
    score = some_scores()[0]
    near = replace(score, task=ALL_TASKS, captured_mass=0.47, kl=0.05)
    far = replace(near, kl=0.59)
    assert warnings([near, replace(far, task="single"), replace(far, captured_mass=None)]) == []
    (said,) = warnings([near, far])
    assert said.startswith(
        f"{score.method} at {score.budget} after {score.context_length:,} tokens is 0.59 nats"
    )
    assert "captures 47% of the attention" in said
