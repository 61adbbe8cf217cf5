"""The benchmarks of searches on the host: one JSON line per result, no time for a wrong list, bars that bind."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from tests.ops.scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(FOLDER / "search_cpu.py")


def run(bench: ModuleType, *arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(bench.main)
    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


def test_one_json_line_per_result(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TURNS", 2)
    code, output = run(bench, "--lengths", "3k", "--subspaces", "8", "--threads", "2")
    assert code == 0, output
    rows = [json.loads(line) for line in output.splitlines()]
    assert [(row["subspaces"], row["group"]) for row in rows] == [(8, "pooled"), (8, "per_head")]
    for row in rows:
        assert 0 < row["search_best_us"] <= row["search_us"]
        assert row["of_read"] == pytest.approx(row["read_us"] / row["search_us"], abs=0.02, rel=0.02)
        assert {"processor", "cores", "numba"} <= set(row["machine"])


def test_a_wrong_list_is_not_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.best_keys
    monkeypatch.setattr(bench, "best_keys", lambda ranking, keep, group: right(ranking, keep - 1, group))
    code, output = run(bench, "--lengths", "3k", "--subspaces", "8", "--threads", "1", "--no-per-head")
    assert code == 1
    assert output == "error: the list of KV head 0 is not the general path's\n"


def test_bars(bench: ModuleType) -> None:
    row = {
        "context": 131072,
        "threads": 16,
        "group": "pooled",
        "subspaces": 8,
        "search_us": 149.0,
        "of_read": 0.9,
    }
    assert bench.missed(row) == []
    assert len(bench.missed({**row, "search_us": 151.0, "of_read": 0.89})) == 2
    assert bench.missed({**row, "subspaces": 16, "search_us": 279.0}) == []
    assert bench.missed({**row, "threads": 2, "search_us": 10_000.0}) == []
