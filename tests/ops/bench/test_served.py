"""Benchmarks of servers: many clients, streams of tenants, a cluster, a store of many contexts, over a toy model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from harness.doors import Heard
from harness.report import CheckFailedError

from decode_engine.settings.config import ServeConfig
from tests.decode_engine.conftest import TEXT, make_library
from tests.ops.bench.conftest import Run, load_bench
from tests.support.serving.service import loaded


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("served/many_clients")


@contextmanager
def serving_here(store: Path, *options: str, model: str, device: str) -> Iterator[SimpleNamespace]:
    """As `harness.served.serving`, in this process."""
    first, *pairs = options
    assert first == "--no-warm-up"
    limits = {
        flag.removeprefix("--").replace("-", "_"): int(value)
        for flag, value in zip(pairs[::2], pairs[1::2], strict=True)
    }
    config = ServeConfig(store, model, "127.0.0.1:0", device=device, threads=1, warm_up=False, **limits)  # type: ignore[arg-type]
    with loaded(config) as server:
        yield SimpleNamespace(address=server.address)


def test_all_cases_are_reported(
    bench: ModuleType, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "serving", serving_here)
    monkeypatch.setattr("harness.served.source_text", lambda files: TEXT * 4)
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    model = make_library(tmp_path).model
    options = {"clients": 3, "tokens": "300", "answer_tokens": 8, "rounds": 1, "processes": 2}
    rows, code, written = run(bench, model=str(model), device="cpu", folder=tmp_path, **options)
    assert code == 0, written
    cases = [("one context", "full"), ("own contexts", "full"), ("one context", "refined")]
    cases += [("own contexts", "refined"), ("absurd", "refined")]
    assert [(row["case"], row["method"]) for row in rows] == cases
    assert all(row["ended_early"] == 0 for row in rows)
    assert all(0 < row["gap_p50_ms"] <= row["gap_p99_ms"] <= row["gap_longest_ms"] for row in rows)
    assert rows[-1]["refused_ms"] > 0


def test_changed_answers_are_not_reported(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([1, 1, 2])

    class Changing:
        address = ""

        def ask(self, questions: object) -> SimpleNamespace:
            token = next(answers)
            heard = Heard(0.0, (0.1, 0.2), counts=(1, 1), token_ids=(token, token))
            return SimpleNamespace(begin=0.0, heard=lambda: [heard] * 16)

    monkeypatch.setattr(bench, "refuse", lambda *asked: (0.1, 0.2))
    with pytest.raises(CheckFailedError, match="changed the answers"):
        bench.ask_absurdly(None, Changing(), "contexts/0", "refined", {"answer_tokens": 2})


def test_shares_and_cost_are_reported(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("served/tenants")
    monkeypatch.setattr("harness.served.source_text", lambda files: TEXT * 4)
    model = make_library(tmp_path).model
    options = {"streams": 12, "tenants": 3, "minutes": 0.5, "sessions": 3, "turns": 2, "tokens": "300"}
    rows, code, written = run(bench, model=str(model), device="cpu", processes=1, **options)
    assert code == 0, written
    shares, cost = rows
    assert (shares["case"], cost["case"]) == ("shares", "cost")
    assert shares["starved"] == 0
    assert 0.5 < shares["share_least"] <= 1 <= shares["share_most"] < 1.5
    assert 0 < shares["gap_p50_ms"] <= shares["gap_p99_ms"]
    assert 0 < shares["first_p50_ms"] <= shares["first_p99_ms"]
    assert cost["ratio"] > 0


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
