"""Steps of the general path in benchmarks: every method's are timed, and wrong ones are not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from decode_engine.model.warm_up import made_up_context
from index_store.memory.resident import ResidentContext
from index_store.methods.method import METHODS
from tests.ops.scripts import load_script
from tests.ops.tiny_model import IDENTITY, make_model

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "general_steps.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def test_methods_with_variants(bench: ModuleType) -> None:
    method = bench.parse_method("csattention+dropped:0.01/m8/pooled")
    assert (method.budget.keep, method.search["group"]) == (0.01, "pooled")
    assert (method.index.parameters["subspaces"], method.index.parameters["centroids"]) == (8, 64)
    assert bench.parse_method("full").index is None
    with pytest.raises(bench.typer.BadParameter):
        bench.parse_method("csattention:0.01/m9")


def test_percentiles(bench: ModuleType) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert (bench.percentile(values, 0.99), bench.percentile(values, 0.5)) == (99.0, 50.0)
    assert bench.percentile(values[:25], 0.99) == 100.0
    assert (bench.percentile(values, 0.0), bench.percentile(values, 1.0)) == (1.0, 100.0)
    figures = bench.step_figures([0.004, 0.002, 0.003], 2)
    assert figures == {"step_ms": 3.0, "p99_ms": 4.0, "steps": 3, "tokens_per_s": 666.7}


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


def make_context(name: str) -> ResidentContext:
    """In which the tiny model's queries, of weights of .02 and 64 inputs, keep what thresholds are calibrated for."""
    return made_up_context(IDENTITY, "float32", METHODS[name], 1200, calibrated_for=0.16)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_can_be_timed_on_the_general_path(bench: ModuleType, model: Any, name: str) -> None:
    method = METHODS[name]
    found = bench.measure_general(model, [make_context(name)], method, 3, 1)
    assert (found["captured"], found["steps"]) == (False, 3)
    assert 0 < found["step_ms"] <= found["p99_ms"]
    some_only = {"full", "squeezed-tree", "multipole-tree", "csattention-paper"}
    assert (found["logits_difference"] is None) == (name in some_only)
    assert found["logits_difference"] is None or found["logits_difference"] < 1e-3
    exactly = (method.sinks + method.recent + method.append_block) / 1200
    if getattr(method.budget, "keep", None) == 0.05:
        assert 0.05 < found["attended"] < 0.05 + exactly + 0.05


def test_wrong_steps_of_the_general_path_are_not_timed(
    bench: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = bench.forward

    def spoiled(model: Any, sessions: Any, tokens: Any) -> Any:
        logits = forward(model, sessions, tokens)
        return logits.flip(-1) if sessions[0].method.sparse else logits

    monkeypatch.setattr(bench, "forward", spoiled)
    with pytest.raises(bench.CheckFailedError, match="logits differ"):
        bench.measure_general(model, [make_context("quest")], METHODS["quest"], 3, 1)


def test_slow_steps_are_timed_for_a_while_only(
    bench: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "GENERAL_SECONDS", 0.0)
    assert bench.measure_general(model, [make_context("full")], METHODS["full"], 100, 1)["steps"] == 10
