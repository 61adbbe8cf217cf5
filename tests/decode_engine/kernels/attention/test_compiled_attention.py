"""Kernels that attend to exact keys of large groups and long rows compile to code that keeps what it works on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.decode_engine.kernels.problems import compile_attention

ROOT = Path(__file__).resolve().parents[4]


SPILLED = 96
"""Bytes a thread, outside of loops, where 128 query heads of 256 channels have one program's registers."""


@pytest.mark.nightly
def test_programs_have_room_and_need_no_local_memory() -> None:
    """In a process of its own: this one may have told Triton to interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", compile_attention.__name__]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    ).stdout
    figures = json.loads(found)
    kernels = {name.partition(" ")[0] for name in figures}
    assert kernels == set(compile_attention.KERNELS)
    for name, taken in figures.items():
        long_rows = name.startswith("shared_kernel") and name.endswith("256) False")
        assert taken["local"] <= (SPILLED if long_rows else 0), name
        assert taken["programs"], name
