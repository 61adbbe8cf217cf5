"""`serve` in a process of its own, streams over both of its doors, and how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decode_engine.errors import ShuttingDownError
from decode_engine.rpc.client import Client
from index_store.errors import SparseKVError
from tests.decode_engine.conftest import Library

GRACE_S = 0.5
IN_TIME_S = GRACE_S + 5.0
TOKENS = 3300  # of an answer, by a method whose steps take long


class Server:
    """A process that serves over both doors. options: of `serve`, the last of each counts."""

    def __init__(self, store: Path, model: Path | str, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "decode_engine", "serve", "--store", str(store)),
                *("--model", str(model), "--listen", "127.0.0.1:0", "--http-port", "0"),
                *("--doors", "0", "--grace", str(GRACE_S), "--threads", "1"),
                *("--method", "context", "--format", "json", *options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.logs: list[dict[str, Any]] = []
        self.other: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read_logs, daemon=True)
        self._reader.start()

    def _read_logs(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                if line.startswith("{"):
                    self.logs.append(json.loads(line))
                else:
                    self.other.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for_log(self, begin: str) -> str:
        """The first message that begins so."""

        def found() -> str | None:
            return next((each["message"] for each in self.logs if each["message"].startswith(begin)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() or not self._reader.is_alive(), 120)
            message = found()
        assert message is not None, (begin, self.logs, self.other)
        return message

    def wait_until_served(self) -> dict[str, str]:
        """What it prints then."""
        line = self.process.stdout.readline()
        assert line, (self.logs, self.other)
        return json.loads(line)

    def kill(self) -> None:
        """Ends it as no handler can notice; returns when all has ended that writes into its log."""
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.check_end()

    def check_end(self) -> None:
        """After a signal."""
        begin = time.monotonic()
        code = self.process.wait(IN_TIME_S)
        self._reader.join(10)
        early = not self.logs  # as any command that has not begun
        assert code in ((0, 128 + signal.SIGTERM) if early else (0,)), (self.logs[-5:], self.other)
        assert self.other == []
        assert time.monotonic() - begin < IN_TIME_S


@contextmanager
def serving(library: Library, *options: str) -> Iterator[Server]:
    server = Server(library.store, library.model, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


class Streams:
    """An answer over each door, which is far from its end."""

    def __init__(self, ready: dict[str, str], model: Path, context: str, prompt: str = "Who?") -> None:
        self.begun = {door: threading.Event() for door in ("grpc", "http")}
        self.ends: dict[str, object] = {}
        self._prompt = prompt
        work: dict[str, Callable[[], object]] = {
            "grpc": lambda: self._over_grpc(ready["address"], context),
            "http": lambda: self._over_http(ready["url"], model, context),
        }
        self._threads = [
            threading.Thread(target=self._note, args=(door, read), daemon=True) for door, read in work.items()
        ]
        for thread in self._threads:
            thread.start()

    def _note(self, door: str, read: Callable[[], object]) -> None:
        try:
            self.ends[door] = read()
        except Exception as error:
            self.ends[door] = error
        self.begun[door].set()

    def _over_grpc(self, address: str, context: str) -> object:
        with (
            Client(address) as client,
            client.generate(context, text=self._prompt, max_tokens=TOKENS, method="oracle") as generation,
        ):
            try:
                for _ in generation:
                    self.begun["grpc"].set()
            except SparseKVError as error:
                return error
        return None

    def _over_http(self, url: str, model: Path, context: str) -> object:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        body = {"model": model.name, "prompt": self._prompt, "max_tokens": TOKENS, "stream": True}
        body |= {"context": context, "method": "oracle"}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        events = []
        for line in response:
            self.begun["http"].set()
            if line.startswith(b"data: "):
                events.append(line.removeprefix(b"data: ").strip().decode())
        if response.status != 200:
            return response.status
        return events[-2:]

    def wait_until_begun(self) -> None:
        for door, begun in self.begun.items():
            assert begun.wait(120), door
            assert door not in self.ends, self.ends

    def check_told(self) -> None:
        for thread in self._threads:
            thread.join(30)
        assert isinstance(self.ends["grpc"], ShuttingDownError), self.ends
        last, done = self.ends["http"]  # type: ignore[misc]
        assert json.loads(last)["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
