"""Tuning: what it measures is true, the cheapest that is enough wins, and the default lies beside the context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from decode_engine.cli.command_line import commands
from decode_engine.evaluation.tuning import (
    KEEPS,
    MASSES,
    BudgetSweep,
    Candidate,
    KlMeter,
    MassMeter,
    Measurement,
    continuation,
    find_sweeps,
    tune,
)
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import SparseLayer
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


@pytest.fixture
def meter(served: Served) -> Iterator[MassMeter]:
    with served.store.open(served.context.manifest.id) as stored:
        yield MassMeter(stored, served.context, 0.9)


def small(expression: str, keep: float | None = None, mass: float | None = None) -> Method:
    """The method with small windows, so that little is attended anyway."""
    return replace(get_method(expression, keep, mass=mass), recent=8, append_block=4)


class Scripted:
    """A meter of methods whose mass is their budget times their strength."""

    def __init__(self, strengths: dict[str, float], target: float) -> None:
        self._strengths, self._target = strengths, target
        self.measured: list[str] = []

    def measure(self, method: Method) -> Measurement:
        self.measured.append(method.name)
        keep = method.budget.keep  # type: ignore[union-attr]
        return Measurement(keys=keep, mass=min(1.0, keep * self._strengths[method.name]))

    def reaches(self, measurement: Measurement) -> bool:
        return self.shortfall(measurement) <= 0

    def shortfall(self, measurement: Measurement) -> float:
        return self._target - (measurement.mass or 0.0)


def sweep(expression: str, index_bytes: int = 0) -> BudgetSweep:
    return BudgetSweep(expression, tuple(Candidate(expression, keep=keep) for keep in KEEPS), index_bytes)


def no_progress(label: str, total: int) -> object:
    return lambda: None


@pytest.mark.parametrize("strength", [1000.0, 300.0, 90.0, 50.0, 19.0, 9.0, 4.6])
def test_the_smallest_budget_that_is_enough_is_found(strength: float) -> None:
    scripted = Scripted({"quest": strength}, 0.9)
    advanced: list[int] = []
    outcomes = tune([sweep("quest")], scripted, lambda label, total: lambda: advanced.append(total))
    enough = [keep for keep in KEEPS if keep * strength >= 0.9]
    assert outcomes[0].reached
    assert outcomes[0].candidate.keep == enough[0]
    assert len(scripted.measured) <= 4
    assert advanced == [4] * 4


def test_the_cheapest_comes_first_and_then_those_that_fell_short() -> None:
    strengths = {"quest": 10.0, "refined": 60.0, "csattention": 60.0, "multipole": 1.0, "squeezed": 2.0}
    sizes = {"refined": 10, "csattention": 500}
    sweeps = [sweep(name, sizes.get(name, 1)) for name in strengths]
    outcomes = tune(sweeps, Scripted(strengths, 0.9), no_progress)  # type: ignore[arg-type]
    assert [(o.candidate.expression, o.reached) for o in outcomes] == [
        ("refined", True),
        ("csattention", True),
        ("quest", True),
        ("squeezed", False),
        ("multipole", False),
    ]
    assert outcomes[3].candidate.keep == KEEPS[-1]
    assert outcomes[3].measurement.mass == pytest.approx(0.4)


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


def late_queries(served: Served, layer: int) -> tuple[Tensor, list[int]]:
    """[H, P, G, d] scaled, of the context's last 64 positions."""
    count = served.context.manifest.token_count
    with served.store.open(served.context.manifest.id) as stored:
        sample = stored.queries(layer)
    last = (sample.positions_P >= count - 64) & (sample.positions_P < count)
    scaled = sample.queries_HPGD[:, last] * served.context.manifest.model.head_dim**-0.5
    return scaled, sample.positions_P[last].tolist()


@pytest.mark.parametrize("method", [small("csattention", keep=0.05), small("tactic", mass=0.7)])
def test_mass_and_error_are_those_of_the_keys_attended(
    served: Served, meter: MassMeter, method: Method
) -> None:
    """Recomputed key by key over the same 16 positions, each seeing only the keys before it."""
    found = meter.measure(method)
    session = served.start(method)
    masses, errors, attended, available = [], [], 0.0, 0
    for number, layer in enumerate(session.layers):
        queries, positions = late_queries(served, number)
        rows = torch.linspace(0, len(positions) - 1, 16).round().long().tolist()
        keys, values = served.context.keys(number).double(), served.context.values(number).double()
        for row in rows:
            position = positions[row]
            q_HGD = queries[:, row].double()
            weights = (q_HGD @ keys[:, : position + 1].transpose(1, 2)).softmax(-1)
            available += position + 1
            if not isinstance(layer, SparseLayer):
                masses.append(1.0)
                errors.append(0.0)
                attended += position + 1
                continue
            seen: list[Observation] = []
            layer.observer = seen.append
            out = layer.replay(queries[:, row : row + 1], position)[:, 0].double()
            kept_HN = torch.zeros(len(keys), position + 1, dtype=torch.bool)
            kept_HN[:, : seen[0].sinks] = kept_HN[:, seen[0].search_end :] = True
            for head, count in enumerate(seen[0].selection.counts_HT[:, 0].tolist()):
                kept_HN[head, seen[0].selection.ids_HTK[head, 0, :count].long()] = True
            assert seen[0].search_end <= position - method.recent
            masses.append(float((weights * kept_HN[:, None]).sum(-1).mean()))
            truth = weights @ values[:, : position + 1]
            errors.append(float((out - truth).norm() / truth.norm()))
            attended += float(kept_HN.sum(-1).double().mean())
    assert found.mass == pytest.approx(sum(masses) / len(masses), rel=1e-4)
    assert found.error == pytest.approx(sum(errors) / len(errors), rel=1e-3)
    assert found.keys == pytest.approx(attended / available, rel=1e-5)
    assert found.mass is not None
    assert 0.0 < found.keys < found.mass < 1.0


