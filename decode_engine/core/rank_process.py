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
from contextlib import ExitStack
from typing import Any

import msgspec
import torch
from msgspec import Struct

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.errors import InternalError
from decode_engine.layers.session import Session
from decode_engine.model import ranks
from decode_engine.model.divided_model import check_division, join, meeting_place
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel, logging_to_stderr
from index_store.compiled.launch import set_num_threads
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device, memory_budget
from index_store.memory.memory_sizes import free_memory
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS
from index_store.models.resolve import resolve_model
from index_store.store.catalog import Store
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


def start_ranks(config: ServeConfig, device: torch.device) -> tuple[ranks.Leader, dict[str, Any]]:
    """Starts all other ranks and meets them: this one among them, and what the model is loaded with.

    From here on the process ends when one of them does. Raises what `check_division` does, and InvalidArgumentError
    where there are too few GPUs.
    """
    count = config.tensor_parallel
    check_division(resolve_model(config.model), count)
    seen = _visible(device, count)
    lines, started = [], []
    place = meeting_place()
    level = LogLevel(logging.getLevelName(logger.getEffectiveLevel()).lower())
    for rank in range(1, count):
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
        lines.append(ranks.Line(own))
        started.append(process)
    for process in started:
        threading.Thread(target=_watch, args=(process,), name="rank", daemon=True).start()
    part = HeadsPart(0, count)
    return ranks.Leader(part, lines, _lost), {"distributed_config": join(part, place, device)}


def _watch(process: subprocess.Popen[bytes]) -> None:
    _lost(f"the process of another GPU ended with {process.wait()}")


def _lost(why: str) -> None:
    """Ends this process at once: its clients are told that the engine has crashed, and it is started again."""
    logger.error("%s; the engine ends", why)
    sys.stderr.flush()
    os._exit(1)


def _visible(device: torch.device, count: int) -> list[str]:
    """Names of the GPUs, one for each rank; none where a CPU computes."""
    if device.type == "cpu":
        if torch.cuda.is_available():  # transformers would take them
            raise InvalidArgumentError(
                "--tensor-parallel with --device cpu needs GPUs out of sight; set CUDA_VISIBLE_DEVICES to nothing",
                field="device",
            )
        return []
    if torch.cuda.device_count() < count:
        raise InvalidArgumentError(
            f"--tensor-parallel is {count}, and torch sees {torch.cuda.device_count()} GPUs",
            field="tensor_parallel",
        )
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    return told.split(",") if told else [str(number) for number in range(count)]


class Follower:
    """Another rank: repeats what the first one says."""

    def __init__(self, line: ranks.Line, runner: ModelRunner, store: Store, arena: Arena) -> None:
        self._line, self._runner, self._store, self._arena = line, runner, store, arena
        self._sessions: dict[int, Session] = {}
        self._leases: dict[int, ExitStack] = {}

    def run(self) -> None:
        """Until the first rank has ended. Raises what went wrong: this rank can no longer follow."""
        while self._next():
            pass

    def _next(self) -> bool:
        """Does the next thing; whether there is more to do here."""
        message = self._line.receive()
        order = None if message is None else ranks.decode(message)
        match order:
            case None | ranks.Layer():
                return False
            case ranks.Start():
                self._line.send(self._start(order))
            case ranks.Fork():
                self._sessions[order.new] = self._sessions[order.number].fork()
                # Not one of its own: the context may have been deleted, or have expired, since the first one began.
                self._leases[order.new] = self._leases[order.number]
            case ranks.Close():
                self._sessions.pop(order.number).close()
                lease = self._leases.pop(order.number)
                if all(each is not lease for each in self._leases.values()):
                    lease.close()
            case ranks.Pass():
                self._forward(order)
            case ranks.CatchUp():
                self._runner.catch_up(*self._at([(order.number, order.position)]))
            case ranks.CapturedStep():
                samplers = [_sampler(each) for each in order.repeatable]
                self._runner.step_captured(self._at(order.places), order.tokens, samplers)
        return True

    def _start(self, order: ranks.Start) -> bytes:
        """Why a session cannot begin; nothing where it has."""
        lease = self._leases[order.number] = ExitStack()
        try:
            context = self._runner.no_context
            if order.context:
                # Never waits for memory: what others hold ends by orders, which nobody would read meanwhile.
                context = lease.enter_context(self._arena.acquire(self._store, order.context, expired=True))
            context.gate.wait_for_all()
            method = ranks.method_of(order.method, order.keep, order.mass, order.tokens, order.period)
            fitted = method.on(context.manifest)
            self._sessions[order.number] = self._runner.start(context, fitted, again=order.again)
        except SparseKVError as error:
            logger.warning("a session cannot begin here: %s", error)
            full = METHODS["full"].on(self._runner.no_context.manifest)
            self._sessions.setdefault(order.number, Session(self._runner.no_context, full))
            return ranks.encode(ranks.Refusal(error.reason, error.message))
        return b""

    def _at(self, places: ranks.Places) -> list[Session]:
        """Sessions, at the positions where the first rank has them."""
        found = []
        for number, position in places:
            session = self._sessions[number]
            if session.position < position:
                raise InternalError(f"session {number} is at {session.position}, and should be at {position}")
            if session.position > position:
                session.rewind(session.position - position)
            found.append(session)
        return found

    def _forward(self, order: ranks.Pass) -> None:
        def between() -> None:
            while self._next():
                pass

        self._runner.forward(
            self._at(order.places),
            order.token_ids,
            all_logits=order.all_logits,
            between=between if order.between else lambda: None,
            **order.manner,
        )


def _sampler(repeatable: bool) -> Sampler:
    """What chooses as others do, so that a step has as many rows here; its tokens are nobody's."""
    return Sampler(
        SamplingParameters(temperature=1.0, seed=0) if repeatable else SamplingParameters(temperature=0.0)
    )


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
        ranks=ranks.Alone(part),
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
    Follower(ranks.Line(socket.socket(fileno=told.fd)), runner, config.open_store(), arena).run()


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
