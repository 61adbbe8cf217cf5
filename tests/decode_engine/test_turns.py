"""Turns: who has one keeps it until it is given back, or until another has waited for too long.

Without a CUDA device the kernels run in Triton's interpreter, one after another, and clocks count polls.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode_engine.kernels.turns import give_turn, take_turn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SHORT_NS = 20_000


@pytest.fixture
def turn_1() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def test_a_turn_is_taken_and_given_back(turn_1: Tensor) -> None:
    for lane in (0, 1, 0):
        take_turn(turn_1, lane)
        assert int(turn_1) == lane + 1
        take_turn(turn_1, lane)  # it has it
        assert int(turn_1) == lane + 1
        give_turn(turn_1, lane)
        assert int(turn_1) == 0


def test_only_who_has_a_turn_gives_it_back(turn_1: Tensor) -> None:
    take_turn(turn_1, 1)
    give_turn(turn_1, 0)
    assert int(turn_1) == 2


def test_who_has_waited_for_too_long_goes_on(turn_1: Tensor) -> None:
    take_turn(turn_1, 0)
    take_turn(turn_1, 1, SHORT_NS)
    assert int(turn_1) == 2
    give_turn(turn_1, 0)  # late
    assert int(turn_1) == 2
    give_turn(turn_1, 1)
    assert int(turn_1) == 0


def test_a_lane_that_runs_alone_takes_no_turns() -> None:
    take_turn(None, 0)
    give_turn(None, 0)


@pytest.mark.gpu
def test_lanes_on_two_streams_compute_one_after_another() -> None:
    """Each writes its number all over while it has the turn, and reads it back: nobody else has written there."""
    turn_1 = torch.zeros(1, dtype=torch.int32, device="cuda")
    place, found = torch.zeros(2**22, device="cuda"), torch.zeros(2, 50, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for turn in range(50):
        for lane, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                take_turn(turn_1, lane, 2_000_000_000)
                place.fill_(lane + 1)
                place.mul_(3)
                found[lane, turn] = (place == 3 * (lane + 1)).all()
                give_turn(turn_1, lane)
    torch.cuda.synchronize()
    assert found.all()
    assert int(turn_1) == 0