def test_a_schedule_is_refused_where_it_cannot_be_judged(served: Served, meter: MassMeter) -> None:
    with pytest.raises(MethodUnsupportedError, match="tune for a KL"):
        meter.measure(get_method("csattention@period=2"))
    kl = KlMeter(served.runner, served.context, [continuation(served.context)[:20]], 0.1)
    assert kl.measure(small("csattention@period=2", keep=0.02)).kl > 0  # type: ignore[operator]


def test_kl_is_small_for_large_budgets(served: Served) -> None:
    text = continuation(served.context)
    assert text == served.context.tokens()[-129:].tolist()
    kl = KlMeter(served.runner, served.context, [text, text[:40]], 0.05)
    few, all_ = (kl.measure(small("csattention+dropped", keep=keep)) for keep in (0.01, 1.0))
    assert all_.kl == pytest.approx(0.0, abs=1e-4)
    assert all_.keys == 1.0
    assert few.kl > 0.01  # type: ignore[operator]
    assert few.keys < 0.7
    assert kl.reaches(all_)
    with pytest.raises(InvalidArgumentError, match="positions"):
        KlMeter(served.runner, served.context, [[1] * 4000], 0.05)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands(), ["tune", *arguments])


def tune_toy(served: Served, *arguments: str) -> Result:
    return run("--store", str(served.store.path), "--context", served.context.manifest.id[:8], *arguments)


def test_the_command_keeps_a_default_beside_the_context(served: Served) -> None:
    id_ = served.context.manifest.id
    contexts = served.store.path / "contexts"
    before = {path: path.read_bytes() for path in contexts.rglob("*") if path.is_file()}
    dry = tune_toy(served, "--target-mass", "0.6", "--dry-run", "--format", "json")
    assert dry.exit_code == 0, dry.output
    document = json.loads(dry.stdout)
    assert (document["context"], document["reached"], document["written"]) == (id_, True, False)
    assert served.store.default_method(id_) is None
    done = tune_toy(served, "--target-mass", "0.6")
    assert done.exit_code == 0, done.output
    assert "is now the default of" in done.stdout
    default = served.store.default_method(id_)
    chosen = document["chosen"]
    assert chosen == document["candidates"][0]
    assert (default.method, default.keep, default.mass) == (chosen["method"], chosen["keep"], chosen["mass"])
    assert (default.target, default.wanted) == ("mass", 0.6)
    assert default.reached == chosen["measured"]
    assert default.reached["mass"] >= 0.6
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
        *("--target-kl", "5", "--model", str(served.folder), "--prompts", str(prompts)),
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
    before = served.store.default_method(served.context.manifest.id)
    with pytest.raises(SystemExit) as ended:
        run_app(
            commands(),
            "decode-engine",
            [*arguments, "--target-mass", "1", "--methods", "quest,squeezed", "--format", "json"],
        )
    assert ended.value.code == 1
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["reached"], document["chosen"], document["written"]) == (False, None, False)
    assert len(document["candidates"]) == 2
    assert "error: no method reaches a captured mass of 1; the best is" in printed.err
    assert served.store.default_method(served.context.manifest.id) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "one of --target-mass and --target-kl"),
        (("--target-mass", "0.9", "--target-kl", "1"), "one of --target-mass and --target-kl"),
        (("--target-mass", "1.5"), "at most 1"),
        (("--target-kl", "0", "--model", "reader"), "number above 0"),
        (("--target-kl", "0.1"), "--model belongs to --target-kl"),
        (("--target-mass", "0.9", "--model", "reader"), "--model belongs to --target-kl"),
        (("--target-mass", "0.9", "--prompts", __file__), "--prompts belongs to --target-kl"),
        (("--target-mass", "0.9", "--methods", "csattention@period=2"), "tune for a KL"),
        (("--target-mass", "0.9", "--methods", "full"), "no budget to tune"),
    ],
)
def test_what_does_not_go_together_is_refused(
    served: Served, arguments: tuple[str, ...], message: str
) -> None:
    done = tune_toy(served, *arguments)
    assert isinstance(done.exception, SparseKVError)
    assert message in done.exception.message
