"""Benchmarks of prefill."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness.checks import CheckFailedError

from index_store.indexes.key_clusters import build_triton
from tests.ops.bench.conftest import Run, load_bench
from tests.support.models import write_model_folder


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_loose_clusters_are_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_triton.build_device_clusters

    def spoiled(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        arrays = build(*arguments, **options)
        return {**arrays, "means": arrays["means"] * 0.0}

    monkeypatch.setattr(build_triton, "build_device_clusters", spoiled)
    rows, code, errors = run(load_bench("prefill/prefill_gpu"))
    assert (rows, code) == ([], 1)
    assert "as wide as the host's" in errors


def test_every_figure_is_there(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("prefill/families")
    model = write_model_folder(tmp_path / "model", "llama", layers=2, head_dim=32, max_positions=8192)
    options = {"stored": "5k", "tokens": "6k", "children": 2, "added": 20, "chunk": 512}
    rows, code, _ = run(bench, model=str(model), folder=tmp_path, **options)
    assert code == 0
    assert [row["figure"] for row in rows] == ["beginning", "from_nothing", "from_beginning", "children"]
    taken = [row["taken_tokens"] for row in rows[:3]]
    assert taken[:2] == [0, 0]
    assert 0 < taken[2] <= 5120
    assert rows[3]["children_bytes"] == 2 * rows[3]["child_bytes"] < rows[3]["parent_bytes"]


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
