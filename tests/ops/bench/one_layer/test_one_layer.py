"""Benchmarks of one layer at a tiny size: a wrong result is not timed; floors and figures are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from harness import layer
from harness.made_up import coarse_layers
from harness.report import CheckFailedError

from index_store.attention.attention_state import AttentionState
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.interface.layer_index import Asked, Best
from index_store.methods.method import INDEX_SPECS
from index_store.methods.presets import get_method
from index_store.selection.ranking import Ranking
from tests.ops.bench.conftest import Run, load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("one_layer/attention_cpu")


@pytest.mark.parametrize("trained", [False, True])
def test_one_line_per_result(bench: ModuleType, run: Run, trained: bool) -> None:
    rows, code, table = run(bench, lengths="1k", shapes="reader", keep="0.05", repeats=2, trained=trained)
    sparse = ["csattention-dense", "csattention-lists", "csattention-remainder", "refined"]
    planes = ["full-engine-int8", "refined-int8"]
    assert (code, [row["method"] for row in rows]) == (
        0,
        ["full", "full-products", "full-engine", "read", *sparse, *planes],
    )
    assert len(table.splitlines()) == 2 + len(rows)
    variants = rows[0]["variants_us"]
    for row, kind in zip(rows, ("sdpa", "bmm"), strict=False):
        assert row["step_us"] == min(us for name, us in variants.items() if name.startswith(kind))
    for row in rows:
        assert (row["shape"], row["context"]) == ("reader", 1024)
        for speedup, base in zip(("speedup", "speedup_products"), rows, strict=False):
            assert row[speedup] == pytest.approx(base["step_us"] / row["step_us"], abs=0.02, rel=0.01)
    assert all(row["search_us"] > 0 for row in rows[4:] if "keep" in row)


@pytest.mark.parametrize("layout", ["dense", "lists"])
def test_a_spoiled_index_fails_the_check(bench: ModuleType, layout: str) -> None:
    problem = bench.make_problem(bench.SHAPES["reader"], 1024, 2, 0)
    method = get_method("csattention+dropped", 0.05)
    index = bench.build_index(problem, layout, 0)
    bench.SparseBench(problem, index, method).check()
    index.rank = lambda *arguments: spoil(type(index).rank(index, *arguments))
    with pytest.raises(CheckFailedError, match="selection holds"):
        bench.SparseBench(problem, index, method).check()


def spoil(ranking: Ranking) -> Ranking:
    return Ranking(-ranking.logits_HTGM, ranking.items)


def test_a_spoiled_coarse_copy_fails_the_check(bench: ModuleType) -> None:
    problem = bench.make_problem(bench.SHAPES["reader"], 1024, 2, 0)
    index = CoarseRows.build(INDEX_SPECS["coarse_rows"].parameters, bench.layer_source(problem, 0), 0)
    sparse = bench.SparseBench(problem, index, get_method("refined", 0.05))
    sparse.check()
    find = CoarseRows.best_together

    def spoiled(index: CoarseRows, asked: Sequence[Asked], keeps: Sequence[int]) -> Best:
        best = find(index, asked, keeps)
        return replace(best, others=AttentionState(best.others.out, best.others.lse - 0.5))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CoarseRows, "best_together", spoiled)
        with pytest.raises(CheckFailedError, match="coarse attention: relative error"):
            sparse.check()


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


@pytest.mark.parametrize(("head_dim", "group", "coded"), [(128, 4, False), (128, 4, True), (256, 16, False)])
def test_wrong_attention_of_many_sessions_is_not_timed(
    head_dim: int, group: int, coded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("shared_gpu", monkeypatch)
    figure = bench.Figure("small", 128, (5, 1))
    memory = bench.SharedMemory(128, 2, 6, head_dim, group, coded)
    steps = bench.Bench(memory, figure)
    steps.check()
    right = steps.attention.attend
    monkeypatch.setattr(steps.attention, "attend", lambda layer, q, records: 2 * right(layer, q, records))
    with pytest.raises(CheckFailedError, match=r"session \d: relative error"):
        steps.check()
