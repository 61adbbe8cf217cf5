"""The benchmarks of MuSe: what needs a GPU says so, and the tables of errors are what they are called."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

from prefill_worker.muse import MuseSettings
from tests.ops.scripts import load_script
from tests.prefill_worker.muse.muse_points import make_inputs

FOLDER = Path(__file__).resolve().parents[3] / "ops" / "bench"


def test_without_a_device_they_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(typer.Exit):
        load_script(FOLDER / "muse_gpu.py").main()
    with pytest.raises(typer.Exit):
        load_script(FOLDER / "muse_training.py").main(tmp_path, tmp_path, tmp_path / "out")
    assert capsys.readouterr().err == "error: this benchmark needs a CUDA device\n" * 2


@pytest.fixture(scope="module")
def errors() -> ModuleType:
    return load_script(FOLDER / "muse_error.py")


def test_tables_of_errors(errors: ModuleType) -> None:
    layers = [errors.Layer(*make_inputs(1, 4, 2, 300, 16, torch.float32))]
    settings = MuseSettings(clusters=12)
    rows = {row["terms"]: row["error"] for row in errors.ablation_rows(layers, settings)}
    assert rows["all terms"] < rows["without dipole"] < rows["without two stages"]
    assert rows["neither"] < rows["without monopole"]
    errors.BLOCKS = (64,)
    found = list(errors.causal_rows(layers, settings))
    assert [(row["figure"], row["dipole"]) for row in found] == [
        *(("causal", False), ("prefill", False), ("causal", True), ("prefill", True))
    ]
    assert all(0 < row["error"] < 0.1 for row in found)
    assert found[0]["after the first block"] > found[0]["error"]


def test_rows_of_settings(errors: ModuleType) -> None:
    layers = [errors.Layer(*make_inputs(1, 2, 1, 400, 8, torch.float32))]
    rows = list(errors.settings_rows(layers))
    assert len(rows) == 27
    best = {clusters: min(r["error"] for r in rows if r["clusters"] == clusters) for clusters in (32, 128)}
    assert best[128] < best[32]
