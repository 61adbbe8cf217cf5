"""The benchmark of drafts on a GPU: its whole path on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_engine.engine.drafting import Allowance
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
