"""Streams of tenants in small: the whole path with certificates, tokens and quotas, over a toy model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.decode_engine.conftest import TEXT, make_library
from tests.ops.bench.conftest import Run, load_bench


def test_shares_and_cost_are_reported(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("served/tenants")
    monkeypatch.setattr("harness.served.source_text", lambda files: TEXT * 4)
    model = make_library(tmp_path).model
    options = {"streams": 12, "tenants": 3, "minutes": 0.5, "sessions": 3, "turns": 2, "tokens": "300"}
    rows, code, written = run(bench, model=str(model), device="cpu", processes=1, **options)
    assert code == 0, written
    shares, cost = rows
    assert (shares["case"], cost["case"]) == ("shares", "cost")
    assert shares["starved"] == 0
    assert 0.5 < shares["share_least"] <= 1 <= shares["share_most"] < 1.5
    assert 0 < shares["gap_p50_ms"] <= shares["gap_p99_ms"]
    assert 0 < shares["first_p50_ms"] <= shares["first_p99_ms"]
    assert cost["ratio"] > 0
