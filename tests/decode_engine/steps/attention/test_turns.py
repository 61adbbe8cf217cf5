"""Turns: who has one keeps it until it is given back, or until another has waited for too long.

Without a CUDA device the kernels run in Triton's interpreter, one after another, and clocks count polls.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from decode_engine.steps.attention.turns_triton import Lane

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SHORT_NS = 20_000
LONG_NS = 10_000_000_000


@pytest.fixture
def turn_1() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def test_a_turn_is_taken_and_given_back(turn_1: Tensor) -> None:
    for number in (0, 1, 0):
        lane = Lane(number, turn_1)
        lane.take_turn()
        assert int(turn_1) == number + 1
        lane.take_turn()  # it has it
        assert int(turn_1) == number + 1
        lane.give_turn()
        assert int(turn_1) == 0


def test_a_turn_is_given_to_others_meanwhile(turn_1: Tensor) -> None:
    one, other = Lane(0, turn_1), Lane(1, turn_1)
    with one.in_turn():
        assert int(turn_1) == 1
        with one.out_of_turn():
            assert int(turn_1) == 0
            with other.in_turn():
                assert int(turn_1) == 2
        assert int(turn_1) == 1
    assert int(turn_1) == 0


def test_only_who_has_a_turn_gives_it_back(turn_1: Tensor) -> None:
    Lane(1, turn_1).take_turn()
    Lane(0, turn_1).give_turn()
    assert int(turn_1) == 2


def test_who_has_waited_for_too_long_goes_on(turn_1: Tensor) -> None:
    one, other = Lane(0, turn_1), Lane(1, turn_1)
    one.take_turn()
    other.take_turn(SHORT_NS)
    assert int(turn_1) == 2
    one.give_turn()  # late
    assert int(turn_1) == 2
    other.give_turn()
    assert int(turn_1) == 0


def test_a_lane_that_runs_alone_takes_no_turns() -> None:
    with Lane().in_turn(), Lane().out_of_turn():
        pass


def test_who_wants_a_turn_waits_until_it_is_given_back(turn_1: Tensor) -> None:
    Lane(0, turn_1).take_turn()
    Lane(0, turn_1).take_turn()  # compiled
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_turn, Lane(1, turn_1))
        time.sleep(0.3)
        assert not waiting.done()
        turn_1.zero_()  # what giving it back does
        waiting.result(timeout=60)
    assert int(turn_1) == 2


def wait_for_turn(lane: Lane) -> None:
    """On a stream of its own where there is a device."""
    if DEVICE == "cpu":
        lane.take_turn(LONG_NS)
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        lane.take_turn(LONG_NS)
    stream.synchronize()
