"""The benchmark of steps that are searched for on the host: refused without a GPU; its whole path on a CPU."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import typer

from decode_engine.config import Compilation
from index_store.methods.method import METHODS
from tests.ops.scripts import check_refusal_without_device, load_script
from tests.ops.tiny_model import IDENTITY, make_model

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "host_gpu.py"
WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
LENGTH = 400


@pytest.fixture
def bench(few_programs: None, short_warm_up: None) -> ModuleType:
    return load_script(BENCH)


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(BENCH)


def test_numbers_are_parsed(bench: ModuleType) -> None:
    assert bench.parse_counts("1,2") == [1, 2]
    assert bench.parse_counts("0,4", least=0) == [0, 4]
    for wrong in ("", "0", "1,x"):
        with pytest.raises(typer.BadParameter, match="expected some from 1 on"):
            bench.parse_counts(wrong)


def test_two_lanes_have_a_bar(bench: ModuleType) -> None:
    line = {"tokens": 32768, "batch": 4, "lanes": 2, "waves": 0, "wait": 0.1}
    assert bench.misses(line)
    assert bench.misses({**line, "waves": 4})
    assert not bench.misses({**line, "waves": 1})
    assert not bench.misses({**line, "wait": 0.09})
    assert not bench.misses({**line, "lanes": 1})
    assert not bench.misses({**line, "tokens": 131072})
    failed = {name: value for name, value in line.items() if name != "wait"}
    assert not bench.misses({**failed, "error": "logits differ"})


def test_a_figure_that_fails_does_not_end_the_others(bench: ModuleType) -> None:
    class Measured:
        def shared(self, method: Any) -> tuple[Any, float]:
            if method is None:
                raise KeyError("scores")
            return torch.empty(0), 20.0

        def measure(
            self, method: Any, logits: Any, bandwidth: float, lanes: int, waves: int
        ) -> dict[str, Any]:
            if lanes == 2:
                raise sys.modules["general_steps"].CheckFailedError("logits differ")
            return {"step_ms": waves}

    rows = list(bench.method_figures(Measured(), METHODS["csattention"], [1, 2], [1, 2]))
    assert rows == [
        {"waves": 1, "lanes": 1, "step_ms": 1},
        {"waves": 1, "lanes": 2, "error": "logits differ"},
        {"waves": 2, "lanes": 1, "step_ms": 2},
        {"waves": 2, "lanes": 2, "error": "logits differ"},
    ]
    assert {row["error"] for row in bench.method_figures(Measured(), None, [1, 2], [1])} == {
        "KeyError: 'scores'"
    }


def test_only_tables_are_searched_there(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "require_device", lambda: None)
    for method in ("full", "pq"):
        with pytest.raises(typer.BadParameter, match="query tables"):
            bench.main(methods=method)


def test_the_device_stands_still_when_no_lane_computes(bench: ModuleType) -> None:
    """A lane that has not begun or has ended does not compute; between its waits it does."""
    still = sys.modules["captured_steps"].standing_still_ns
    first, second = np.array([[10, 15], [20, 30]]), np.array([[12, 13], [25, 40]])
    assert still([first]) == 5 + 10
    assert still([first, second]) == (12 - 10) + (13 - 12) + (30 - 25) + (40 - 30)
    assert still([first, first]) == still([first])
    assert still([first, np.empty((0, 2), np.int64)]) == still([first])
    assert still([]) == 0


@pytest.mark.slow
def test_every_number_of_lanes_and_waves_has_its_line(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but replays that find their lists there, which only a GPU has."""
    monkeypatch.setattr(sys.modules["placed_contexts"], "DTYPE", "float32")
    monkeypatch.setattr(bench, "require_device", lambda: None)
    monkeypatch.setattr(bench, "make_model", lambda layers: (make_model(WIDE), WIDE))
    monkeypatch.setattr(bench.Lanes, "device_ms", lambda lanes: 0.5)
    monkeypatch.setattr(bench, "read_bandwidth", lambda contexts, method, threads: 20.0)
    with pytest.raises(typer.Exit) as ended:
        bench.main(
            methods="csattention+dropped:0.05/pooled",
            shapes=f"{LENGTH}x2",
            lanes="2,3",
            layers=1,
            threads=1,
            compilation=Compilation.OFF,
            turns=2,
            waves="1,2",
            host_gb=4e-3,
            bars=False,
        )
    assert ended.value.exit_code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["waves"], line["lanes"]) for line in lines] == [(1, 2), (2, 2)]
    for line in lines:
        assert 0 < line["step_ms"] <= line["p99_ms"]
        assert line["lane_wait_ms"] >= 0
        assert line["wait"] == pytest.approx(line["still_ms"] / line["step_ms"], abs=1e-3)
        assert line["host_mb"] > 0
        assert line["logits_difference"] < 1e-3
        assert line["table_mb"] == pytest.approx(2 * 16 * LENGTH * 1e-6, abs=0.05)
        assert line["model_ms"] >= line["device_ms"] == 0.5
