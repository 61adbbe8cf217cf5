"""The benchmark of placements: its whole path over a tiny model on a CPU, and no wrong step is timed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from decode_engine.config import Compilation
from decode_engine.steps.step_model import step_model
from index_store.methods.method import get_method
from tests.ops.scripts import check_refusal_without_device, load_script
from tests.ops.tiny_model import IDENTITY, make_model

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"
WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
LENGTH = 400
TABLES = "csattention+dropped@group=pooled:0.05"


@pytest.fixture
def bench(few_programs: None, short_warm_up: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load_script(FOLDER / "placements_gpu.py")
    monkeypatch.setattr(found, "STILL_TURNS", 1)
    return found


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = sys.modules["placed_contexts"]
    monkeypatch.setattr(found, "DTYPE", "float32")  # which is exact in the interpreter, too
    return found


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(FOLDER / "placements_gpu.py")


def test_cases(bench: ModuleType) -> None:
    listed = [bench.Case.parse(text) for text in bench.CASES.split(",")]
    places = [(case.placement.value, case.lanes, case.prefetch, case.streamed) for case in listed]
    assert places == [("device", 1, False, False)] * 3 + [
        ("hybrid", 1, False, False),
        ("hybrid", 1, True, False),
        ("hybrid", 2, False, False),
        ("host", 1, False, False),
        ("host", 2, False, False),
        ("hybrid", 1, False, False),
        ("hybrid", 1, False, True),
    ]
    fits = [[case.fits(batch) for batch in (1, 4)] for case in listed]
    assert fits == [[True, True]] * 5 + [[False, True], [True, True], [False, True]] + [[True, False]] * 2
    with_period = bench.Case.parse("csattention@period=4:0.05@device")
    assert with_period.method.schedule.period == 4
    for wrong in ("full", "full@disk", "pq+dropped:0.01@streamed"):
        with pytest.raises(typer.BadParameter):
            bench.Case.parse(wrong)


def test_a_shape_without_a_case_is_refused(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "require_device", lambda: None)
    with pytest.raises(typer.BadParameter, match="such as 1024x4"):
        bench.main(cases="full@streamed", shapes="1024x1,1024x4")


def figures(
    bench: ModuleType, placed: ModuleType, cases: str, batch: int, gigabytes: float = 2**22 * 1e-9
) -> list[dict[str, Any]]:
    model = make_model(WIDE)
    listed = [bench.Case.parse(text) for text in cases.split(",")]
    methods = bench.methods_of(listed)
    ranges = placed.make_ranges(gigabytes, methods)
    foretelling = step_model(model, Compilation.OFF, prefetch=True)
    runs = bench.Bench(model, (step_model(model, Compilation.OFF), foretelling), 1, 2, 60.0)

    def make() -> Any:
        return placed.PlacedContexts(WIDE, methods, LENGTH, batch, model.device, ranges)

    return list(bench.shape_figures(runs, make, listed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "batch"),
    [
        ("full@device,full@hybrid,full@streamed,pq+dropped:0.05@hybrid,pq+dropped:0.05@hybrid+prefetch", 1),
        (f"full@device,pq+dropped:0.05@hybrid2,{TABLES}@host,{TABLES}@host2", 2),
    ],
)
def test_every_case_has_its_figures(bench: ModuleType, placed: ModuleType, cases: str, batch: int) -> None:
    small = get_method("pq+dropped", 0.05)
    rows = figures(bench, placed, cases, batch)
    assert [row for row in rows if "error" in row] == []
    wheres = [row["placement"] + "2" * (row["lanes"] == 2) + "+prefetch" * row["prefetch"] for row in rows]
    assert wheres == [text.rpartition("@")[2] for text in cases.split(",")]
    kv_mb = batch * WIDE.layers * WIDE.kv_heads * LENGTH * 2 * 64 * 4 * 1e-6
    at_most = kv_mb * (0.05 * LENGTH + small.sinks + small.recent + small.append_block) / LENGTH
    for row, where in zip(rows, wheres, strict=True):
        assert row["steps"] == 2
        assert 0 < row["step_ms"] <= row["p99_ms"]
        assert row["to_full"] > 0
        assert 0 <= row["reused"] <= 1
        if where.startswith("host"):  # whose lists were compared instead
            assert row["logits_difference"] is None
        else:
            assert row["logits_difference"] < 1e-3
        if where in ("device", "streamed"):
            assert row["host_mb"] == (0 if where == "device" else pytest.approx(kv_mb, rel=1e-3))
        elif row["method"] == "full":
            assert row["host_mb"] == pytest.approx(kv_mb, rel=0.05)
        else:
            assert 0 < row["host_mb"] < at_most
            assert row["wait"] >= 0


@pytest.mark.parametrize("case", ["full@streamed", "full@device"])
def test_a_wrong_step_is_not_timed(
    bench: ModuleType, placed: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    right = bench.compare
    for module in (bench, sys.modules["captured_steps"]):
        monkeypatch.setattr(module, "compare", lambda got, expected: right(got.flip(-1), expected))
    (row,) = figures(bench, placed, case, 1)
    assert "logits differ" in row["error"]
    assert "step_ms" not in row


def test_wrong_lists_are_not_timed(
    bench: ModuleType, placed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = sys.modules["captured_steps"]
    right = steps.best_keys  # type: ignore[attr-defined]
    monkeypatch.setattr(steps, "best_keys", lambda ranking, keep, group: right(ranking, keep - 1, group))
    (row,) = figures(bench, placed, f"{TABLES}@host", 1)
    assert row["error"] == "the list of KV head 0 is not the general path's"


def test_a_case_that_fails_does_not_end_the_others(
    bench: ModuleType, placed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    kv = 2 * LENGTH * 64 * 4
    failed, timed = figures(bench, placed, "pq+dropped:0.05@hybrid,full@device", 1, (kv - 1) * 1e-9)
    assert "RuntimeError: " in failed["error"]
    assert "(--host-gb)" in failed["error"]
    assert timed["step_ms"] > 0
    assert "Traceback" in capsys.readouterr().err


def test_cases_that_there_are_no_contexts_for_say_so(
    bench: ModuleType, placed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("too much")

    monkeypatch.setattr(bench, "full_logits", refuse)
    rows = figures(bench, placed, "full@device,full@streamed", 1)
    assert [row["placement"] for row in rows] == ["device", "streamed"]
    assert {row["error"] for row in rows} == {"OutOfMemoryError: too much"}


def test_every_line_is_printed(
    bench: ModuleType,
    placed: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The whole command, where a shape that cannot be placed precedes one that can."""
    monkeypatch.setattr(bench, "require_device", lambda: None)
    monkeypatch.setattr(bench, "make_model", lambda layers: (make_model(WIDE), WIDE))
    with pytest.raises(typer.Exit) as ended:
        bench.main(
            cases="full@hybrid,full@device",
            shapes=f"{2 * LENGTH}x1,{LENGTH}x1",
            layers=1,
            compilation=Compilation.OFF,
            threads=1,
            turns=2,
            seconds=60.0,
            host_gb=2 * LENGTH * 64 * 4 * 1e-9,
        )
    assert ended.value.exit_code == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [("error" in line, line["tokens"], line["placement"]) for line in lines] == [
        (True, 2 * LENGTH, "hybrid"),
        (False, 2 * LENGTH, "device"),
        (False, LENGTH, "hybrid"),
        (False, LENGTH, "device"),
    ]
