"""Processes that write contexts, to be killed or to race with each other.

Run as `python -m tests.index_store.store.writing.writer_processes`. Reads one JSON request per line, forks a child
for it and answers `started PID`, then `ended PID STATUS` when the child is gone. Forking keeps a child's start cheap.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import index_store.store.files.additions
import index_store.store.files.replacing
import index_store.store.writer
from index_store.family.children import publish_child
from index_store.store.catalog import Store
from index_store.store.writer import ContextWriter
from tests.support.store import add_index, continuation, make_whole, synthetic_context


def main() -> None:
    """Serves requests until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(serve(Store(request["store"]), request))
        say(f"started {pid}")
        threading.Thread(target=lambda pid=pid: say(f"ended {pid} {os.waitpid(pid, 0)[1]}")).start()


def serve(store: Store, request: dict[str, Any]) -> int:
    """Writes the context of the request's seed, as a prefill job does, or adds an index to one that is there."""
    if "add_to" in request:
        die_at_step_of_adding(request["die_at"])
        add_index(store, store.manifest(request["add_to"]), name="more")
        return 0
    if "make_whole" in request:
        die_at_step_of_adding(request["die_at"])
        make_whole(store, store.manifest(request["make_whole"]))
        return 0
    if "continues" in request:
        die_at_step(request["die_at"])
        publish_child(store, continuation(store, request["continues"]))
        return 0
    context = synthetic_context(tokens=request.get("tokens", 400), seed=request["seed"])
    if "die_at" in request:
        die_at_step(request["die_at"])
    if request.get("lock"):
        with store.lock(context.id, lambda: say("waits")):
            if any(manifest.id == context.id for manifest in store.list()):
                say("found")
                return 0
            say("holds")
            end = time.monotonic() + 120  # also where the test has failed
            while "until" in request and not os.path.exists(request["until"]) and time.monotonic() < end:
                time.sleep(0.01)
            context.write(store)
            say("wrote")
            return 0
    context.write(store)
    return 0


def die_at_step(step: int) -> None:
    """Makes this process kill itself at its n-th step of writing: a chunk, the sync, before or after the rename."""
    die_at_call(
        step,
        (ContextWriter, "write_chunk"),
        (ContextWriter, "create_array"),
        (index_store.store.writer, "sync_tree"),
        (index_store.store.files.replacing, "sync_path"),
    )


def die_at_step_of_adding(step: int) -> None:
    """The same of adding: a chunk, a sync, a rename, the removal of the temporary folder."""
    die_at_call(
        step,
        (ContextWriter, "write_chunk"),
        (index_store.store.writer, "sync_tree"),
        (os, "rename"),
        (index_store.store.files.additions, "sync_path"),
        (os, "replace"),
        (index_store.store.writer, "sync_path"),
        (index_store.store.writer, "remove_tree"),
    )


def die_at_call(step: int, *steps: tuple[Any, str]) -> None:
    """Makes this process kill itself before its n-th call of any of these functions."""
    remaining = [step]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining[0] -= 1
            return function(*args, **kwargs)

        return call

    for owner, name in steps:
        setattr(owner, name, counted(getattr(owner, name)))


def say(line: str) -> None:
    """One line, written at once: several processes share the pipe."""
    os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    main()
