"""All kernels of captured steps compile for a GPU, and those that attend have room there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.decode_engine.kernels.problems import compile_attention, compile_for_gpu

ROOT = Path(__file__).resolve().parents[3]
KERNEL = re.compile(r"^@(?:triton|gluon)\.jit(?:\([^)]*\))?\ndef (\w+_kernel)\(", re.MULTILINE)


@pytest.mark.nightly
def test_kernels_of_captured_steps_compile() -> None:
    """In a process of its own: this one may have told Triton to interpret."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", compile_for_gpu.__name__]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert not found["failed"], "\n".join(found["failed"])
    kernels = {
        f"{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}.{name}"
        for path in (ROOT / "decode_engine").rglob("*.py")
        for name in KERNEL.findall(path.read_text())
    }
    assert kernels == set(found["compiled"]), (
        "compile_for_gpu.py compiles what steps of methods launch; it lacks something that launches "
        f"{sorted(kernels - set(found['compiled']))}"
    )


SPILLED = 96
"""Bytes a thread, outside of loops, where query heads of 256 channels have all registers."""


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
        long_rows = name.startswith("shared_kernel") and "256)" in name
        assert taken["local"] <= (SPILLED if long_rows else 0), name
        assert taken["programs"], name
