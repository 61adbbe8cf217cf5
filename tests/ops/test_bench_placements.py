"""The benchmark of placements: its whole path over a tiny model on a CPU, and no wrong step is timed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from decode_engine.config import Compilation
from decode_engine.device.step_model import step_model
from index_store.methods import get_method
from index_store.placement import Placement
from tests.ops.scripts import check_refusal_without_device, load_script
from tests.ops.tiny_model import IDENTITY, make_model

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"
WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
LENGTH = 400
TABLES = "csattention+dropped@group=pooled:0.05"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With launches of few programs, which the interpreter runs one by one."""
    monkeypatch.setattr("decode_engine.device.stepper._LEAST_KEYS", 256)
    monkeypatch.setattr("decode_engine.kernels.sparse_attention._PROGRAMS", 8)
    monkeypatch.setattr("decode_engine.kernels.slot_fetch._FIND_PROGRAMS", 8)
    found = load_script(FOLDER / "placements_gpu.py")
    monkeypatch.setattr(found, "WARM_UP", 1)
    return found


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load_script(FOLDER / "placed_contexts.py")
    monkeypatch.setattr(found, "DTYPE", "float32")  # which is exact in the interpreter, too
    return found


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(FOLDER / "placements_gpu.py")


def test_cases(bench: ModuleType) -> None:
    listed = [bench.Case.parse(text) for text in bench.CASES.split(",")]
    places = [(case.placement.value, case.lanes, case.streamed) for case in listed]
    assert places == [("device", 1, False)] * 3 + [
        ("hybrid", 1, False),
        ("host", 1, False),
        ("host", 2, False),
        ("hybrid", 1, True),
    ]
    assert [[case.fits(batch) for batch in (1, 4)] for case in listed[-2:]] == [[False, True], [True, False]]
    with_period = bench.Case.parse("csattention@period=4:0.05@device")
    assert with_period.method.schedule.period == 4
    for wrong in ("full", "full@disk", "pq+dropped:0.01@streamed"):
        with pytest.raises(typer.BadParameter):
            bench.Case.parse(wrong)


def test_a_range_is_filled_and_used_anew(placed: ModuleType) -> None:
    ranges = placed.HostRange(1024)
    whole = torch.arange(200, dtype=torch.float32).view(2, 100)
    first = ranges.put(whole[:, ::2])
    second = ranges.put(torch.tensor([7], dtype=torch.int8))
    assert torch.equal(first, whole[:, ::2])
    assert second.data_ptr() == first.data_ptr() + 512
    with pytest.raises(RuntimeError, match="do not fit"):
        ranges.put(whole)
    ranges.clear()
    assert ranges.put(second).data_ptr() == first.data_ptr()


def test_contexts_of_all_placements_hold_the_same(placed: ModuleType) -> None:
    method = get_method("csattention+dropped")
    wide = replace(WIDE, layers=3)
    ranges = (placed.HostRange(2 * 2 * LENGTH * 2 * 64 * 4), placed.HostRange(2**21))
    contexts = placed.PlacedContexts(wide, [method], LENGTH, 2, ranges, "cpu")
    assert contexts.distinct == 2
    made = {placement: contexts.make(placement) for placement in Placement}
    for row in range(2):
        device, hybrid, host = (made[placement][row] for placement in Placement)
        for layer in range(wide.layers):
            assert device.kv(layer).data_ptr() != hybrid.kv(layer).data_ptr() == host.kv(layer).data_ptr()
            assert torch.equal(device.kv(layer), host.kv(layer))
            arrays = [each.index("query_tables", layer).arrays() for each in (device, hybrid, host)]
            for name, array in arrays[0].items():
                assert array.data_ptr() == arrays[1][name].data_ptr() != arrays[2][name].data_ptr()
                assert torch.equal(array, arrays[2][name])
    assert not torch.equal(made[Placement.DEVICE][0].kv(0), made[Placement.DEVICE][1].kv(0))


def figures(bench: ModuleType, placed: ModuleType, cases: str, batch: int) -> list[dict[str, Any]]:
    model = make_model(WIDE)
    listed = [bench.Case.parse(text) for text in cases.split(",")]
    methods = list({case.label: case.method for case in listed}.values())
    ranges = placed.HostRange(2**22), placed.HostRange(2**22)
    contexts = placed.PlacedContexts(WIDE, methods, LENGTH, batch, ranges, "cpu")
    runs = bench.Bench(model, step_model(model, Compilation.OFF), 1, 2, 60.0)
    return list(bench.shape_figures(runs, contexts, listed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "batch"),
    [
        ("full@device,full@streamed,pq+dropped:0.05@hybrid", 1),
        (f"full@device,{TABLES}@host,{TABLES}@host2", 2),
    ],
)
def test_every_case_has_its_figures(bench: ModuleType, placed: ModuleType, cases: str, batch: int) -> None:
    small = get_method("pq+dropped", 0.05)
    rows = figures(bench, placed, cases, batch)
    assert [row for row in rows if "error" in row] == []
    wheres = [f"{row['placement']}{row['lanes'] if row['lanes'] > 1 else ''}" for row in rows]
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
        else:
            assert 0 < row["host_mb"] < at_most
            assert row["wait"] >= 0


@pytest.mark.parametrize("case", ["full@streamed", "full@device"])
def test_a_wrong_step_is_not_timed(
    bench: ModuleType, placed: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    right = bench.compare
    monkeypatch.setattr(bench, "compare", lambda got, expected: right(got.flip(-1), expected))
    (row,) = figures(bench, placed, case, 1)
    assert "logits differ" in row["error"]
    assert "step_ms" not in row


def test_wrong_lists_are_not_timed(
    bench: ModuleType, placed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = sys.modules["host_gpu"]
    right = host.best_keys  # type: ignore[attr-defined]
    monkeypatch.setattr(host, "best_keys", lambda ranking, keep, group: right(ranking, keep - 1, group))
    (row,) = figures(bench, placed, f"{TABLES}@host", 1)
    assert row["error"] == "the list of KV head 0 is not the general path's"
