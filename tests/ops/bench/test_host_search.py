"""Searches on the host, alone and in whole steps: a line per result, no time for a wrong list, bars that bind."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from harness.checks import CheckFailedError

from index_store.methods.presets import METHODS
from tests.ops.bench.conftest import Run, load_bench
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
LENGTH = 400


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load_bench("host_search/search_cpu")
    monkeypatch.setattr(found, "TURNS", 2)
    return found


@pytest.fixture
def steps(without_gpu: None) -> ModuleType:
    return load_bench("host_search/host_gpu")


def test_one_line_per_search(search: ModuleType, run: Run) -> None:
    rows, code, _ = run(search, lengths="3k", subspaces="8", threads=2)
    assert (code, [(row["subspaces"], row["group"]) for row in rows]) == (0, [(8, "pooled"), (8, "per_head")])
    for row in rows:
        assert 0 < row["search_best_us"] <= row["search_us"]
        assert row["of_read"] == pytest.approx(row["read_us"] / row["search_us"], abs=0.02, rel=0.02)


def test_a_wrong_list_is_not_timed(search: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = search.best_keys
    monkeypatch.setattr(search, "best_keys", lambda ranking, keep: right(ranking, keep - 1))
    found = run(search, lengths="3k", subspaces="8", threads=1, per_head=False)
    assert found == ([], 1, "error: the list of KV head 0 is not the general path's\n")


def test_a_figure_that_fails_does_not_end_the_others(steps: ModuleType) -> None:
    class Measured:
        def shared(self, method: Any) -> tuple[Any, float]:
            if method is None:
                raise KeyError("scores")
            return torch.empty(0), 20.0

        def measure(
            self, method: Any, logits: Any, bandwidth: float, lanes: int, waves: int
        ) -> dict[str, Any]:
            if lanes == 2:
                raise CheckFailedError("logits differ")
            return {"step_ms": waves}

    rows = list(steps.method_figures(Measured(), METHODS["csattention"], [1, 2], [1, 2]))
    assert rows == [
        {"waves": 1, "lanes": 1, "step_ms": 1},
        {"waves": 1, "lanes": 2, "error": "logits differ"},
        {"waves": 2, "lanes": 1, "step_ms": 2},
        {"waves": 2, "lanes": 2, "error": "logits differ"},
    ]
    errors = {row["error"] for row in steps.method_figures(Measured(), None, [1, 2], [1])}
    assert errors == {"KeyError: 'scores'"}


@pytest.mark.parametrize("method", ["full", "pq"])
def test_only_tables_are_searched_there(steps: ModuleType, method: str) -> None:
    with pytest.raises(typer.BadParameter, match="query tables"):
        steps.main(methods=method)


def test_every_number_of_lanes_and_waves_has_its_line(
    steps: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but replays that find their lists there, which only a GPU has."""
    monkeypatch.setattr(steps, "make_model", lambda layers: (make_model(WIDE), WIDE))
    monkeypatch.setattr(steps.Lanes, "device_ms", lambda lanes: 0.5)
    monkeypatch.setattr(steps, "read_bandwidth", lambda contexts, method, threads: 20.0)
    lines, code, _ = run(
        steps, methods="csattention+dropped:0.05/pooled", shapes=f"{LENGTH}x2", lanes="2,3", layers=1, threads=1,
        turns=2, waves="1,2", host_gb=4e-3,
    )  # fmt: skip
    assert (code, [(line["waves"], line["lanes"]) for line in lines]) == (0, [(1, 2), (2, 2)])
    for line in lines:
        assert 0 < line["step_ms"] <= line["p99_ms"]
        assert line["lane_wait_ms"] >= 0
        assert line["wait"] == pytest.approx(line["still_ms"] / line["step_ms"], abs=1e-3)
        assert line["host_mb"] > 0
        assert line["logits_difference"] < 1e-3
        assert line["table_mb"] == pytest.approx(2 * 16 * LENGTH * 1e-6, abs=0.05)
        assert line["model_ms"] >= line["device_ms"] == 0.5
