"""Benchmarks of drafts, of the choice by time and of rows of fewer bits: their whole paths on a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import typer

from decode_engine.engine.drafting import Allowance
from decode_engine.model.method_choice import StepCosts, StepTime, label
from index_store.memory.placement import Placement
from index_store.methods.presets import get_method
from tests.ops.bench.conftest import Run, load_bench
from tests.support.tiny_model import IDENTITY, make_model


def test_told_answers_are_said_with_about_as_many_right_drafts(
    without_gpu: None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load_bench("whole_model/exact_gpu")
    wide = replace(IDENTITY, layers=2, query_heads=2, kv_heads=1, head_dim=64, max_positions=4096)
    monkeypatch.setattr(bench, "make_model", lambda layers: (make_model(wide), wide))
    monkeypatch.setattr(Allowance, "pays", lambda self, cost: 1)  # drafts of this model lose on a CPU
    found, code, _ = run(
        bench, shapes="400x2@1", kinds="copied:1,method:1,method:0,bad", tokens=24, turns=1, layers=2,
    )  # fmt: skip
    assert code == 0
    copied, right, wrong, bad = found
    assert copied["accepted"] == 1.0
    assert copied["drafted"] > 12
    assert right["accepted"] == 1.0
    assert wrong["accepted"] == bad["drafted"] == 0


def test_what_was_chosen_is_compared_with_the_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("whole_model/choice")
    context = SimpleNamespace(
        manifest=SimpleNamespace(token_count=1000, rows="bfloat16"), release=lambda: None
    )
    monkeypatch.setattr(bench, "made_up_context", lambda *_, **__: context)
    monkeypatch.setattr(
        bench, "step_times", lambda runner, context, methods, count, turns: [8.0, 4.0 * count]
    )
    own = get_method("refined")
    times = {"full": StepTime(0.004, 0.0, 0.0, 0.0), label(own): StepTime(0.005, 0.0, 0.0, 0.0)}
    costs = StepCosts({(name, Placement.DEVICE): each for name, each in times.items()})
    runner = SimpleNamespace(identity=None, kv_dtype=None, device=None)
    one, many = bench.figures(runner, costs, own, [1000], [1, 4], 1)
    assert one == {
        "tokens": 1000, "sessions": 1, "method": label(own), "full_ms": 8.0, "own_ms": 4.0, "chosen": "full",
        "ratio": 2.0, "told_ms": pytest.approx(4.0),
    }  # fmt: skip
    assert (many["sessions"], many["own_ms"], many["ratio"]) == (4, 16.0, 1.0)


def test_rows_of_fewer_bits_are_farther_from_float32(run: Run) -> None:
    bench = load_bench("whole_model/rows_quality")
    cases = "full@float32,full@bfloat16,full@int8,full@float8,refined:0.05@bfloat16"
    found, code, _ = run(bench, context_length="1k", documents=2, facts=2, text_tokens=24, cases=cases)
    assert code == 0
    text = {line["case"]: line["kl_text"] for line in found}
    assert text["full@float32"] < 1
    assert text["full@bfloat16"] < text["full@float8"] / 4
    assert text["full@int8"] < text["full@float8"] / 4
    assert text["refined:0.05@bfloat16"] < text["full@float8"]
    assert all(line["questions"] == 4 and line["kl_text_se"] >= 0 for line in found)


def test_rows_that_nobody_keeps_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="expected METHOD@ROWS"):
        load_bench("whole_model/rows_quality").parse_case("full@int4")
