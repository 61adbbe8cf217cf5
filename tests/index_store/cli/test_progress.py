"""What long commands say about how far they are."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from index_store.cli import progress
from index_store.cli.progress import reporter_for, show_stages


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the day, which passes when a test says so."""
    now = [100.0]
    # Of this module alone: servers of other tests in this process go by the true time.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_what_takes_no_time_is_not_told_in_a_pipe(clock: list[float]) -> None:
    pipe = io.StringIO()
    reporter = reporter_for(pipe)
    with reporter.phase("verify", "bytes") as update:
        for done in range(1, 11):
            update(done, 10)
    assert pipe.getvalue() == ""
    reporter.note("a sentence")
    assert pipe.getvalue() == "a sentence\n"


def test_what_takes_long_is_told_every_ten_seconds_and_at_the_end(clock: list[float]) -> None:
    pipe = io.StringIO()
    with reporter_for(pipe).phase("prefill", "tokens") as update:
        for done in range(1, 10):
            clock[0] += 4.0
            update(done, 9)
    assert pipe.getvalue().splitlines() == [
        "prefill: 3 of 9 tokens",
        "prefill: 6 of 9 tokens",
        "prefill: 9 of 9 tokens",
    ]
    pipe = io.StringIO()
    with reporter_for(pipe).phase("prefill", "tokens") as update:
        clock[0] += 11.0
        update(1, 2)
        update(2, 2)
    assert pipe.getvalue().splitlines() == ["prefill: 1 of 2 tokens", "prefill: 2 of 2 tokens"]


def test_quiet_says_nothing(clock: list[float]) -> None:
    pipe = io.StringIO()
    reporter = reporter_for(pipe, quiet=True)
    reporter.note("a sentence")
    with reporter.phase("prefill", "tokens") as update:
        clock[0] += 60.0
        update(1, 1)
    with show_stages(pipe, quiet=True) as start_stage:
        start_stage("stage", 1)()
    assert pipe.getvalue() == ""
