"""Options that several commands share, and how they are checked against the machine that the command runs on."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from index_store.cli.options import AUTO, MODELS, AtLeast, Filled, InputFile, OneOf
from index_store.errors import InvalidArgumentError
from index_store.store.files.reading import available_cores

WEIGHTS = (AUTO, "float32", "bfloat16", "int8")
"""How a model's matrices are kept on a CPU."""


def check_device(device: str) -> None:
    """Raises InvalidArgumentError unless it is auto, cpu, or cuda on a machine that has a CUDA device."""
    if device not in ("auto", "cpu"):
        from index_store.memory.devices import pick_device

        pick_device(device)


def search_cores() -> int:
    """Threads that search on the host beside a GPU: two cores stay for the engine and whatever else runs."""
    return max(1, available_cores() - 2)


def check_placement(placement: str, device: str, device_memory: int | None = None) -> None:
    """Raises InvalidArgumentError for an unknown placement, and for one or a budget that needs a GPU without one."""
    from index_store.memory.placement import parse_placement

    chosen = parse_placement(placement)
    beside = chosen is not None and chosen.kv_on_host
    if beside or device_memory is not None:
        from index_store.memory.devices import pick_device

        if pick_device(device).type == "cpu":
            flag, use = (
                (f"--placement is {placement}", "--placement auto")
                if beside
                else ("--device-memory is given", "--memory")
            )
            raise InvalidArgumentError(
                f"{flag}, but the CPU computes here and everything is in its memory; use {use}",
                field="placement",
            )


def check_prefill(prefill: bool, device: str) -> None:
    """Raises InvalidArgumentError where contexts are to be made beside a server that computes on a GPU."""
    if not prefill:
        return
    from index_store.memory.devices import pick_device

    if pick_device(device).type != "cpu":
        raise InvalidArgumentError(
            "--prefill is given, but a GPU computes here, and a worker on it would make answers wait and hold the "
            "model a second time; run `prefill-worker serve` on another device or machine that shares the store",
            field="prefill",
        )


def check_weights(weights: str, device: str) -> None:
    """Raises InvalidArgumentError where the model's weights are to be kept otherwise and are not: on a GPU."""
    if weights == AUTO:
        return
    from index_store.memory.devices import pick_device

    if pick_device(device).type != "cpu":
        raise InvalidArgumentError(
            f"--weights is {weights}, but a GPU computes here, with weights as the checkpoint has them; leave it out, "
            "or use --device cpu",
            field="weights",
        )


class Prompts(Enum):
    """What the tokens of a prompt attend to.

    EXACT: all of the context, whatever the method. SPARSE: what one search selects for all tokens of a piece of the
    prompt together. EACH: every token to what a search of its own selects, like the tokens of an answer. AUTO: exact on
    a GPU, each on a CPU.
    """

    AUTO = "auto"
    EXACT = "exact"
    SPARSE = "sparse"
    EACH = "each"


ModelOption = Annotated[str, f"{MODELS}.", Filled()]
TextOption = Annotated[
    tuple[Path, ...],
    "Text to make contexts of, may be repeated; packaged novels by default.",
    InputFile(),
]
DistractorsOption = Annotated[
    int | None,
    "Further statements that resemble an asked one; by task if not given.",
    AtLeast(0, 1_000_000),
]
DeviceOption = Annotated[
    str,
    "Where the model and its contexts are: auto (a GPU if there is one), cpu or cuda.",
    OneOf(AUTO, "cpu", "cuda"),
]
PlacementOption = Annotated[
    str,
    "Where contexts are beside a GPU: device (all in its memory), hybrid (keys and values in host memory, "
    "indexes in the GPU's), host (query tables in host memory too, searched by the CPU), or auto (device for what "
    "fits there, else hybrid, host for indexes that do not fit either).",
    OneOf(AUTO, "device", "hybrid", "host"),
]
WeightsOption = Annotated[
    str,
    "How the model's matrices are kept on a CPU: float32, bfloat16 or int8, which round what the checkpoint "
    "has; or as the checkpoint has them, unless float32 takes less time (auto).",
    OneOf(*WEIGHTS),
]
PromptsOption = Annotated[
    Prompts,
    "What the tokens of a prompt attend to: all of the context (exact), what one search selects for all of "
    "them together (sparse), what a search for each selects (each). auto: exact on a GPU, each on a CPU.",
]
