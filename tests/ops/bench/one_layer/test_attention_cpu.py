"""The attention benchmark runs at a tiny size, and refuses to report a time for a wrong result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import pytest
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
