"""What the server is told, and the options that it shares with other commands."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

from typer import Option

from index_store.cli.options import AUTO, SIZE, AtLeast, Spelled, StoreOption, check_bounds
from index_store.errors import InvalidArgumentError

DEFAULT_LISTEN = "127.0.0.1:50051"

MAX_LANES = 4

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):(\d{1,5})")


def check_address(text: str) -> str:
    """The text, when it is HOST:PORT with a port of 0 to 65535. Raises InvalidArgumentError otherwise."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise InvalidArgumentError(f"address is {text!r}, expected HOST:PORT, such as {DEFAULT_LISTEN}")
    return text


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


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address."""
    host = address.rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Compilation(Enum):
    """How the model around the attention is compiled: not at all, by default rules, or by trying kernels out.

    Compiled kernels are kept in torch's own cache on disk; the first start with a model takes up to a minute for every
    size of batch. Kernels are tried out for single sessions only: for larger batches those found that way were slower
    than the library's (an 8B model on an H200, 4 sessions: 6.2 against 4.9 ms).
    """

    OFF = "off"
    DEFAULT = "default"
    MAX_AUTOTUNE = "max-autotune"


def check_compilation(compilation: Compilation, device: str) -> None:
    """Raises InvalidArgumentError where the model is to be compiled and nothing is: on a CPU."""
    if compilation is Compilation.OFF:
        return
    from index_store.memory.devices import pick_device

    if pick_device(device).type == "cpu":
        raise InvalidArgumentError(
            f"--compile is {compilation.value}, but the CPU computes here, where steps are not compiled; "
            "use --compile off",
            field="compile",
        )


def check_prefetch(prefetch: bool, device: str, placement: str) -> None:
    """Raises InvalidArgumentError where rows are to be fetched ahead and nothing is fetched.

    That is on a CPU, and where contexts lie in GPU memory.
    """
    if not prefetch:
        return
    from index_store.memory.devices import pick_device
    from index_store.memory.placement import Placement

    if pick_device(device).type == "cpu":
        raise InvalidArgumentError(
            "--prefetch is given, but the CPU computes here and reads keys and values where they are; leave it out",
            field="prefetch",
        )
    if placement == Placement.DEVICE.value:
        raise InvalidArgumentError(
            f"--prefetch is given, but with --placement {placement} no keys and values are in host memory; leave it "
            "out, or use --placement auto or hybrid",
            field="prefetch",
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


ServerOption = Annotated[
    str, Option("--server", envvar="SPARSEKV_SERVER", metavar="HOST:PORT", help="The server to ask.")
]
ModelOption = Annotated[
    str, Option("--model", help="Packaged model (reader) or path of a Hugging Face folder.")
]
TextOption = Annotated[
    tuple[Path, ...],
    Option("--text", help="Text to make contexts of, may be repeated; packaged novels by default."),
]
DistractorsOption = Annotated[
    int | None,
    Option("--distractors", help="Further statements that resemble an asked one; by task if not given."),
]
DeviceOption = Annotated[
    str, Option(help="Where the model and its contexts are: auto (a GPU if there is one), cpu or cuda.")
]
PlacementOption = Annotated[
    str,
    Option(
        "--placement",  # some versions of typer would call it as the metavar is written
        metavar="PLACEMENT",
        help="Where contexts are beside a GPU: device (all in its memory), hybrid (keys and values in host memory, "
        "indexes in the GPU's), host (query tables in host memory too, searched by the CPU), or auto (device for what "
        "fits there, else hybrid, host for indexes that do not fit either).",
    ),
]
PromptsOption = Annotated[
    Prompts,
    Option(
        help="What the tokens of a prompt attend to: all of the context (exact), what one search selects for all of "
        "them together (sparse), what a search for each selects (each). auto: exact on a GPU, each on a CPU."
    ),
]


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`decode-engine serve`: what its flags say, sizes in bytes.

    memory, device_memory: None for their defaults (`devices.memory_budget`). session_memory: None for a share of what
    is free. prompt_chunk: None for the device's default.
    """

    store: StoreOption
    model: Annotated[str, Option(help="'reader', or the path of a Hugging Face model folder.")]
    listen: Annotated[str, Option(metavar="HOST:PORT", help="Where to listen; port 0 picks a free one.")] = (
        DEFAULT_LISTEN
    )
    memory: Annotated[
        int | None,
        Option(
            metavar="SIZE",
            help="Host memory for contexts, for example 8GiB; the least recently used go first, requests wait while "
            "those in use fill it. auto: 8GiB, or beside a GPU half of what is free once the model is loaded.",
        ),
        SIZE,
        AtLeast(1),
    ] = None
    device_memory: Annotated[
        int | None,
        Option(
            metavar="SIZE",
            help="GPU memory for contexts, likewise. auto: half of what is free once the model is loaded.",
        ),
        SIZE,
        AtLeast(1),
    ] = None
    placement: PlacementOption = AUTO
    session_memory: Annotated[
        int | None,
        Option(
            metavar="SIZE",
            help="Memory that requests in progress may come to need together for prompts and answers; others wait. "
            "auto: a quarter of what is free once the model is loaded.",
        ),
        SIZE,
        AtLeast(1),
    ] = None
    max_sessions: Annotated[int, Option(help="Requests in progress at once."), AtLeast(1)] = 16
    max_waiting: Annotated[int, Option(help="Requests that may wait; more are refused."), AtLeast(0)] = 64
    prompt_chunk: Annotated[
        int | None,
        Option(
            min=0,
            help="Prompt tokens per step, of all prompts; answers pause for that long. 0: 256 on a CPU, 512 on a GPU.",
        ),
        Spelled(0, lambda tokens: tokens or None),
        AtLeast(1),
    ] = None
    prompts: PromptsOption = Prompts.AUTO
    threads: Annotated[
        int,
        Option(help="Threads of searches and matrix products; 0 means all cores."),
        Spelled(0, lambda threads: threads or available_cores()),
        AtLeast(1),
    ] = field(default_factory=available_cores)
    search_threads: Annotated[
        int,
        Option(
            min=0,
            help="Threads that search on the CPU beside a GPU, for contexts of placement host; each takes a core "
            "while a step runs. 0: all cores but two.",
        ),
        Spelled(0, lambda threads: threads or search_cores()),
        AtLeast(1),
    ] = field(default_factory=search_cores)
    lanes: Annotated[
        int,
        Option(
            help="Parts that a batch over contexts in host memory is split into. They run at once, so that one's rows "
            "are fetched, or searched for, while the GPU computes another. Each reads the model's weights for itself, "
            "and has slots of its own for rows."
        ),
        AtLeast(1),
    ] = 1
    waves: Annotated[
        int,
        Option(
            help="Parts, by KV heads, in which the lists of a layer come back in placement host: rows of one are "
            "fetched while threads search for the next. 0: two where a lane has one session, four where it has more."
        ),
        AtLeast(0),
    ] = 0
    device: DeviceOption = AUTO
    compilation: Annotated[
        Compilation,
        Option(
            "--compile",
            help="Compile the model around the attention, on a GPU: faster steps for a start that takes minutes.",
        ),
    ] = Compilation.OFF
    prefetch: Annotated[
        bool,
        Option(
            "--prefetch",
            help="Fetch rows of contexts in host memory a layer ahead, for queries that are foretold from the layer "
            "before; where a GPU searches.",
        ),
    ] = False
    dtype: Annotated[str, Option(help="Stored dtype of the contexts to serve; auto: the model's.")] = AUTO
    grace: Annotated[float, Option(help="Seconds for running requests when told to stop."), AtLeast(0)] = 10.0

    def __post_init__(self) -> None:
        check_address(self.listen)
        check_device(self.device)
        check_placement(self.placement, self.device, self.device_memory)
        check_compilation(self.compilation, self.device)
        check_prefetch(self.prefetch, self.device, self.placement)
        check_bounds(self)
        cores = os.cpu_count() or 1
        if self.threads > cores:
            raise InvalidArgumentError(
                f"--threads is {self.threads}, expected at most {cores}, the cores of this machine; 0 uses all of them"
            )
        if self.search_threads > cores or self.lanes > MAX_LANES:
            raise InvalidArgumentError(
                f"--search-threads is {self.search_threads} and --lanes {self.lanes}, expected at most {cores}, the "
                f"cores of this machine, and {MAX_LANES}"
            )
