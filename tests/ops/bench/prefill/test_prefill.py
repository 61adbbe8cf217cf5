"""Benchmarks of prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

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
