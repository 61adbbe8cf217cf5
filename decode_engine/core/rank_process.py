"""Processes of the other ranks of a divided model: started by the engine's, which they repeat, and end with.

Each sees one GPU. Its standard input says what to serve; orders come over a socket of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from msgspec import Struct

from decode_engine.model.divided_model import check_division, join, meeting_place
from decode_engine.model.ranks import Alone, Follower, Leader, Line
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel, logging_to_stderr
from index_store.compiled.launch import set_num_threads
from index_store.errors import InvalidArgumentError
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device, memory_budget
from index_store.memory.memory_sizes import free_memory
from index_store.memory.placement import Placement
from index_store.models.resolve import resolve_model
from index_store.store.heads_part import HeadsPart

_PROGRAM = "from decode_engine.core.rank_process import main; main()"

logger = logging.getLogger(__name__)


class Told(Struct, frozen=True):
    """What a rank is told at its start. place: where ranks meet. fd: of its socket. log_level: of the engine."""

    config: ServeConfig
    rank: int
    device: str
    place: str
    fd: int
    log_level: LogLevel


def start_ranks(config: ServeConfig, device: torch.device) -> tuple[Leader, dict[str, Any]]:
    """Starts all other ranks and meets them: this one among them, and what the model is loaded with.

    From here on the process ends when one of them does. Raises what `check_division` does, and InvalidArgumentError
    where there are too few GPUs.
    """
    ranks = config.tensor_parallel
    check_division(resolve_model(config.model), ranks)
    seen = _visible(device, ranks)
    lines, started = [], []
    place = meeting_place()
    level = LogLevel(logging.getLevelName(logger.getEffectiveLevel()).lower())
    for rank in range(1, ranks):
        own, theirs = socket.socketpair()
        told = Told(config, rank, device.type, place, theirs.fileno(), level)
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            env={**os.environ, **({"CUDA_VISIBLE_DEVICES": seen[rank]} if seen else {})},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        if process.stdin is not None:
            process.stdin.write(msgspec.json.encode(told, enc_hook=str) + b"\n")
            process.stdin.flush()
        lines.append(Line(own))
        started.append(process)
    for process in started:
        threading.Thread(target=_watch, args=(process,), name="rank", daemon=True).start()
    part = HeadsPart(0, ranks)
    return Leader(part, lines, _lost), {"distributed_config": join(part, place, device)}


def _watch(process: subprocess.Popen[bytes]) -> None:
    _lost(f"the process of another GPU ended with {process.wait()}")


def _lost(why: str) -> None:
    """Ends this process at once: its clients are told that the engine has crashed, and it is started again."""
    logger.error("%s; the engine ends", why)
    sys.stderr.flush()
    os._exit(1)


def _visible(device: torch.device, ranks: int) -> list[str]:
    """Names of the GPUs, one for each rank; none where a CPU computes."""
    if device.type == "cpu":
        if torch.cuda.is_available():  # transformers would take them
            raise InvalidArgumentError(
                "--tensor-parallel with --device cpu needs GPUs out of sight; set CUDA_VISIBLE_DEVICES to nothing",
                field="device",
            )
        return []
    if torch.cuda.device_count() < ranks:
        raise InvalidArgumentError(
            f"--tensor-parallel is {ranks}, and torch sees {torch.cuda.device_count()} GPUs",
            field="tensor_parallel",
        )
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",") if told else [str(number) for number in range(ranks)]


def follow(told: Told) -> None:
    """The body of another rank. Returns when the first one has ended."""
    config, device = told.config, torch.device(told.device)
    threads = max(1, config.threads // config.tensor_parallel)
    torch.set_num_threads(threads)
    set_num_threads(threads)
    part = HeadsPart(told.rank, config.tensor_parallel)
    options: Mapping[str, Any] = {"distributed_config": join(part, told.place, device)}
    folder = resolve_model(config.model)
    runner = ModelRunner(
        folder,
        device,
        config.dtype,
        config.prompts,
        weights=config.weights,
        ranks=Alone(part),
        options=options,
    )
    budget = memory_budget(device, config.memory, config.device_memory, free_memory(torch.device("cpu")))
    arena = Arena(
        budget,
        device=context_device(device),
        placement=Placement.DEVICE,
        slot_share=config.slot_share,
        part=part,
    )
    Follower(Line(socket.socket(fileno=told.fd)), runner, config.open_store(), arena).run()


def _end_with_engine() -> None:
    """Ends this process when the engine's has ended, also where it waits for others, or for a GPU."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Ends the process, whatever its threads do."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # which a terminal sends to all: the first rank says when to end
    told = msgspec.json.decode(
        sys.stdin.buffer.readline(), type=Told, dec_hook=lambda kind, value: kind(value)
    )
    threading.Thread(target=_end_with_engine, name="engine", daemon=True).start()
    code = 1
    with logging_to_stderr(told.log_level, False):
        try:
            follow(told)
            code = 0
        except Exception:
            logger.exception("rank %d cannot follow", told.rank)
        sys.stderr.flush()
        os._exit(code)
