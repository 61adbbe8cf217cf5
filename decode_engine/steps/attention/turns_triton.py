"""Lets lanes of a step compute one after another, so that one computes while another's rows are on their way.

Lanes that start together stay together: both compute, each half as fast, and then both wait for the same PCIe. So a
lane takes the turn before it computes, and gives it back when it has asked for rows. The turn is a word on the device,
which says whose it is: one launch waits for it with one program of one warp, another one gives it back.

Nothing but speed depends on it. A lane that has waited for `LIMIT_NS` goes on, and has the turn, whoever had it before:
that one may have failed. A lane that was overtaken so gives nothing back: it is not the one that the word names.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.kernels.launches import chained, clock, doze, wait_for_launch

LIMIT_NS = 5_000_000
"""Many times what a lane computes between two fetches."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Whose turn it may be: one of the lanes that run at once, from 0 on.

    turn_1: the word, [1] int32, 0 at first, the same for all lanes; None for a lane that runs alone, which needs no
    turns and launches nothing for them.
    """

    number: int = 0
    turn_1: Tensor | None = None

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """What is launched inside runs in the lane's turn. When it raises, the turn stays taken, until `LIMIT_NS`."""
        self.take_turn()
        yield
        self.give_turn()

    @contextmanager
    def out_of_turn(self) -> Iterator[None]:
        """Inside of `in_turn`: what is launched inside leaves the turn to others."""
        self.give_turn()
        yield
        self.take_turn()

    def take_turn(self, limit_ns: int = LIMIT_NS) -> None:
        """What is launched next runs in the lane's turn, or after so many nanoseconds of waiting for it."""
        if self.turn_1 is not None:
            take_kernel[(1,)](
                self.turn_1,
                self.number + 1,
                limit_ns,
                ON_DEVICE=self.turn_1.is_cuda,
                num_warps=1,
                **chained(self.turn_1.device),
            )

    def give_turn(self) -> None:
        """Gives the turn back when what was launched before has ended, if it is the lane's."""
        if self.turn_1 is not None:
            give_kernel[(1,)](self.turn_1, self.number + 1, num_warps=1, **chained(self.turn_1.device))


@triton.jit(do_not_specialize=["mine", "limit_ns"])
def take_kernel(
    turn_ptr: tl.tensor,
    mine: tl.tensor,
    limit_ns: tl.tensor,
    ON_DEVICE: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """One program. The launch after it does not begin meanwhile: its programs would take places of who computes."""
    if CHAINED:
        gdc_wait()
    polls = mine.to(tl.int64) * 0
    begin = clock(polls, ON_DEVICE)
    now = begin
    holder = tl.atomic_cas(turn_ptr, 0, mine)
    while (holder != 0) & (holder != mine) & (now - begin < limit_ns):
        doze(ON_DEVICE)
        polls += 1
        holder = tl.atomic_cas(turn_ptr, 0, mine)
        now = clock(polls, ON_DEVICE)
    if holder != 0:
        tl.store(turn_ptr, mine)
    if CHAINED:
        gdc_launch_dependents()


@triton.jit(do_not_specialize=["mine"])
def give_kernel(turn_ptr: tl.tensor, mine: tl.tensor, CHAINED: tl.constexpr) -> None:
    """One program."""
    wait_for_launch(CHAINED)
    tl.atomic_cas(turn_ptr, mine, 0)
