"""The processes of the demonstration: none of them, and no folder, outlives it, whatever ends it.

Ends that Python sees (an error, Ctrl-C, a termination request, a closed terminal) run the clean-ups here. For a kill
that it does not see, the kernel ends the commands (Linux), and a small process removes the folder.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TextIO

SILENCE_SECONDS = 120.0
"""After which a server that starts and says nothing is given up; how long it takes in all is its machine's affair."""
_STARTING = "starting: "
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Waits until the pipe closes, which it does however the demonstration ends, then removes the folder. Repeatedly: the
# commands that still write into it are ending at the same time.
_REMOVE_AFTER_US = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(300):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


class DemoError(Exception):
    """The demonstration cannot go on; the message says why in one sentence."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that goes away with the block, and also when this process is killed inside it."""
    with tempfile.TemporaryDirectory(prefix="sparsekv-demo-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-I", "-S", "-c", _REMOVE_AFTER_US, folder]
        # Leaving the block closes the pipe and waits.
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
            yield Path(folder)


def run_command(folder: Path, module: str, *arguments: str) -> dict[str, Any]:
    """Runs one of the installed commands with its progress visible; returns the JSON object that it prints.

    folder: where its libraries put their temporary files.
    """
    command = [sys.executable, "-m", module, *arguments, "--format", "json"]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
        preexec_fn=_end_with_this_process(),
    )
    if done.returncode != 0:
        raise DemoError(
            f"{module} {arguments[0]} ended with exit code {done.returncode}; its message stands above"
        )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@contextmanager
def running_server(folder: Path, store: Path, model: str, told: Callable[[str], object]) -> Iterator[str]:
    """`decode-engine serve` on a free port, from ready to stopped; yields its address. Its log lies in `folder`.

    told: takes what the server says while it starts.
    """
    command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(store), "--model", model]
    command += ["--listen", "127.0.0.1:0", "--format", "json"]
    # In a process group of its own: Ctrl-C reaches this program alone, which then stops the server in order.
    server = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(folder)},
        preexec_fn=_end_with_this_process(),  # noqa: PLW1509 - only system calls, and no thread runs yet
    )
    try:
        yield _address(server, folder / "server.log", told)
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[str], log: Path, told: Callable[[str], object]) -> str:
    """Where the server listens, once it says so. Raises DemoError where it ends, or says nothing for a long time."""
    said: SimpleQueue[tuple[str, str]] = SimpleQueue()

    def read_results(stream: TextIO) -> None:
        said.put(("result", stream.readline()))

    def read_logs(stream: TextIO) -> None:
        with log.open("w") as file:
            for line in stream:
                file.write(line)
                file.flush()
                said.put(("log", _message(line)))

    for read, stream in ((read_results, server.stdout), (read_logs, server.stderr)):
        threading.Thread(target=read, args=(stream,), daemon=True).start()
    last = "no message"
    while True:
        try:
            what, line = said.get(timeout=SILENCE_SECONDS)
        except Empty:
            raise DemoError(
                f"the server did not start: it said nothing for {SILENCE_SECONDS:g} s after: {last}"
            ) from None
        if what == "log":
            last = line
            if line.startswith(_STARTING):
                told(line.removeprefix(_STARTING))
        elif line:
            return str(json.loads(line)["address"])
        else:
            server.wait()
            while not said.empty():
                last = said.get()[1]
            raise DemoError(f"the server did not start: {last}")


def _message(line: str) -> str:
    """What a log line says."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, KeyError, TypeError):  # of a library, or a traceback
        return line.strip()


def _end_with_this_process() -> Callable[[], None] | None:
    """What a child calls first so that the kernel terminates it when this process dies; None where there is no way."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return in_child
