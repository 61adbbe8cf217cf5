"""Contexts to step on, and steps that fly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import StepGraph
from decode_engine.steps.stepper import Stepper
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import METHODS
from tests.decode_engine.steps.in_flight.late_world import IDENTITY


@pytest.fixture(scope="module")
def contexts() -> list[tuple[ResidentContext, FittedMethod]]:
    """Two of full attention, and one whose searched range moves with the tail."""
    searching = replace(METHODS["multipole"], recent=8, append_block=4)
    made = []
    for method, length in ((METHODS["full"], 17), (METHODS["full"], 30), (searching, 90)):
        context = made_up_context(IDENTITY, "float32", method, length)
        made.append((context, method.on(context.manifest)))
    return made


@pytest.fixture
def flying(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """With steps in flight; a number for each that follows one."""
    monkeypatch.setattr(Stepper, "flies", True)
    followed: list[int] = []
    feed = StepGraph._feed_chosen
    monkeypatch.setattr(StepGraph, "_feed_chosen", lambda graph: (followed.append(1), feed(graph)))
    return followed
