"""Short warm-ups, for tests that run benchmarks of whole models in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ops.scripts import load_script

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps that are timed afterwards. Benchmarks that are loaded later share what it changes."""
    for name in ("general_steps", "captured_steps"):
        monkeypatch.setattr(load_script(FOLDER / f"{name}.py"), "WARM_UP", 1)
