"""Benchmarks of prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from index_store.indexes.key_clusters import build_triton
from tests.ops.bench.conftest import Run, load_bench


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
