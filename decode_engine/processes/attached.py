"""What a process of a server says to the one that started it, and hears from it: lines of JSON.

The first line on standard input says what to do, `Stop` to end; its end is the end of the parent, and of this process,
too. Standard output has what the process says. Whatever else is printed there goes to standard error.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

import msgspec
from msgspec import Struct

from decode_engine.rpc.transport.starting import Stopping
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel, logging_to_stderr
from index_store.errors import SparseKVError

IN_ORDER_S = 4.0
"""What stopping takes beside the grace, at most: after that the process is ended where it is."""


@contextmanager
def stop_signals(grace_s: float) -> Iterator[Stopping]:
    """What the first SIGINT, SIGTERM or SIGHUP begins; a second one ends the process at once.

    grace_s: of running requests, after a signal. If the process lives IN_ORDER_S after its time, the interpreter's
    watchdog, which needs no thread and no lock, says what its threads do and ends it with 1. What a signal does at once
    is to write its number into a pipe that a thread of its own reads: Python's handlers run on the main thread only,
    when that comes by. They begin the same once more, since that thread may die of what wakes it, such as no memory.
    """
    stopping = Stopping(_watch_end)
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    thread = threading.Thread(
        target=_watch, args=(reading, frozenset(numbers), stopping, grace_s), name="signals", daemon=True
    )
    handled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal handled
        if handled:
            end_process(128 + number)
        handled = True
        # On a thread, since this one may hold the locks that are taken there.
        threading.Thread(target=stopping.begin, args=(grace_s,), name="signalled", daemon=True).start()

    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in numbers}
    thread.start()
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        writing.close()  # which ends the thread
        thread.join()
        reading.close()
        if stopping.is_set():
            faulthandler.cancel_dump_traceback_later()


def end_process(code: int) -> None:
    """Ends the process without waiting for threads, of which some may compile or read for minutes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may read there any more
            stream.flush()
    os._exit(code)


def _watch_end(left_s: float) -> None:
    faulthandler.dump_traceback_later(left_s + IN_ORDER_S, exit=True, file=sys.__stderr__ or 2)


def _watch(
    reading: socket.socket, numbers: frozenset[signal.Signals], stopping: Stopping, grace_s: float
) -> None:
    signalled = False
    while received := reading.recv(1):
        number = received[0]
        if number not in numbers:
            continue
        if signalled:
            end_process(128 + number)
        signalled = True
        stopping.begin(grace_s)


logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Setup(Struct, frozen=True):
    """What a process is to do. link: the socket between engine and doors. key: see `Sharing`."""

    config: ServeConfig
    key: bytes
    link: Path
    log_level: LogLevel
    log_json: bool


class Stop(Struct, frozen=True):
    """End in order. grace_s: of running requests."""

    grace_s: float


_read_stop = msgspec.json.Decoder(Stop).decode


class Phase(Struct, frozen=True, tag="phase"):
    """The process starts, and is doing this."""

    text: str


class Serving(Struct, frozen=True, tag="serving"):
    """The process serves from here on, the model of this fingerprint."""

    fingerprint: str


class Silent(Struct, frozen=True, tag="silent"):
    """Nothing is heard of the door that is this process."""

    pid: int


class Failed(Struct, frozen=True, tag="failed"):
    """The process cannot start."""

    reason: str
    message: str


class Drains(Struct, frozen=True, tag="drains"):
    """A client of the door has the server drain."""

    grace_s: float


Word = Phase | Serving | Silent | Failed | Drains


def setup_line(setup: Setup) -> bytes:
    """As `read_setup` reads it."""
    return msgspec.json.encode(setup, enc_hook=str) + b"\n"


def read_setup(line: bytes) -> Setup:
    """What `setup_line` wrote. Imports no torch."""
    return msgspec.json.decode(line, type=Setup, dec_hook=lambda kind, value: kind(value))


class Parent:
    """The process that started this one. To be made once, before anything is printed.

    setup: what to do.
    """

    def __init__(self) -> None:
        self._words = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        if sys.platform == "linux":  # where this process hangs, the end of its input is not enough
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._input = os.fdopen(os.dup(0), "rb", buffering=0)
        self.setup = read_setup(self._input.readline())
        self._lock = threading.Lock()
        self._serves = False
        self._ends: SimpleQueue[float | None] = SimpleQueue()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()

    def say(self, word: Word) -> None:
        line = msgspec.json.encode(word) + b"\n"
        with self._lock:
            self._serves = self._serves or isinstance(word, Serving)
            self._words.write(line)

    def fail(self, error: SparseKVError) -> None:
        self.say(Failed(error.reason, error.message))

    def end(self) -> None:
        """Something has happened that the process is to end for: `wait` returns None."""
        self._ends.put(None)

    def wait(self) -> float | None:
        """Waits until told to stop: the grace. None after `end`."""
        return self._ends.get()

    def _listen(self) -> None:
        while line := self._input.readline():
            if not self._serves:  # starting leaves nothing half done, and may take minutes
                os._exit(0)
            self._ends.put(_read_stop(line).grace_s)
        os._exit(1)


def run_attached(serve: Callable[[Parent], int]) -> None:
    """Serves in a process that another one started, and ends it, whatever its threads do. serve: gives the code."""
    parent = Parent()
    with logging_to_stderr(parent.setup.log_level, parent.setup.log_json):
        code = 1
        try:
            code = serve(parent)
        except SparseKVError as error:
            parent.fail(error)
        except Exception:
            logger.exception("the process failed")
        end_process(code)
