"""What a process of a server says to the one that started it, and hears from it: lines of JSON.

The first line on standard input says what to do, `Stop` to end; its end is the end of the parent, and of this process,
too. Standard output has what the process says. Whatever else is printed there goes to standard error.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import msgspec
from msgspec import Struct

from decode_engine.processes.stopping import end_process
from decode_engine.settings.config import ServeConfig
from index_store.cli.logs import LogLevel, logging_to_stderr
from index_store.errors import SparseKVError

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


Word = Phase | Serving | Silent | Failed


def setup_line(setup: Setup) -> bytes:
    """As `read_setup` reads it."""
    return msgspec.json.encode(setup, enc_hook=str) + b"\n"


def read_setup(line: bytes) -> Setup:
    """What `setup_line` wrote. Imports no torch."""
    return msgspec.json.decode(line, type=Setup, dec_hook=_decode_hook)


def _decode_hook(kind: type, value: str) -> object:
    return kind(value)


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
        """From any thread."""
        line = msgspec.json.encode(word) + b"\n"
        with self._lock:
            self._serves = self._serves or isinstance(word, Serving)
            self._words.write(line)

    def fail(self, error: SparseKVError) -> None:
        """Says that the process cannot start."""
        self.say(Failed(error.reason, error.message))

    def end(self) -> None:
        """Something has happened that the process is to end for: `wait` returns None."""
        self._ends.put(None)

    def wait(self) -> float | None:
        """Waits until told to stop: the grace. None after `end`."""
        return self._ends.get()

    def _listen(self) -> None:
        while line := self._input.readline():
            if (
                not self._serves
            ):  # starting changes nothing that would be left half done, and may take minutes
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
