"""A cluster that grows and shrinks, and a store of many contexts, in small."""

from __future__ import annotations

import pytest

from tests.ops.bench.conftest import Run, load_bench


def test_a_cluster_grows_and_shrinks_and_no_more_contexts_move_than_the_hash_implies(run: Run) -> None:
    pytest.importorskip("ray")
    lines, code, error = run(
        load_bench("served/clusters"),
        grows=True,
        replicas="1",
        rounds=1,
        clients="1",
        seconds=1.0,
        contexts=8,
        tokens=256,
        most=2,
        stays=15.0,
    )
    assert code == 0, error
    told = {line["what"]: line for line in lines}
    assert "2" in told["grew"]["seconds"]
    assert "1" in told["shrank"]["seconds"]
    assert told["1 to most"]["moved"] <= told["1 to most"]["implied"]
    assert told["most to 1"]["moved"] == 0


def test_a_store_of_a_hundred_contexts(run: Run) -> None:
    """The benchmark checks what it finds."""
    lines, code, error = run(
        load_bench("served/many_contexts"), contexts=100, tokens=300, objects=10, folder=None
    )
    assert code == 0, error
    assert {"read", "start", "list", "label", "beginning", "expire", "objects: first look"} <= {
        line["what"] for line in lines
    }
