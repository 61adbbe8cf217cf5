"""The benchmark of whole-model decode steps: refused without a GPU, and every kernel of ours counts as something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.ops.scripts import check_refusal_without_device, load_script

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "ops" / "bench" / "decode_gpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(BENCH)


def test_nothing_is_fetched_ahead_from_gpu_memory() -> None:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--prefetch"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--prefetch is for contexts" in done.stderr


def test_every_kernel_has_a_kind(bench: ModuleType) -> None:
    files = (ROOT / "decode_engine" / "kernels").glob("*.py")
    kernels = {name for file in files for name in re.findall(r"^def (\w+_kernel)\(", file.read_text(), re.M)}
    assert len(kernels) > 10
    kinds = {
        name: [kind for kind, pattern in bench.KINDS.items() if re.fullmatch(pattern, name)]
        for name in kernels
    }
    assert {name: found for name, found in kinds.items() if len(found) != 1} == {}


def test_bars(bench: ModuleType) -> None:
    rest = {"method": "none", "batch": 1}
    assert not bench.misses(rest | {"rest_over_weights": 1.3})
    assert bench.misses(rest | {"rest_over_weights": 1.4})
    step = {"method": "csattention+dropped:0.01", "batch": 4}
    assert not bench.misses(step | {"speedup": 2.6})
    assert bench.misses(step | {"speedup": 2.4})
    assert bench.misses(step)
    assert not bench.misses({"method": "full", "batch": 4})
