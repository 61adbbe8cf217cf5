"""What benchmarks share: nothing is reported without a check, a GPU where one is needed, and what options say."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from harness import report
from harness.parsing import parse_counts, parse_method, parse_shapes, parse_shared_shapes
from harness.report import CheckFailedError, check_close, failure
from harness.steps import general_steps

from decode_engine.model.warm_up import made_up_context
from index_store.errors import InvalidArgumentError
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS
from tests.ops.bench.conftest import FOLDER, Run, load_bench
from tests.support.tiny_model import IDENTITY, make_model

BENCHES = [path for path in sorted(FOLDER.rglob("*.py")) if "harness" not in path.parts]
NEED_GPU = [
    path for path in BENCHES if not re.search(r"gpu=(False|device|\"step\" in wanted)", path.read_text())
]


@pytest.mark.parametrize("path", NEED_GPU, ids=lambda path: path.stem)
def test_without_a_device_it_says_so(path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run(load_bench(str(path.relative_to(FOLDER).with_suffix(""))))
    assert found == ([], 1, "error: this benchmark needs a CUDA device\n")


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: path.stem)
def test_every_benchmark_explains_itself_and_reports_through_the_harness(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert len(ast.get_docstring(tree) or "") > 300
    names = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert names.count("reporting") == 1


def reported(bars: bool, *rows: tuple[dict[str, Any], str]) -> int:
    """The exit code of a run with these figures and what they missed."""
    try:
        with report.reporting("some", bars, gpu=False) as found:
            for row, missed in rows:
                found.add(row, *filter(None, [missed]))
    except typer.Exit as ended:
        return ended.exit_code
    return 0


def test_a_line_per_figure_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        ({"name": "a", "us": 1.2345678, "same": 1, "parts": {"x": 0.1234567}}, ""),
        ({"name": "b", "same": 1}, ""),
    ]
    assert reported(True, *rows) == 0
    written = capsys.readouterr()
    first, second = (json.loads(line) for line in written.out.splitlines())
    machine = first.pop("machine")
    assert {"date", "processor", "cores", "device", "torch", "triton", "numba", "python"} <= set(machine)
    assert first == {"bench": "some", "name": "a", "us": 1.23457, "same": 1, "parts": {"x": 0.12346}}
    assert second["machine"] == machine
    assert [line.split() for line in written.err.splitlines()[::2]] == [
        ["|", "name", "|", "us", "|"],
        ["|", "a", "|", "1.235", "|"],
    ]


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(True) == 0
    assert reported(False, ({"us": 1.0}, "too slow")) == 0
    assert reported(True, ({"us": 1.0}, "too slow")) == 1
    assert "missed: too slow" in capsys.readouterr().err
    assert reported(False, ({"error": "wrong"}, "")) == 1


@pytest.mark.parametrize("error", [CheckFailedError("wrong"), InvalidArgumentError("wrong")])
def test_nothing_is_reported_after_a_failed_check(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit), report.reporting("some", gpu=False):
        raise error
    assert capsys.readouterr() == ("", "error: wrong\n")


def test_wrong_tensors_fail_the_check() -> None:
    truth = torch.ones(2, 3).double()
    assert check_close("right", torch.ones(6), truth, 1e-3) == 0
    for wrong in (1.01, torch.nan):
        with pytest.raises(CheckFailedError, match="wrong: relative error"):
            check_close("wrong", torch.full((2, 3), wrong), truth, 1e-3)


def test_failures_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(CheckFailedError("logits differ")) == {"error": "logits differ"}
    assert capsys.readouterr().err == ""
    assert failure(KeyError("scores")) == {"error": "KeyError: 'scores'"}
    assert "KeyError" in capsys.readouterr().err


def test_options_are_parsed() -> None:
    method = parse_method("csattention+dropped:0.01/m8/pooled")
    assert (method.budget.keep, method.search["group"]) == (0.01, "pooled")
    assert (method.index.parameters["subspaces"], method.index.parameters["centroids"]) == (8, 64)
    assert parse_method("full").index is None
    assert (parse_counts("1,2"), parse_counts("0,4", least=0)) == ([1, 2], [0, 4])
    assert parse_shapes("32768x4,8x1") == [(32768, 4), (8, 1)]
    assert parse_shared_shapes("32768x16@1,8x2") == [(32768, 16, 1), (8, 2, 2)]
    for parse, wrongs in (
        (parse_shared_shapes, ["8x2@3", "8x2@", "8@2"]),
        (parse_method, ["csattention:0.01/m9"]),
        (parse_counts, ["", "0", "1,x"]),
        (parse_shapes, ["32768", "0x1"]),
    ):
        for wrong in wrongs:
            with pytest.raises(typer.BadParameter):
                parse(wrong)


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def make_context(name: str) -> ResidentContext:
    """In which the tiny model's queries, of weights of .02 and 64 inputs, keep what thresholds are calibrated for."""
    return made_up_context(IDENTITY, "float32", METHODS[name], 1200, calibrated_for=0.16)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_can_be_timed_on_the_general_path(model: Any, name: str) -> None:
    method = METHODS[name]
    found = general_steps.measure_general(model, [make_context(name)], method, 3)
    assert (found["captured"], found["steps"]) == (False, 3)
    assert 0 < found["step_ms"] <= found["p99_ms"]
    some_only = {"full", "exact", "squeezed-tree", "multipole-tree", "csattention-paper"}
    assert (found["logits_difference"] is None) == (name in some_only)
    assert found["logits_difference"] is None or found["logits_difference"] < 1e-3
    exactly = (method.sinks + method.recent + method.append_block) / 1200
    if getattr(method.budget, "keep", None) == 0.05:
        assert 0.05 < found["attended"] < 0.05 + exactly + 0.05


def test_wrong_steps_of_the_general_path_are_not_timed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = general_steps.forward

    def spoiled(model: Any, sessions: Any, tokens: Any) -> Any:
        logits = forward(model, sessions, tokens)
        return logits.flip(-1) if sessions[0].method.sparse else logits

    monkeypatch.setattr(general_steps, "forward", spoiled)
    with pytest.raises(CheckFailedError, match="logits differ"):
        general_steps.measure_general(model, [make_context("quest")], METHODS["quest"], 3)


@pytest.mark.usefixtures("without_gpu")
def test_slow_steps_are_timed_for_a_while_only(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(general_steps, "GENERAL_SECONDS", 0.0)
    assert general_steps.measure_general(model, [make_context("full")], METHODS["full"], 100)["steps"] == 10
