"""The benchmark of attention on a GPU: refused without one, and a wrong result is not timed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from decode_engine.kernels.table_batch import LaunchShape, TablePlan, Workspace

BENCH = Path(__file__).resolve().parents[2] / "ops" / "bench" / "attention_gpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_gpu", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_without_a_device_it_says_so() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(BENCH)], capture_output=True, text=True, check=False, env=hidden
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: this benchmark needs a CUDA device\n"


def test_every_figure_can_be_planned(bench: ModuleType) -> None:
    for figure in bench.FIGURES:
        sizes = (figure.subspaces, figure.centroids, figure.length, figure.pooled)
        plan = TablePlan(bench.KV_HEADS, bench.GROUP, bench.HEAD_DIM, *sizes)
        assert plan.subspaces * plan.centroids == 512
        assert set(figure.bars) == {0.05, 0.01}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wrong_result_is_not_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = bench.Figure("small", 8192, 1, 8, 64, True, {0.05: 1.0})
    memory = bench.Memory(figure.length, figure.batch)
    plan = TablePlan(bench.KV_HEADS, bench.GROUP, bench.HEAD_DIM, 8, 64, figure.length, True)
    work = Workspace.make(plan, 1, torch.bfloat16, "cuda")
    batch = memory.batches(figure, 400)[0]
    bench.check(memory, plan, batch, work)
    right = bench.table_attention

    def opposite(q: torch.Tensor, *others: object) -> None:
        right(-q, *others)

    def doubled(*given: object) -> None:
        right(*given)
        work.out.mul_(2)

    for wrong, message in (
        (opposite, "selection differs"),
        (doubled, "relative error"),
        (lambda *_: None, "selection differs"),
    ):
        monkeypatch.setattr(bench, "table_attention", wrong)
        with pytest.raises(bench.CheckFailedError, match=message):
            bench.check(memory, plan, batch, work)


def test_neighbours_of_a_launch_shape_differ(bench: ModuleType) -> None:
    shape = LaunchShape()
    assert shape not in bench.shapes_to_try(shape)
