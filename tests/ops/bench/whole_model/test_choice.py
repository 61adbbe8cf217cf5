"""Benchmarks of the choice by time, of constraints and of edits of logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from decode_engine.engine.sampling.edits_triton import read_logprob
from decode_engine.steps import step_graph
from decode_engine.steps.stepper import Stepper
from tests.ops.bench.conftest import Run, load_bench
from tests.support.tiny_model import IDENTITY, make_model


def test_answers_to_random_schemas_validate(capsys: pytest.CaptureFixture[str]) -> None:
    bench = load_bench("whole_model/constraints")
    bench.main(schemas=6, tokens=40)
    line = json.loads(capsys.readouterr().out)
    assert line["finished"] >= 2
    assert line["valid"] == line["finished"]
    assert line["choose_us"] > 0


def test_a_wrong_answer_is_found() -> None:
    bench = load_bench("whole_model/constraints")
    for text in ("[1, 2", '{"a": "b"}'):
        with pytest.raises(bench.CheckFailedError):
            bench.check({"type": "object", "properties": {"a": {"type": "integer"}}}, text)


@pytest.fixture
def bench(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = load_bench("whole_model/edits_gpu")
    wide = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64, vocab_size=480)
    monkeypatch.setattr(made, "make_model", lambda layers: (make_model(wide), wide))
    monkeypatch.setattr(made, "WARM_UP", 1)
    monkeypatch.setattr(Stepper, "flies", True)
    return made


def rows(bench: ModuleType, run: Run) -> tuple[Sequence[dict[str, Any]], int]:
    found, code, _ = run(bench, shape="40x2@1", turns=5, layers=1, alike=1.0)
    return found, code


def test_every_kind_says_what_the_reference_says(bench: ModuleType, run: Run) -> None:
    found, code = rows(bench, run)
    assert code == 0
    assert len(found) == 16
    assert {line["alike"] for line in found} == {1.0}
    assert all(line["ratio"] > 0 for line in found)


def test_wrong_log_probabilities_are_not_timed(
    bench: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(result_X: Any, told: int) -> Any:
        found = read_logprob(result_X, told)
        return replace(found, logprob=found.logprob - 0.01)

    monkeypatch.setattr(step_graph, "read_logprob", wrong)
    found, code = rows(bench, run)
    assert code == 1
    assert {line["kind"] for line in found} == {"penalties", "bias", "min_tokens"}
