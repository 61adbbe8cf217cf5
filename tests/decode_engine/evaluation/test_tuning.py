"""Tuning: what it measures is true, the cheapest that is enough wins, and the default lies beside the context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from decode_engine.cli.command_line import commands
from decode_engine.evaluation.tuning import (
    KEEPS,
    MASSES,
    BudgetSweep,
    Candidate,
    KlMeter,
    Measurement,
    continuation,
    find_sweeps,
    tune,
)
from decode_engine.model.runner import ModelRunner
from index_store.cli.app import run_app
from index_store.errors import InvalidArgumentError, MethodUnsupportedError, SparseKVError
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from tests.support.serving.served import Served, serve

METHODS = ("csattention", "quest", "squeezed", "multipole", "tactic")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("tuned"), "llama", methods=METHODS)


def small(expression: str, keep: float | None = None, mass: float | None = None) -> Method:
    """The method with small windows, so that little is attended anyway."""
    return replace(get_method(expression, keep, mass=mass), recent=8, append_block=4)


class Scripted:
    """Measures of methods whose KL is 1 less their budget times their strength, and no less than 0."""

    def __init__(self, strengths: dict[str, float]) -> None:
        self._strengths = strengths
        self.measured: list[str] = []

    def __call__(self, method: Method) -> Measurement:
        self.measured.append(method.name)
        keep = method.budget.keep  # type: ignore[union-attr]
        return Measurement(keys=keep, kl=max(0.0, 1.0 - keep * self._strengths[method.name]))


def sweep(expression: str, index_bytes: int = 0) -> BudgetSweep:
    return BudgetSweep(expression, tuple(Candidate(expression, keep=keep) for keep in KEEPS), index_bytes)


def no_progress(label: str, total: int) -> object:
    return lambda: None


@pytest.mark.parametrize("strength", [1000.0, 300.0, 90.0, 50.0, 19.0, 9.0, 4.6])
def test_the_smallest_budget_that_is_enough_is_found(strength: float) -> None:
    scripted = Scripted({"quest": strength})
    advanced: list[int] = []
    outcomes = tune([sweep("quest")], scripted, 0.1, lambda label, total: lambda: advanced.append(total))
    enough = [keep for keep in KEEPS if 1.0 - keep * strength <= 0.1]
    assert outcomes[0].reached
    assert outcomes[0].candidate.keep == enough[0]
    assert len(scripted.measured) <= 4
    assert advanced == [4] * 4


def test_the_cheapest_comes_first_and_then_those_that_fell_short() -> None:
    strengths = {"quest": 10.0, "refined": 60.0, "csattention": 60.0, "multipole": 1.0, "squeezed": 2.0}
    sizes = {"refined": 10, "csattention": 500}
    sweeps = [sweep(name, sizes.get(name, 1)) for name in strengths]
    outcomes = tune(sweeps, Scripted(strengths), 0.1, no_progress)  # type: ignore[arg-type]
    assert [(o.candidate.expression, o.reached) for o in outcomes] == [
        ("refined", True),
        ("csattention", True),
        ("quest", True),
        ("squeezed", False),
        ("multipole", False),
    ]
    assert outcomes[3].candidate.keep == KEEPS[-1]
    assert outcomes[3].measurement.kl == pytest.approx(0.6)


def test_what_the_context_supports_is_tried(served: Served) -> None:
    manifest = served.context.manifest
    found = {sweep.expression: sweep for sweep in find_sweeps(manifest, ())}
    assert set(METHODS) <= set(found)
    assert not {"full", "oracle"} & set(found)
    for family_ in found.values():
        assert family_.index_bytes > 0
        budgets = [candidate.mass or candidate.keep for candidate in family_.candidates]
        assert budgets == list(MASSES if family_.expression == "tactic" else KEEPS)
    with_remainder, without = find_sweeps(manifest, ["csattention", "csattention+dropped"])
    assert with_remainder.index_bytes > without.index_bytes
    for wrong in ("full", "pq", "nothing"):
        with pytest.raises(MethodUnsupportedError):
            find_sweeps(manifest, [wrong])


def test_kl_is_small_for_large_budgets(served: Served) -> None:
    text = continuation(served.context)
    assert text == served.context.tokens()[-129:].tolist()
    kl = KlMeter(served.runner, served.context, [text, text[:40]])
    few, all_ = (kl.measure(small("csattention+dropped", keep=keep)) for keep in (0.01, 1.0))
    assert all_.kl == pytest.approx(0.0, abs=1e-4)
    assert all_.keys == 1.0
    assert few.kl > 0.01
    assert few.keys < 0.7
    with pytest.raises(InvalidArgumentError, match="positions"):
        KlMeter(served.runner, served.context, [[1] * 4000])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands(), ["tune", *arguments])


def tune_toy(served: Served, *arguments: str) -> Result:
    context = served.context.manifest.id[:8]
    return run(
        "--store", str(served.store.path), "--context", context, "--model", str(served.folder), *arguments
    )


def test_the_command_keeps_a_default_beside_the_context(served: Served) -> None:
    id_ = served.context.manifest.id
    contexts = served.store.path / "contexts"
    before = {path: path.read_bytes() for path in contexts.rglob("*") if path.is_file()}
    dry = tune_toy(served, "--target-kl", "5", "--methods", "quest,squeezed", "--dry-run", "--format", "json")
    assert dry.exit_code == 0, dry.output
    document = json.loads(dry.stdout)
    assert (document["context"], document["reached"], document["written"]) == (id_, True, False)
    assert served.store.default_method(id_) is None
    done = tune_toy(served, "--target-kl", "5", "--methods", "quest,squeezed")
    assert done.exit_code == 0, done.output
    assert "is now the default of" in done.stdout
    default = served.store.default_method(id_)
    chosen = document["chosen"]
    assert chosen == document["candidates"][0]
    assert (default.method, default.keep, default.mass) == (chosen["method"], chosen["keep"], chosen["mass"])
    assert (default.target, default.wanted) == ("kl", 5.0)
    assert default.reached == chosen["measured"]
    assert default.reached["kl"] <= 5
    enough = [found for found in document["candidates"] if found["reached"]]
    assert chosen["measured"]["keys"] <= min(found["measured"]["keys"] for found in enough) * 1.01
    assert before == {path: path.read_bytes() for path in contexts.rglob("*") if path.is_file()}


def test_by_kl_and_by_texts_of_ones_own(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[ModelRunner] = []

    def close(runner: ModelRunner) -> None:
        closed.append(runner)

    monkeypatch.setattr(ModelRunner, "close", close)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Who lit the lamp?\n\nThe harbour was grey.\n")
    done = tune_toy(
        served,
        *("--target-kl", "5", "--prompts", str(prompts)),
        *("--methods", "quest,csattention@period=2", "--dry-run", "--format", "json"),
    )
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {found["method"] for found in document["candidates"]} == {"quest", "csattention@period=2"}
    assert set(document["chosen"]["measured"]) == {"keys", "kl"}
    assert len(closed) == 1  # whose search threads would stay


def test_nothing_that_is_enough_ends_with_1_and_the_best(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tune", "--store", str(served.store.path), "--context", served.context.manifest.id]
    arguments += ["--model", str(served.folder)]
    before = served.store.default_method(served.context.manifest.id)
    with pytest.raises(SystemExit) as ended:
        run_app(
            commands(),
            "decode-engine",
            [*arguments, "--target-kl", "1e-9", "--methods", "quest,squeezed", "--format", "json"],
        )
    assert ended.value.code == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["reached"], document["chosen"], document["written"]) == (False, None, False)
    assert len(document["candidates"]) == 2
    assert "error: no method reaches a KL divergence of 1e-09; the best is" in printed.err
    assert served.store.default_method(served.context.manifest.id) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target-kl", "0"), "number above 0"),
        (("--target-kl", "0.1", "--methods", "full"), "no budget to tune"),
        (("--target-kl", "5", "--methods", "quest", "--model", "reader"), "was prefilled by"),
    ],
)
def test_what_does_not_go_together_is_refused(
    served: Served, arguments: tuple[str, ...], message: str
) -> None:
    done = tune_toy(served, *arguments)
    assert isinstance(done.exception, SparseKVError)
    assert message in done.exception.message
