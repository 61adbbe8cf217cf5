"""The benchmark of placements: its whole path over a tiny model on a CPU, and no wrong step is timed."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from harness.made_up import contexts
from harness.steps import captured_steps

from decode_engine.steps.step_graph import step_model
from index_store.memory.placement import SLOT_SHARE
from index_store.methods.presets import get_method
from index_store.store.description.dtypes import AS_DTYPE
from tests.ops.bench.conftest import load_bench
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
LENGTH = 400
TABLES = "csattention+dropped@group=pooled:0.05"


@pytest.fixture
def bench(without_gpu: None) -> ModuleType:
    return load_bench("whole_model/placements_gpu")


def figures(
    bench: ModuleType,
    cases: str,
    batch: int,
    gigabytes: float = 2**22 * 1e-9,
    *,
    count: int | None = None,
    rows: str = AS_DTYPE,
) -> list[dict[str, Any]]:
    """count: of contexts, one for each session by default."""
    model = make_model(WIDE)
    listed = [bench.Case.parse(text) for text in cases.split(",")]
    methods = bench.methods_of(listed)
    ranges = contexts.make_ranges(gigabytes, methods)
    runs = bench.Bench(model, step_model(model), 1, 2, 60.0)

    def make() -> Any:
        return contexts.PlacedContexts(
            WIDE, methods, LENGTH, count or batch, model.device, ranges, SLOT_SHARE, rows
        )

    return list(bench.shape_figures(runs, make, listed, batch))


@pytest.mark.parametrize(
    ("cases", "batch"),
    [
        ("full@device,full@hybrid,full@streamed,refined+dropped:0.05@hybrid", 1),
        (f"full@device,refined+dropped:0.05@hybrid,{TABLES}@host", 2),
    ],
)
def test_every_case_has_its_figures(bench: ModuleType, cases: str, batch: int) -> None:
    small = get_method("refined+dropped", 0.05)
    rows = figures(bench, cases, batch)
    assert [row["error"] for row in rows if "error" in row] == []
    wheres = [row["placement"] for row in rows]
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
def test_a_wrong_step_is_not_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    right = bench.compare
    for module in (bench, captured_steps):
        monkeypatch.setattr(module, "compare", lambda got, expected: right(got.flip(-1), expected))
    (row,) = figures(bench, case, 1)
    assert "logits differ" in row["error"]
    assert "step_ms" not in row


def test_wrong_lists_are_not_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = captured_steps.best_keys
    monkeypatch.setattr(captured_steps, "best_keys", lambda ranking, keep: right(ranking, keep - 1))
    (row,) = figures(bench, f"{TABLES}@host", 1)
    assert row["error"] == "the list of KV head 0 is not the general path's"
