"""The flags `--device`, `--placement` and `--prompts`, which several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from decode_engine.config import Prompts

if TYPE_CHECKING:
    import torch

DeviceOption = Annotated[
    str, typer.Option(help="Where the model and its contexts are: auto (a GPU if there is one), cpu or cuda.")
]

PlacementOption = Annotated[
    str,
    typer.Option(
        "--placement",  # some versions of typer would call it as the metavar is written
        metavar="PLACEMENT",
        help="Where contexts are beside a GPU: device (all in its memory), hybrid (keys and values in host memory, "
        "indexes in the GPU's), host (query tables in host memory too, searched by the CPU), or auto (device for what "
        "fits there, else hybrid, host for indexes that do not fit either).",
    ),
]

PromptsOption = Annotated[
    Prompts,
    typer.Option(
        help="What the tokens of a prompt attend to: all of the context (exact), what one search selects for all of "
        "them together (sparse), what a search for each selects (each). auto: exact on a GPU, each on a CPU."
    ),
]


def say_device(name: str) -> torch.device:
    """The device that was picked; says on standard error which, where that was left open.

    Raises InvalidArgumentError like `pick_device`.
    """
    from index_store.memory.devices import describe_device, pick_device

    device = pick_device(name)
    if name != device.type:
        typer.echo(f"computing on {describe_device(device)}", err=True)
    return device
