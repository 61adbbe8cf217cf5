"""Standard error: which device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch


def say_device(name: str, *, quiet: bool) -> torch.device:
    """The device that was picked; says on standard error which, where that was left open and not `quiet`.

    Raises InvalidArgumentError like `pick_device`.
    """
    from index_store.memory.devices import describe_device, pick_device

    device = pick_device(name)
    if name != device.type and not quiet:
        typer.echo(f"computing on {describe_device(device)}", err=True)
    return device
