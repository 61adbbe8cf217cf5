"""What the host gives a device to do while it goes on itself, and the numbers that they leave each other."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class DeviceQueue:
    """Work for a device, which is done in the order in which it is given.

    On a GPU that is its current stream, and the host goes on before the work is done. On a CPU it is done at once.

    Memory of the host that a copy reads or writes belongs to that copy alone: it is taken anew for each, page-locked
    for a GPU, and torch gives it out again only once the copy is done. So what the host writes for a step never
    reaches the step before.
    """

    def do(self, work: Callable[[], object]) -> None:
        """Gives the device some work: what launches it, and does not wait."""
        work()

    def mark(self, device: torch.device) -> Callable[[], None]:
        """What waits until the device has done all that was given to it until now.

        It raises what went wrong on the device.
        """
        if device.type != "cuda":
            return lambda: None
        event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
        return event.synchronize

    def send(self, values: Tensor, out: Tensor) -> None:
        """Copies a tensor in host memory to one on the device; it may be written to as soon as this returns."""
        staged = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=out.is_cuda)
        staged.copy_(values)
        self.do(lambda: out.copy_(staged, non_blocking=True))

    def fetch(self, values: Tensor) -> Tensor:
        """A tensor in host memory that is a copy of one on the device, once a later `mark` was waited for."""
        fetched = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
        self.do(lambda: fetched.copy_(values, non_blocking=True))
        return fetched
