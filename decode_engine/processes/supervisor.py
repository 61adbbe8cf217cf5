"""The process that the user starts: it starts the engine's and the doors', and starts those again that end.

It talks to no client, and loads no model. Ports are kept by it, so that doors share them and nobody else takes them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from decode_engine.errors import AddressError, InternalError, error_by_reason
from decode_engine.processes import attached
from decode_engine.rpc.transport.starting import Stopping
from index_store.errors import SparseKVError

logger = logging.getLogger(__name__)

ENGINE = (sys.executable, "-c", "from decode_engine.processes.engine_process import main; main()")
DOOR = (sys.executable, "-c", "from decode_engine.processes.door_process import main; main()")
_LEAST_S, _MOST_S = 1.0, 60.0
"""Between the end of a process that did not come to serve and the start of the next."""
_LAST_S = 3.5
"""After the grace, for requests to be told why they end, and for processes to end."""

_UNSTARTED = 126  # as shells have it
_LOOK_S = 0.1  # whether it is to stop, or somebody has shortened the time of running requests

_decode = msgspec.json.Decoder(attached.Word).decode


@contextmanager
def kept_port(listen: str, flag: str) -> Iterator[str]:
    """The address, with the port that was found where 0 was asked for; nobody but doors may listen there meanwhile.

    Raises AddressError.
    """
    host, _, port = listen.rpartition(":")
    try:
        (family, kind, protocol, _, place), *_ = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind, protocol) as alone:  # fails where somebody listens who would share
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(place)
            place = alone.getsockname()
        kept = socket.socket(family, kind, protocol)
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind(place)  # and never listens
    except OSError as error:
        raise AddressError.of(listen, flag) from error
    with kept:
        yield f"{host}:{place[1]}"


class Child:
    """A process that is kept running until `stop`. To be used on the event loop of the main thread.

    serving: since its last start. fingerprint: of the model that it said it serves.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        setup: attached.Setup,
        on_word: Callable[[Child, attached.Word], None],
        on_end: Callable[[Child, int], None],
    ) -> None:
        """on_end: told the code by which a process ended that was not told to."""
        self.name = name
        self.serving = False
        self.fingerprint = ""
        self._command = command
        self._setup = attached.setup_line(setup)
        self._on_word = on_word
        self._on_end = on_end
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._pause_s = 0.0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Runs processes, one after the other, until told to stop and the last one has ended."""
        while not self._stopping.is_set():
            try:
                served, code = await self._run()
            except OSError as error:  # no handle or no memory is left for a process
                logger.warning("%s could not be started: %s", self.name, error)
                served, code = False, _UNSTARTED
            if not self._stopping.is_set():
                self._on_end(self, code)
            if self._stopping.is_set():
                return
            # One that served is started again at once: its clients are there.
            self._pause_s = 0.0 if served else min(max(2 * self._pause_s, _LEAST_S), _MOST_S)
            pause = f" in {self._pause_s:g} s" if self._pause_s else ""
            logger.warning("%s has ended; starting it again%s", self.name, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._pause_s)

    def stop(self, grace_s: float) -> None:
        self._stopping.set()
        process = self._process
        if process is not None and process.stdin is not None:
            with suppress(OSError, RuntimeError):  # it has ended
                process.stdin.write(msgspec.json.encode(attached.Stop(grace_s)) + b"\n")

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def _run(self) -> tuple[bool, int]:
        """One process, from start to end. Whether it came to serve, and its code."""
        # In a session of its own, so that a Ctrl-C ends this process, which then ends it.
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(self._setup)
        if self._stopping.is_set():
            self.stop(0.0)
        served = False
        try:
            while line := await process.stdout.readline():
                word = _decode(line)
                if isinstance(word, attached.Serving):
                    served = self.serving = True
                    self.fingerprint = word.fingerprint
                self._on_word(self, word)
            code = await process.wait()
        finally:
            self.serving, self._process = False, None
        return served, code


async def _begun(stopping: Stopping) -> None:
    """Until told to stop. No thread waits for that, which could die."""
    while not stopping.is_set():
        await asyncio.sleep(_LOOK_S)


def _watch_by_descriptors() -> None:
    """Has the loop learn of processes' ends from the kernel, as from Python 3.12 on, not from a thread for each:
    where such a thread had died, nothing was started again."""
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        watcher = asyncio.PidfdChildWatcher()
        watcher.attach_loop(asyncio.get_running_loop())
        asyncio.get_event_loop_policy().set_child_watcher(watcher)


class Supervisor:
    """Runs an engine and doors until it is told to stop."""

    def __init__(
        self,
        setup: attached.Setup,
        on_phase: Callable[[str], None],
        on_serving: Callable[[str], None],
        engine: Sequence[str] = ENGINE,
        door: Sequence[str] = DOOR,
    ) -> None:
        """on_phase: told what the engine does while it first starts. on_serving: told once that requests are taken, and
        the fingerprint of the model."""
        self._on_phase = on_phase
        self._on_serving = on_serving
        self._served = False
        self._failed: SparseKVError | None = None
        self._changed = asyncio.Event()
        self._stopping = Stopping()
        self.engine = Child("the engine", engine, setup, self._hear, self._note_end)
        self.doors = [
            Child(f"door {number + 1}", door, setup, self._hear, self._note_end)
            for number in range(setup.config.doors)
        ]

    async def run(self, stopping: Stopping) -> None:
        """Returns when all processes have ended. Raises the error for which they cannot start."""
        self._stopping = stopping
        _watch_by_descriptors()
        engine = asyncio.ensure_future(self.engine.keep())
        doors = [asyncio.ensure_future(each.keep()) for each in self.doors]
        ends = [asyncio.ensure_future(each) for each in (_begun(stopping), self._changed.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end(engine, doors, stopping if self._served and stopping.is_set() else None)
            for each in ends:
                each.cancel()
        if self._failed is not None:
            raise self._failed

    async def _end(
        self, engine: asyncio.Future[None], doors: Sequence[asyncio.Future[None]], stopping: Stopping | None
    ) -> None:
        """Doors first, which may finish what runs; then the engine, which tells the rest why it ends. stopping: None
        where nothing can run."""
        grace_s = 0.0 if stopping is None else stopping.left_s
        logger.info("shutting down, waiting up to %.3g s for running requests", grace_s)
        for each in self.doors:
            each.stop(grace_s)
        running = set(doors)
        while running and stopping is not None and stopping.left_s:
            _, running = await asyncio.wait(running, timeout=min(stopping.left_s, _LOOK_S))
        self.engine.stop(0.0)
        _, late = await asyncio.wait([engine, *doors], timeout=_LAST_S)
        if late:
            for child in (self.engine, *self.doors):
                if child.pid is not None:
                    logger.warning("%s does not end in order: it is ended", child.name)
                    child.kill()
            await asyncio.wait(late)

    def _hear(self, child: Child, word: attached.Word) -> None:
        match word:
            case attached.Phase(text):
                if not self._served:
                    self._on_phase(text)
                else:
                    logger.debug("%s: %s", child.name, text)
            case attached.Serving():
                if self._served:
                    logger.info("%s serves again", child.name)
                elif all(each.serving for each in (self.engine, *self.doors)):
                    self._served = True
                    self._on_serving(self.engine.fingerprint)
            case attached.Silent(pid):
                for door in (each for each in self.doors if each.pid == pid):
                    logger.warning("nothing is heard of %s: it is started again", door.name)
                    door.kill()
            case attached.Drains(grace_s):
                self._stopping.begin(grace_s)
            case attached.Failed(reason, message):
                if self._served:
                    logger.error("%s cannot start: %s", child.name, message, extra={"reason": reason})
                else:
                    self._fail(error_by_reason(reason, message, {}))

    def _note_end(self, child: Child, code: int) -> None:
        """Before anything is served a process that ends says that it never will be; afterwards it may come again."""
        if not self._served:
            self._fail(
                InternalError(f"{child.name} ended with {code} while it started; the log has the reason")
            )

    def _fail(self, error: SparseKVError) -> None:
        self._failed = self._failed or error
        self._changed.set()
        for each in (self.engine, *self.doors):
            each.stop(0.0)


@contextmanager
def kept_addresses(setup: attached.Setup) -> Iterator[attached.Setup]:
    """The same with ports that are kept, and a folder for the link that nobody else may enter."""
    config = setup.config
    host = config.listen.rpartition(":")[0]
    with TemporaryDirectory(prefix="sparsekv-") as folder, kept_port(config.listen, "--listen") as address:
        kept = replace(config, listen=address)
        link = Path(folder, "link")
        if config.http_port is None:
            yield msgspec.structs.replace(setup, config=kept, link=link)
            return
        with kept_port(f"{host}:{config.http_port}", "--http-port") as url:
            kept = replace(kept, http_port=int(url.rpartition(":")[2]))
            yield msgspec.structs.replace(setup, config=kept, link=link)
