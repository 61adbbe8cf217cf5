"""Tables and pictures of placements: the last figure of each case counts, and what was not timed says so."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from tests.ops.scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"
ROW: dict[str, Any] = {
    "bench": "placements", "tokens": 131072, "batch": 4, "method": "pq+dropped:0.01", "placement": "hybrid", "lanes": 1,
    "prefetch": False,
    "step_ms": 20.0, "p99_ms": 25.5, "steps": 100, "tokens_per_s": 200.0, "host_mb": 656.2, "reused": 0.11,
    "wait": 0.0, "captured": True, "to_full": 1.08,
}  # fmt: skip


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(FOLDER / "placements_table.py")


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(["compiling took a while", *map(json.dumps, rows)]) + "\n")
    return path


def test_a_row_of_the_table(bench: ModuleType) -> None:
    (line,) = bench.table([ROW]).splitlines()[2:]
    expected = "| 128K x 4 | `pq+dropped:0.01` | hybrid | 20.00 | 25.50 | 200 | 1.08x | 656 MB | 11% | - |"
    assert line == expected
    (line,) = bench.table([{**ROW, "prefetch": True}]).splitlines()[2:]
    assert "| hybrid, prefetch |" in line
    host = {**ROW, "placement": "host", "lanes": 2, "steps": 40, "wait": 0.4}
    (line,) = bench.table([host]).splitlines()[2:]
    assert "| host, 2 lanes | 20.00 | 25.50 (40 steps) |" in line
    assert line.endswith("| 40% |")


def test_what_was_not_timed_says_so(bench: ModuleType) -> None:
    failed = {name: ROW[name] for name in ("tokens", "batch", "method", "placement", "lanes", "prefetch")}
    (line,) = bench.table([{**failed, "error": "logits differ"}]).splitlines()[2:]
    assert "not timed" in line
    assert line.count("|") == bench.HEAD.splitlines()[0].count("|")


def test_the_last_figure_of_a_case_counts(bench: ModuleType, tmp_path: Path) -> None:
    first = write(tmp_path / "first", {**ROW, "step_ms": 9.0}, {**ROW, "tokens": 32768})
    second = write(tmp_path / "second", ROW, {"bench": "other"})
    rows = bench.read_lines([first, second])
    assert [(row["tokens"], row["step_ms"]) for row in rows] == [(32768, 20.0), (131072, 20.0)]
    with pytest.raises(typer.BadParameter, match="no line"):
        bench.read_lines([write(tmp_path / "third", {"bench": "other"})])


def test_bars_are_drawn(bench: ModuleType, tmp_path: Path) -> None:
    rows = [ROW, {**ROW, "tokens": 32768, "placement": "streamed"}, {**ROW, "batch": 1, "error": "wrong"}]
    bench.draw(tmp_path / "bars.png", rows)
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(typer.BadParameter, match="no case was timed"):
        bench.draw(tmp_path / "nothing.png", rows[-1:])
