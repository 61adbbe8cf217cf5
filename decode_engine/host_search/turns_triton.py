"""Lets lanes of a step compute one after another, so that one computes while another's rows are on their way.

Lanes that start together stay together: both compute, each half as fast, and then both wait for the same PCIe. So a
lane takes the turn before it computes, and gives it back when it has asked for rows. The turn is a word on the device,
which says whose it is: one launch waits for it with one program of one warp, another one gives it back.

Nothing but speed depends on it. A lane that has waited for `LIMIT_NS` goes on, and has the turn, whoever had it before:
that one may have failed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from decode_engine.host_search.mailbox_triton import clock, doze
from decode_engine.kernels.launches import chained, wait_for_launch

LIMIT_NS = 5_000_000
"""Many times what a lane computes between two fetches."""


def take_turn(turn_1: Tensor | None, lane: int, limit_ns: int = LIMIT_NS) -> None:
    """What is launched next runs in the lane's turn. turn_1: [1] int32, 0 at first; None does nothing."""
    if turn_1 is not None:
        take_kernel[(1,)](
            turn_1, lane + 1, limit_ns, ON_DEVICE=turn_1.is_cuda, num_warps=1, **chained(turn_1.device)
        )


def give_turn(turn_1: Tensor | None, lane: int) -> None:
    """Gives the turn back when what was launched before has ended, if it is the lane's."""
    if turn_1 is not None:
        give_kernel[(1,)](turn_1, lane + 1, num_warps=1, **chained(turn_1.device))


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
