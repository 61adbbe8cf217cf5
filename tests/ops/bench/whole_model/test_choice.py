"""The benchmark of the choice by time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from decode_engine.model.method_choice import StepCosts, StepTime, label
from index_store.memory.placement import Placement
from index_store.methods.presets import get_method
from tests.ops.bench.conftest import load_bench


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
