"""The flags `--device` and `--placement`, which several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch

DeviceOption = Annotated[
    str, typer.Option(help="Where the model and its contexts are: auto (a GPU if there is one), cpu or cuda.")
]

PlacementOption = Annotated[
    str,
    typer.Option(
        metavar="PLACEMENT",
        help="Where contexts are beside a GPU: device (all in its memory), hybrid (keys and values in host memory, "
        "indexes in the GPU's), or auto (device for what fits there, else hybrid).",
    ),
]


def say_device(name: str) -> torch.device:
    """The device that was picked; says on standard error which, where that was left open.

    Raises InvalidArgumentError like `pick_device`.
    """
    from index_store.devices import describe_device, pick_device

    device = pick_device(name)
    if name != device.type:
        typer.echo(f"computing on {describe_device(device)}", err=True)
    return device
