"""Kernels of one layer: on a GPU or in the interpreter, a wrong result is not timed; floors and figures are right."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
import typer
from harness import layer
from harness.made_up import coarse_layers
from harness.made_up.trained_rows import TrainedRows
from harness.report import CheckFailedError

from decode_engine.kernels.tables.sizes import TableSizes
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


def test_every_figure_can_be_planned(tables: ModuleType) -> None:
    for figure in tables.FIGURES:
        parameters = figure.method().index.parameters
        assert parameters["subspaces"] * parameters["centroids"] == tables.TABLE_ROWS
        TableSizes(8, 4, 128, figure.subspaces, parameters["centroids"], figure.length, figure.pooled)
        assert set(figure.bars) == {0.05, 0.01}


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
    row = 2 * head_dim * layer.DTYPE.itemsize
    scaled = max(1, head_dim // 128)  # parts of a value
    assert steps.bytes_floor(20) == 256 * (head_dim + 4 * scaled) + 8 * head_dim + (20 + 8 + 64 + 16) * row
    check_that_wrong_results_are_refused(steps, "was not written")


def test_heads_that_refined_has_no_kernels_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("refined_gpu", monkeypatch)
    for head_dim, group, words in ((96, 4, "dimensions 64, 128 and 256"), (256, 17, "groups of 1 to 16")):
        with pytest.raises(typer.BadParameter, match=words):
            bench.main(head_dim=head_dim, group=group)


def test_rows_of_a_trained_model_are_tiled() -> None:
    layers, sessions, heads, group, own = 3, 2, 2, 2, 4
    kv = torch.arange(layers * heads * 5 * 2 * own).view(layers, heads, 5, 2, own).float()
    rows = TrainedRows(
        kv,
        torch.arange(layers * sessions * heads * group * own)
        .view(layers, sessions, heads, group, own)
        .float(),
    )
    for head_dim in (own, 2 * own):
        made = rows.kv(1, 8, 7, head_dim)
        assert made.shape == (8, 7, 2, head_dim)
        assert torch.equal(made[:, 5:], made[:, :2])
        assert torch.equal(made[0, :5, :, :own], kv.flatten(0, 1)[1])
        assert not torch.equal(made, rows.kv(2, 8, 7, head_dim))
        assert rows.q(1, 8, 4, head_dim).shape == (8, 4, head_dim)
        assert torch.equal(rows.q(0, 8, 4, head_dim)[0, :, :own], rows.q_LSHGD[0, :, 0].flatten(0, 1))
    with pytest.raises(ValueError, match="too few"):
        rows.q(0, 8, 5, own)


@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (256, 16)])
def test_wrong_attention_of_many_sessions_is_not_timed(
    head_dim: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("shared_gpu", monkeypatch)
    figure = bench.Figure("small", 128, (5, 1))
    memory = bench.SharedMemory(128, 2, 6, head_dim, group)
    steps = bench.Bench(memory, figure)
    steps.check()
    right = steps.attention.attend
    monkeypatch.setattr(steps.attention, "attend", lambda layer, q, records: 2 * right(layer, q, records))
    with pytest.raises(CheckFailedError, match=r"session \d: relative error"):
        steps.check()


def test_a_figure_says_how_it_misses_its_bar(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer, "graph_us", lambda steps, turns: 10.0)
    monkeypatch.setattr(layer, "eager_us", lambda steps: 20.0)
    monkeypatch.setattr(layer, "kernel_us", lambda steps: {"some": 5.0})

    class Timed(tables.Bench):  # type: ignore[misc,name-defined]
        def check(self, layer: int = 0) -> None:
            self.attend(layer)

    figure = tables.Figure("small", LENGTH, 1, 8, True, {0.05: 5.0})
    memory = tables.TableMemory(LENGTH, 1)

    def make(share: float) -> Any:
        return Timed(memory, figure, share)

    full = {"flash": 40.0, "cudnn": 50.0}
    ((row, missed),) = layer.figure_rows("small", figure.bars, make, full, 1e9)
    assert (row["ratio"], row["full_backend"], missed) == (4.0, "flash", ["small at 0.05: 4.00x, bar 5.0x"])
    assert row["fraction"] == pytest.approx(row["bytes"] / 10e-6 / 1e9)
    assert 0.5 < row["kept_of_wanted"] < 2
