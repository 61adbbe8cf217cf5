"""What is printed by every benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"
COUNTED = {"sessions_gpu.py"}
"""What it prints itself is the same on all machines."""
PRINTING = [path for path in sorted(FOLDER.glob("*.py")) if "json.dumps(" in path.read_text()]


@pytest.mark.parametrize("bench", PRINTING, ids=lambda path: path.name)
def test_lines_say_on_which_machine_they_were_measured(bench: Path) -> None:
    assert ('"machine"' in bench.read_text()) == (bench.name not in COUNTED)
