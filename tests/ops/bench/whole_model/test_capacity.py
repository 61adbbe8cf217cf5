"""The picture of capacity: what fits is timed in every placement, and what it says of bars; its whole path on a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from index_store.memory.placement import MemoryBytes
from tests.ops.bench.conftest import Run, load_bench
from tests.ops.bench.whole_model.test_sessions import LARGE
from tests.support.tiny_model import IDENTITY, make_model


@pytest.fixture
def bench(without_gpu: None) -> ModuleType:
    return load_bench("whole_model/capacity_gpu")


def test_cases_that_make_no_sense_are_refused(bench: ModuleType) -> None:
    for text in ("full", "full@hybrid", "float8@hybrid", "pq@host", "refined:0.01@device/int4"):
        with pytest.raises(typer.BadParameter):
            bench.Case.parse(text)


def test_sessions_are_timed_until_memory_is_full(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an H200: a cache in float8 holds twice as many as one in bfloat16, and coarse copies alone more."""
    monkeypatch.setattr("harness.made_up.sessions.DTYPE", "bfloat16")
    cases = [bench.Case.parse(text) for text in bench.CASES.split(",")]
    room = MemoryBytes(2**40, 118 * 10**9)
    figures = bench.planned(cases, LARGE, 131072, room, [1, 4, 16, 64], 128)
    most = {figure.case.name: figure.most for figure in figures}
    assert most["full@device"] == 6
    assert most["float8@device"] == 13
    assert most["full@device/int8"] == most["refined:0.01@device/int8"] == 13
    assert most["refined:0.0025/2bits@hybrid"] > 2 * most["float8@device"]
    counts = [figure.sessions for figure in figures if figure.case.name == "float8@device"]
    assert counts == [1, 4, 13]
    kinds = [bench.made_of(figure) for figure in figures]
    assert kinds == sorted(kinds)


def row(case: str, sessions: int, token_ms: float) -> dict[str, Any]:
    rate = sessions / token_ms * 1e3
    return {"case": case, "sessions": sessions, "tokens": 8192, "token_ms": token_ms, "tokens_per_s": rate}


def test_bars(bench: ModuleType) -> None:
    base = [row("float8@device", 1, 8.0), row("float8@device", 10, 40.0)]
    good = [row("refined:0.01@device", 10, 20.0), row("refined:0.0025@hybrid", 30, 99.0)]
    assert bench.falls_short([*base, *good]) == []
    assert bench.falls_short(good) == []
    slow = [row("refined:0.01@device", 10, 30.0), row("refined:0.0025@hybrid", 30, 101.0)]
    missed = bench.falls_short([*base, *slow])
    assert len(missed) == 2
    assert "1.33x of float8@device with 10 sessions" in missed[0]
    assert "0 sessions in hybrid" in missed[1]


def test_a_picture_and_a_table(
    bench: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wide = replace(IDENTITY, layers=2, query_heads=2, kv_heads=1, head_dim=64)
    model = make_model(wide)
    monkeypatch.setattr(bench, "make_model", lambda layers: (model, wide))
    options: dict[str, Any] = {"lengths": "8192", "counts": "1", "turns": 1, "host_gb": 0.02, "out": tmp_path}
    cases = "full@device,refined:0.05@device/int8,refined:0.05@hybrid"
    found, code, _ = run(bench, cases=cases, device="20MB", host="1GiB", most=2, **options)
    assert (code, [line for line in found if "error" in line]) == (0, [])
    assert {line["case"] for line in found} == set(cases.split(","))
    for line in found:
        assert line["token_ms"] > 0
        assert line["sessions"] <= line["most"]
    checked = [line for line in found if line["sessions"] == 1]
    assert all(line["logits_difference"] < 1e-2 for line in checked)
    text = (tmp_path / "capacity.md").read_text()
    assert text.count("`full@device`") == 1
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")
    earlier = tmp_path / "capacity_8192.jsonl"
    assert [json.loads(line)["case"] for line in earlier.read_text().splitlines()] == [
        line["case"] for line in found
    ]
