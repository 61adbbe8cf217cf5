"""Kernels of one layer: on a GPU or in the interpreter, a wrong result is not timed; floors and figures are right."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from harness import layer
from harness.made_up import coarse_layers
from harness.report import CheckFailedError

from tests.ops.bench.conftest import load_bench

pytestmark = pytest.mark.usefixtures("few_programs")
LENGTH = 512


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A benchmark of one KV head and the fewest layers."""
    found = load_bench(f"one_layer/{name}")
    for module in (layer, coarse_layers, found):
        monkeypatch.setattr(module, "KV_HEADS", 1)
        monkeypatch.setattr(module, "COLD_BYTES", 2, raising=False)
    return found


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("attention_gpu", monkeypatch)


def check_that_wrong_results_are_refused(steps: Any, unwritten: str) -> None:
    steps.check()
    right = steps.attention.attend
    for wrong, message in (
        (lambda layer, q, records: 2 * right(layer, q, records), "relative error"),
        (lambda layer, q, records: q, unwritten),
    ):
        steps.attention.attend = wrong
        with pytest.raises(CheckFailedError, match=message):
            steps.check()


@pytest.mark.parametrize("pooled", [True, False])
def test_wrong_attention_over_tables_is_not_timed(tables: ModuleType, pooled: bool) -> None:
    figure = tables.Figure("small", LENGTH, 1, 8, pooled, {0.05: 1.0})
    steps = tables.Bench(tables.TableMemory(LENGTH, 1), figure, 0.05)
    assert steps.shape not in steps.neighbours()
    assert steps.bytes_floor(20) == (1 if pooled else 4) * 8 * LENGTH + (20 + 8 + 64 + 16) * layer.ROW
    check_that_wrong_results_are_refused(steps, "was not written")


@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (128, 4), (64, 7), (256, 8)])
def test_wrong_attention_of_refined_is_not_timed(
    head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("refined_gpu", monkeypatch)
    figure = bench.Figure("small", 1, 4, {0.05: 1.0})
    memory = bench.CoarseMemory(256, 1, head_dim, group=group, clustered=True)
    steps = bench.Bench(memory, figure, 0.05)
    assert steps.shape not in steps.neighbours()
    row = 2 * head_dim * layer.DTYPE.itemsize
    scaled = max(1, head_dim // 128)  # parts of a value
    assert steps.bytes_floor(20) == 256 * (head_dim + 4 * scaled) + 8 * head_dim + (20 + 8 + 64 + 16) * row
    check_that_wrong_results_are_refused(steps, "was not written")


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (256, 16)])
def test_wrong_attention_of_many_sessions_is_not_timed(
    head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("shared_gpu", monkeypatch)
    figure = bench.Figure("small", 128, (5, 1))
    assert bench.SharedShape() not in bench.neighbours(bench.SharedShape())
    memory = bench.SharedMemory(128, 2, 6, head_dim, group)
    steps = bench.Bench(memory, figure, bench.shared_shape(group, head_dim, False))
    steps.check()
    right = steps.attention.attend
    monkeypatch.setattr(steps.attention, "attend", lambda layer, q, records: 2 * right(layer, q, records))
    with pytest.raises(CheckFailedError, match=r"session \d: relative error"):
        steps.check()
