"""Small launches and short warm-ups, for tests that run benchmarks of whole models in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of few programs, which the interpreter runs one by one."""
    monkeypatch.setattr("decode_engine.device.stepper._LEAST_KEYS", 256)
    monkeypatch.setattr("decode_engine.kernels.sparse_attention._PROGRAMS", 8)
    monkeypatch.setattr("decode_engine.kernels.slot_fetch._FIND_PROGRAMS", 8)


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are timed afterwards. Benchmarks that are loaded later share what it changes."""
    for name in ("general_steps", "captured_steps"):
        monkeypatch.setattr(load_script(FOLDER / f"{name}.py"), "WARM_UP", 1)
