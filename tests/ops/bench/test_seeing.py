"""What seeing costs: which servers are asked in which order, and what is made of their times."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from harness.doors import Heard, collector
from harness.report import CheckFailedError

from tests.ops.bench.conftest import Run, load_bench


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("served/seeing")


def test_servers_take_turns_and_are_compared_turn_by_turn(
    bench: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[tuple[str, ...], str]] = []
    asked: list[str] = []
    seconds = {"http://0": 1.0, "http://1": 1.0, "http://2": 2.0, "http://3": 4.0}

    @contextmanager
    def serving(store: Path, *options: str, model: str, device: str) -> Iterator[SimpleNamespace]:
        started.append((options, os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")))
        yield SimpleNamespace(url=f"http://{len(started) - 1}")

    @contextmanager
    def anywhere() -> Iterator[str]:
        yield "http://collector"

    def at_once(pool: object, processes: int, asks: list[SimpleNamespace]) -> SimpleNamespace:
        url = f"http://{asks[0].address}"
        asked.append(url)
        heard = [Heard(0.0, (0.5, seconds[url]), tokens=8)] * len(asks)
        return SimpleNamespace(begin=0.0, heard=lambda: heard)

    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setattr(bench, "serving", serving)
    monkeypatch.setattr(bench, "collector", anywhere)
    monkeypatch.setattr(bench.Asked, "at_once", at_once)
    rows, code, written = run(bench, streams=2, tokens="300", turns=3)
    assert code == 0, written
    assert [(told[-2:], url) for told, url in started] == [
        (("--http-port", "0"), ""),
        (("--http-port", "0"), ""),
        (("--log-level", "info"), "http://collector"),
        (("--audit-share", "0.01"), ""),
    ]
    assert asked[4:] == [f"http://{number}" for number in (0, 1, 2, 3, 1, 2, 3, 0, 2, 3, 0, 1)]
    assert [(row["case"], row["ratio"], row["se"]) for row in rows] == [
        ("alike", 1.0, 0.0),
        ("seen", 0.5, 0.0),
        ("audited", 0.25, 0.0),
    ]
    assert rows[1]["tokens_per_s"] == {"plain": 16.0, "seen": 8.0}


def test_a_ratio_has_a_standard_error(bench: ModuleType) -> None:
    assert bench.ratio([1.0, 3.0], [1.0, 1.0]) == (2.0, pytest.approx(1.0))


def test_a_stream_that_fails_is_no_figure(bench: ModuleType) -> None:
    with pytest.raises(CheckFailedError, match="too many"):
        bench.tokens_per_s(0.0, [Heard(0.0, error="too many")])


def test_spans_are_read_and_dropped() -> None:
    with collector() as url, urllib.request.urlopen(url, data=b"spans", timeout=60) as answer:
        assert answer.status == 200
