"""How launches follow one another, how a program waits, and how the last of a launch knows that it is the last.

From compute capability 9.0 on a launch may begin while the one before ends. Such a kernel first waits for the results
of the one before, but its programs are in place by then; what no launch of a step writes may be read before the wait.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

_TURN_NS = tl.constexpr(1000)


def chained(device: torch.device) -> dict[str, Any]:
    """Options of launches that may begin while the one before ends."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


@triton.jit
def wait_for_launch(CHAINED: tl.constexpr) -> None:
    """Waits for the results of the launch before, and lets the next one begin to wait for this one's.

    Where that pays, which is a matter of trying: programs that come early take places of those that still work.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_alone(CHAINED: tl.constexpr) -> None:
    """Waits for the results of the launch before; the next one begins with `let_next_begin`."""
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next_begin(CHAINED: tl.constexpr) -> None:
    """Lets the next launch begin, if all programs of this one have come here."""
    if CHAINED:
        gdc_launch_dependents()


@triton.jit
def arrives_last(arrivals_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    """Whether all other programs of this row have been here: what they wrote before is then visible.

    arrivals_ptr: counters, one for each row, zero before and after the launch.
    """
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr + row, 1, sem="acq_rel") == tl.num_programs(0) - 1
    if last:
        tl.store(arrivals_ptr + row, 0)
    return last


@triton.jit
def clock(turns: tl.tensor, ON_DEVICE: tl.constexpr) -> tl.tensor:
    """Nanoseconds; without a device, so many for every turn."""
    now = turns * _TURN_NS
    if ON_DEVICE:
        now = globaltimer()
    return now


@triton.jit
def doze(ON_DEVICE: tl.constexpr) -> None:
    """Lets other programs have the memory for about 100 ns."""
    if ON_DEVICE:
        tl.inline_asm_elementwise(
            "nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
