"""The benchmark of attention on a GPU: refused without one, and a wrong result is not timed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from decode_engine.kernels.tables.sizes import TableShape, TableSizes
from tests.ops.scripts import check_refusal_without_device, load_script

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"
BENCH = FOLDER / "attention_gpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(BENCH)


def test_without_a_device_it_says_so() -> None:
    check_refusal_without_device(BENCH)


def test_every_figure_can_be_planned(bench: ModuleType) -> None:
    for figure in bench.FIGURES:
        sizes = (figure.subspaces, figure.centroids, figure.length, figure.pooled)
        plan = TableSizes(bench.KV_HEADS, bench.GROUP, bench.HEAD_DIM, *sizes)
        assert plan.subspaces * plan.centroids == bench.TABLE_ROWS
        assert set(figure.bars) == {0.05, 0.01}
        assert figure.method().index.parameters["centroids"] == figure.centroids


def test_bytes_are_those_of_tables_and_rows(bench: ModuleType) -> None:
    figure = bench.Figure("small", 1000, 2, 16, False, {0.05: 0.0})
    plan = TableSizes(8, 4, 128, 16, 32, 1000, False)
    tables = 2 * 8 * 4 * 16 * 1000
    exact = 2 * 8 * (bench.SINKS + bench.RECENT + bench.TAIL)
    assert bench.bytes_floor(figure, plan, 700) == tables + (700 + exact) * 512


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("pooled", [True, False])
def test_a_wrong_result_is_not_timed(bench: ModuleType, pooled: bool) -> None:
    figure = bench.Figure("small", 8192, 1, 8, pooled, {0.05: 1.0})
    memory = bench.Memory(figure.length, figure.batch)
    steps = bench.Steps(memory, figure, 0.05, None)
    bench.check(steps)
    right = steps.attention.attend
    for wrong, message in (
        (lambda layer, q, records: right(layer, -q, records), "selection differs"),
        (lambda layer, q, records: 2 * right(layer, q, records), "relative error"),
        (lambda layer, q, records: q, "was not written"),
    ):
        steps.attention.attend = wrong
        with pytest.raises(bench.CheckFailedError, match=message):
            bench.check(steps)


def test_neighbours_of_a_launch_shape_differ(bench: ModuleType) -> None:
    shape = TableShape()
    assert shape not in bench.shapes_to_try(shape)
