"""The benchmark of divided models: two processes of a tiny model in the interpreter, beside one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from tests.ops.bench.conftest import FOLDER, Run, load_bench

INTERPRETED = """
import runpy, sys
import index_store
from tests.support.interpreter.speed import patch_once, remember_types, round_sums_once
patch_once(); remember_types(); round_sums_once()
from decode_engine.steps import batch_kinds
batch_kinds._LEAST_KEYS = 256
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def bench(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = load_bench("whole_model/tensor_parallel_gpu")
    file = str(FOLDER / "whole_model" / "tensor_parallel_gpu.py")
    monkeypatch.setattr(made, "PROGRAM", (sys.executable, "-c", INTERPRETED, file))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return made


def test_two_ranks_say_what_one_says(bench: ModuleType, run: Run) -> None:
    lines, code, _ = run(
        bench, ranks="1,2", shape="toy", layers=2, tokens=300, sessions="2", methods="full", turns=1,
        device="cpu", dtype="float32", seconds=900.0,
    )  # fmt: skip
    assert [line for line in lines if "error" in line] == []
    assert code == 0
    readers = [line for line in lines if line["figure"] == "reader"]
    assert readers[0]["answer"] == readers[1]["answer"]
    one, two = (line for line in lines if line["figure"] == "step")
    assert (one["ranks"], two["ranks"]) == (1, 2)
    for line in (one, two):
        assert line["logits_difference"] < 1e-3
        assert line["tokens_alike"] == 1.0
    assert two["gb"] < 0.6 * one["gb"]
    assert (one["speedup"], two["speedup"] > 0) == (1.0, True)


def test_a_rank_that_ends_ends_all(bench: ModuleType) -> None:
    told = (sys.executable, "-c", "import sys, time; sys.argv[2] == '1' and sys.exit(3); time.sleep(600)")
    assert bench.start_ranks(2, told, 60.0) == 3
    assert bench.start_ranks(1, (sys.executable, "-c", "import time; time.sleep(600)"), 0.5) == 1
