"""The benchmark of long generations runs at a tiny size, and its recall is that of the observed selections."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.ops.bench.conftest import Run, load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("whole_model/long_generation")


@pytest.mark.usefixtures("prefilled_here")
def test_a_line_per_stretch_and_one_per_method(bench: ModuleType, run: Run, tmp_path: Path) -> None:
    options = {"tokens": 160, "stretch": 80, "observe": 20, "picture": False}
    methods = "multipole:0.3,refined:1"
    rows, _, _ = run(bench, out=tmp_path, methods=methods, context_length="1k", **options)
    assert [(row["method"], row["from"], row["to"]) for row in rows] == [
        (name, *span) for name in methods.split(",") for span in ((0, 80), (80, 160), (0, 160))
    ]
    for row in rows:
        assert row["context"] == 1024
        assert 0.0 <= row["recall_all"] <= 1.0
        assert 0.0 < row["step_ms"]["p50"] <= row["step_ms"]["p99"] <= row["step_ms"]["max"]
        assert 0.0 < row["append_us"]["p50"] <= row["append_us"]["p99"]
        assert 0.5 < row["agreement"] <= 1.0
        assert -1e-6 < row["kl"] < 1.0
    # With all keys exactly it is full attention, but for roundings, which decide between equally likely tokens.
    assert all(row["agreement"] > 0.95 for row in rows[3:])
    assert all(row["kl"] < 1e-4 for row in rows[3:])
    for first, second, whole in (rows[:3], rows[3:]):
        # Told to five digits each.
        assert whole["kl"] == pytest.approx((first["kl"] + second["kl"]) / 2, abs=1.1e-5)
        assert first["new_share"] <= second["new_share"]
        assert first["session_bytes"] < second["session_bytes"] == whole["session_bytes"]
    # The recent window of `refined` still holds all new ones.
    assert [row["recall_new"] is None for row in rows] == [True, False, False, True, True, True]
