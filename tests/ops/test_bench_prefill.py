"""The benchmark of prefill on a GPU: refused without one, and nothing is timed when a check fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.scripts import check_refusal_without_device

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "prefill_gpu.py"

SPOIL = """
import sys, runpy
from index_store.indexes.key_clusters import build_triton
build = build_triton.build_device_clusters

def spoiled(*arguments, **options):
    arrays = build(*arguments, **options)
    return {**arrays, "means": arrays["means"] * 0.0}

build_triton.build_device_clusters = spoiled
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(BENCH)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_loose_clusters_are_not_timed() -> None:
    path = os.pathsep.join([str(BENCH.parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", SPOIL, BENCH],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "as wide as the host's" in done.stderr
