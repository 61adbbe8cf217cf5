"""Steps in flight: who joins, who leaves, which fail, and which do not fly at all."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Flight
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import StepGraph
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod
from index_store.methods.presets import get_method
from tests.decode_engine.steps.in_flight.late_world import CPU, IDENTITY, LateDevice, World


def test_who_joins_steps_as_soon_as_the_step_in_flight_has_ended(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int]
) -> None:
    world = World(LateDevice(random.Random(0)))
    one, other = sessions = [world.start(*contexts[0]) for _ in range(2)]
    world.read(sessions, [[5], [7]])
    flight, samplers = Flight(world), [Sampler(SamplingParameters()) for _ in sessions]
    (first,) = flight.step([one], [3], samplers[:1], follow=True)
    second, none = flight.step(sessions, [first, 4], samplers, follow=True)  # type: ignore[list-item]
    assert isinstance(second, int)
    assert none is None
    assert all(isinstance(each, int) for each in flight.step(sessions, [second, 4], samplers, follow=True))
    assert (one.tail_keys, other.tail_keys) == (4, 2)
    flight.leave(one)
    (left,) = flight.step([other], [0], samplers[1:], follow=True)
    assert isinstance(left, int)
    assert (one.tail_keys, other.tail_keys) == (4, 3), "who has left has not advanced"
    flight.leave(other)
    assert world.device.faults == []


def test_a_step_that_fails_behind_one_in_flight_ends_its_sessions_only(
    contexts: list[tuple[ResidentContext, FittedMethod]], flying: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the other batch go on."""
    world = World(LateDevice(random.Random(0)))
    sessions = [world.start(*contexts[0]), world.start(*contexts[2])]
    world.read(sessions, [[5], [7]])
    flight, samplers = Flight(world), [Sampler(SamplingParameters()) for _ in sessions]
    launch = StepGraph.launch

    def failing(graph: StepGraph, rows: Any, tokens: Any, samplers: Any) -> Any:
        if tokens is None and graph.batch.sessions[0] is sessions[0]:
            raise RuntimeError("out of something")
        return launch(graph, rows, tokens, samplers)

    monkeypatch.setattr(StepGraph, "launch", failing)
    tokens = flight.step(sessions, [3, 4], samplers, follow=True)
    assert all(isinstance(each, int) for each in tokens)
    failed, token = flight.step(sessions, tokens, samplers, follow=False)  # type: ignore[arg-type]
    assert str(failed) == "out of something"
    assert isinstance(token, int)
    assert [session.tail_keys for session in sessions] == [2, 3]


@pytest.mark.parametrize(
    ("name", "placement", "flies"),
    [
        ("full", Placement.DEVICE, True),
        ("refined+dropped", Placement.HYBRID, True),
        ("csattention", Placement.HOST, False),
    ],
)
def test_steps_that_the_host_has_a_part_in_do_not_fly(name: str, placement: Placement, flies: bool) -> None:
    method = get_method(name)
    context = made_up_context(IDENTITY, "float32", method, 90, placement=placement)
    stepper = Stepper(World(None).model, IDENTITY, torch.float32, CPU, searching=SearchThreads(1))
    assert stepper._required(Session(context, method.on(context.manifest))).flies is flies
