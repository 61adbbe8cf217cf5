"""What the programs are told: the same names as the command line's flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from index_store.errors import InvalidArgumentError

DEFAULT_LISTEN = "127.0.0.1:50051"

AUTO = "auto"
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


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """`decode-engine serve`.

    memory, device_memory: byte budgets of contexts in memory of the host and of a GPU, None for their defaults
    (`devices.memory_budget`). placement: what of a context goes where (`Placement`), auto for as it fits.
    max_sessions: requests in progress at once; max_waiting: requests beyond those. prompt_chunk: prompt tokens per
    step, None for the device's default. prompts: what they attend to. threads: of searches and matrix products.
    search_threads: that search beside a GPU for contexts of placement host. lanes: that batches over contexts in host
    memory are split into. waves: in which the lists of a layer come back from the host, by KV heads; 0 for as many as
    pay. compilation: of the model around the attention, on a GPU. prefetch: rows of contexts in host memory are fetched
    a layer ahead. grace: seconds that running requests get when the server is told to stop.
    """

    store: Path
    model: str
    listen: str = DEFAULT_LISTEN
    memory: int | None = None
    device_memory: int | None = None
    placement: str = AUTO
    session_memory: int | None = None
    max_sessions: int = 16
    max_waiting: int = 64
    prompt_chunk: int | None = None
    prompts: Prompts = Prompts.AUTO
    threads: int = field(default_factory=available_cores)
    search_threads: int = field(default_factory=search_cores)
    lanes: int = 1
    waves: int = 0
    device: str = "auto"
    compilation: Compilation = Compilation.OFF
    prefetch: bool = False
    dtype: str = "auto"
    grace: float = 10.0

    def __post_init__(self) -> None:
        check_address(self.listen)
        check_device(self.device)
        check_placement(self.placement, self.device, self.device_memory)
        check_compilation(self.compilation, self.device)
        check_prefetch(self.prefetch, self.device, self.placement)
        for name, value, least in (
            ("memory", 1 if self.memory is None else self.memory, 1),
            ("device-memory", 1 if self.device_memory is None else self.device_memory, 1),
            ("session-memory", 1 if self.session_memory is None else self.session_memory, 1),
            ("max-sessions", self.max_sessions, 1),
            ("max-waiting", self.max_waiting, 0),
            ("prompt-chunk", 1 if self.prompt_chunk is None else self.prompt_chunk, 1),
            ("threads", self.threads, 1),
            ("search-threads", self.search_threads, 1),
            ("lanes", self.lanes, 1),
            ("waves", self.waves, 0),
            ("grace", self.grace, 0),
        ):
            if value < least:
                raise InvalidArgumentError(f"--{name} is {value}, expected at least {least}")
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


@dataclass(frozen=True, slots=True)
class AskConfig:
    """`decode-engine ask`. What is None is left to the server; at most one of keep, mass and tokens_kept is given."""

    context: str
    prompt: str
    server: str = DEFAULT_LISTEN
    raw: bool = False
    method: str | None = None
    keep: float | None = None
    mass: float | None = None
    tokens_kept: int | None = None
    period: int = 0
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        check_address(self.server)
        sizes = {"--keep": self.keep, "--mass": self.mass, "--tokens-kept": self.tokens_kept}
        given = [flag for flag, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise InvalidArgumentError(
                f"{' and '.join(given)} are given, expected at most one of {', '.join(sizes)}"
            )
        if self.timeout is not None and not self.timeout > 0:  # NaN included
            raise InvalidArgumentError(f"--timeout is {self.timeout:g}, expected more than 0 seconds")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Those given, else the end of the line for a question: an answer is one line unless asked otherwise."""
        if self.stop is not None:
            return self.stop
        return () if self.raw else ("\n",)
