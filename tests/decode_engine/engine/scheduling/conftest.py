"""An engine over a runner without a model, whose steps and clock are the test's."""

from __future__ import annotations

import pytest

from decode_engine.engine.engine import Engine
from tests.decode_engine.engine.fake_runner import FakeEngine, FakeRunner


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(runner: FakeRunner, clock: Clock) -> FakeEngine:
    """An engine without its thread: tests call `step`."""
    return Engine(runner, max_sessions=4, max_waiting=2, prompt_chunk=4, clock_ns=clock)
