"""Searches on the host: a line per result, no time for a wrong list."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.ops.bench.conftest import Run, load_bench


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = load_bench("one_layer/search_cpu")
    monkeypatch.setattr(found, "TURNS", 2)
    return found


def test_one_line_per_search(search: ModuleType, run: Run) -> None:
    rows, code, _ = run(search, lengths="3k", subspaces="8", threads=2)
    assert (code, [(row["subspaces"], row["group"]) for row in rows]) == (0, [(8, "pooled"), (8, "per_head")])
    for row in rows:
        assert 0 < row["search_best_us"] <= row["search_us"]
        assert row["of_read"] == pytest.approx(row["read_us"] / row["search_us"], abs=0.02, rel=0.02)


def test_a_wrong_list_is_not_timed(search: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = search.best_keys
    monkeypatch.setattr(search, "best_keys", lambda ranking, keep: right(ranking, keep - 1))
    found = run(search, lengths="3k", subspaces="8", threads=1, per_head=False)
    assert found == ([], 1, "error: the list of KV head 0 is not the general path's\n")
