"""Faults inside of a process, told to it from outside; the program in it knows nothing of them.

Python imports a file of this name by itself wherever its folder is in PYTHONPATH. With SPARSEKV_FAULTS, a folder, the
process listens there at a socket that is named by its id. A fault that it is told of stands for so many calls:
functions at the border to the system then fail, take long, or give other bytes, and a line in the file `struck` says
so. Until then nothing is replaced.

Kinds: `full` (no space is left), `failing` and `slow` (reads of files), `flipped` (a bit of what was read), `torn`
(half of a file is written when the process dies), `memory` (a device refuses it), `thread` (one of the process's
threads gets an error that nobody expects), and `objects-...` of an object store: `failing`, `slow`, `throttled`,
`unanswered` (done, but nobody hears of it), `flipped`, `cut`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MARK = "injected fault"
"""In the message of every error that is made here."""
_SLOW_S = 0.3
_LARGE = 1 << 14


class InjectedError(MemoryError):
    """What a thread gets that is to die."""

    def __str__(self) -> str:
        return MARK


class Adapter:
    """Faults of this process."""

    def __init__(self, folder: str) -> None:
        self._struck = os.path.join(folder, "struck")
        self._lock = threading.Lock()
        self._originals: list[tuple[Any, str, Any]] = []
        self._told: dict[str, Any] = {}
        self._draws = random.Random()
        self._open, self._readlink = os.open, os.readlink
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(os.path.join(folder, str(os.getpid())))
        threading.Thread(target=self._listen, name="faults", daemon=True).start()

    def _listen(self) -> None:
        while True:
            told = json.loads(self._socket.recv(1 << 16))
            with self._lock:
                for owner, name, original in reversed(self._originals):
                    setattr(owner, name, original)
                self._originals.clear()
                self._told, self._draws = told, random.Random(told.get("seed"))
            if told["kind"] == "thread":
                self._end_thread()
            elif told["kind"].startswith("objects-"):
                self._replace_objects(told["kind"].removeprefix("objects-"))
            elif told["kind"] == "memory":
                self._replace_memory()
            elif told["kind"] != "none":
                self._replace_system(told["kind"])

    def _strikes(self, where: str) -> bool:
        """Whether this call is one that fails, which is noted."""
        with self._lock:
            if self._told.get("times", 0) < 1:
                return False
            self._told["times"] -= 1
            line = f"{self._told['number']} {self._told['kind']} {os.getpid()} {where}\n"
        handle = self._open(self._struck, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(line)
        return True

    def _ours(self, file: object) -> str:
        """The path of a file, or of an open one, below a folder that may fail; "" of all others."""
        try:
            path = self._readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fsdecode(file)  # type: ignore[arg-type]
        except (OSError, TypeError):
            return ""
        return path if any(path.startswith(below) for below in self._told.get("below", ())) else ""

    def _replace(
        self, owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        setattr(owner, name, made(original))

    def _replace_system(self, kind: str) -> None:
        if kind == "full":
            for name in ("open", "fsync", "mkdir"):
                self._replace(os, name, self._full)
        elif kind == "torn":
            self._replace(os, "fsync", self._torn)
        else:
            names = ("read", "readv", "pread") if kind == "flipped" else ("open", "read", "readv", "pread")
            for name in names:
                self._replace(os, name, getattr(self, f"_{kind}"))

    def _full(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *how: Any, **named: Any) -> Any:
            writes = original.__name__ != "open" or how[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and (path := self._ours(file)) and self._strikes(path):
                raise OSError(errno.ENOSPC, f"No space left on device, {MARK}", path)
            return original(file, *how, **named)

        return call

    def _torn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(handle: int) -> Any:
            status = os.fstat(handle)
            if stat.S_ISREG(status.st_mode) and (path := self._ours(handle)) and self._strikes(path):
                os.truncate(path, status.st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(handle)

        return call

    def _failing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *how: Any, **named: Any) -> Any:
            writes = original.__name__ == "open" and how[0] & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY)
            if not writes and (path := self._ours(file)) and self._strikes(path):
                raise OSError(errno.EIO, f"Input/output error, {MARK}", path)
            return original(file, *how, **named)

        return call

    def _slow(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *how: Any, **named: Any) -> Any:
            if (path := self._ours(file)) and self._strikes(path):
                time.sleep(_SLOW_S)
            return original(file, *how, **named)

        return call

    def _flipped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, *how: Any, **named: Any) -> Any:
            found = original(file, *how, **named)
            count = found if isinstance(found, int) else len(found)
            if count and (path := self._ours(file)) and self._strikes(path):
                if isinstance(found, int):
                    how[0][0][self._draws.randrange(count)] ^= 1 << self._draws.randrange(8)
                else:
                    found = self._flip(found)
            return found

        return call

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        changed[self._draws.randrange(len(data))] ^= 1 << self._draws.randrange(8)
        return bytes(changed)

    def _replace_memory(self) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "empty"):  # it is only being imported
            return

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*size: Any, **how: Any) -> Any:
                count = size[0] if size and isinstance(size[0], int) else 0
                if count >= _LARGE and self._strikes(f"{count} elements"):
                    raise torch.OutOfMemoryError(f"out of memory, {MARK}")
                return original(*size, **how)

            return call

        self._replace(torch, "empty", made)

    def _replace_objects(self, kind: str) -> None:
        obstore = sys.modules.get("obstore")
        if obstore is None:
            return
        from obstore.exceptions import GenericError

        def made(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(store: Any, key: Any, *how: Any, **named: Any) -> Any:
                reads = original.__name__ == "get_range"
                if (kind in ("flipped", "cut") and not reads) or not self._strikes(
                    f"{original.__name__} {key}"
                ):
                    return original(store, key, *how, **named)
                if kind == "slow":
                    time.sleep(4 * _SLOW_S)
                elif kind == "throttled":
                    raise GenericError(f"429 Too Many Requests, please reduce your rate, {MARK}")
                elif kind == "failing":
                    raise GenericError(f"503 Service Unavailable, {MARK}")
                found = original(store, key, *how, **named)
                if kind == "unanswered":
                    raise GenericError(f"the connection was lost before the answer came, {MARK}")
                if kind == "flipped":
                    return self._flip(bytes(found))
                return bytes(found)[: len(found) // 2] if kind == "cut" else found

            return call

        for name in ("list", "get", "head", "get_range", "put", "delete"):
            self._replace(obstore, name, made)

    def _end_thread(self) -> None:
        """One that the program has started: not the first one, and not the one of the faults."""
        threads = [
            each for each in threading.enumerate() if each is not threading.main_thread() and each.ident
        ]
        threads = sorted((each for each in threads if each.name != "faults"), key=lambda each: each.name)
        names = sorted({each.name.partition("-")[0] for each in threads})
        if names:
            name = self._draws.choice(names)
            chosen = self._draws.choice([each for each in threads if each.name.partition("-")[0] == name])
            if self._strikes(chosen.name):
                error = ctypes.py_object(InjectedError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(chosen.ident or 0), error)


if "SPARSEKV_FAULTS" in os.environ:
    adapter = Adapter(os.environ["SPARSEKV_FAULTS"])
