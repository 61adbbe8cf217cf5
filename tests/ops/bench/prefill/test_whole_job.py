"""The benchmark of whole prefill jobs, over the packaged reader on a CPU, and nothing is timed when a check fails."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness.checks import CheckFailedError

from tests.ops.bench.conftest import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load_bench("prefill/whole_job")
    monkeypatch.setattr(found, "DEVICE", torch.device("cpu"))
    return found


def test_every_stage_is_there(bench: ModuleType, tmp_path: Path) -> None:
    row: dict[str, Any] = bench.figures(300, 0, 64, tmp_path, disk=1000)
    assert row["indexes"] == ["coarse_rows"]
    times = {name: value for name, value in row.items() if name.endswith("_s") and name != "beyond_s"}
    wanted = {
        "model",
        "job",
        "prefill",
        "write",
        "index",
        "layers",
        "sync",
        "publish",
        "cached_load",
        "cold_load",
    }
    assert {f"{stage}_s" for stage in wanted} <= set(times)
    assert all(value > 0 for value in times.values())
    assert row["of_model"] == pytest.approx(row["job_s"] / row["model_s"])


def test_other_rows_are_not_timed(bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench.read_alone

    def spoiled(*arguments: Any) -> Any:
        spent, rows = original(*arguments)
        return spent, {place: kept + 1 for place, kept in rows.items()}

    monkeypatch.setattr(bench, "read_alone", spoiled)
    with pytest.raises(CheckFailedError, match="rows are not those that the model left"):
        bench.figures(100, 0, 64, tmp_path, disk=1000)
