"""What processes do that write contexts, to be killed or to race with each other (`tests/support/forking.py`)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import index_store.store.files.leftovers
import index_store.store.writer
from index_store.family.children import publish_child
from index_store.store.catalog import Store
from index_store.store.writer import ContextWriter
from tests.support.store import add_index, continuation, make_whole, synthetic_context

WRITING = (
    (ContextWriter, "write_chunk"),
    (ContextWriter, "create_array"),
    (index_store.store.writer, "sync_tree"),
    (os, "rename"),
)
"""Steps of a writer: a chunk, the sync, the rename."""

ADDING = (
    (ContextWriter, "write_chunk"),
    (index_store.store.writer, "sync_tree"),
    (os, "rename"),
    (index_store.store.files.leftovers, "sync_path"),
    (os, "replace"),
    (index_store.store.writer, "remove_tree"),
)
"""The same of adding: a chunk, a sync, a rename, the removal of the temporary folder."""


def write(store: Path, seed: int, tokens: int = 400, die_at: int | None = None) -> None:
    """Writes the context of the seed, as a prefill job does."""
    die_at_call(die_at, *WRITING)
    synthetic_context(tokens=tokens, seed=seed).write(Store(store))


def write_unless_there(store: Path, seed: int, said: SimpleQueue[str], go_on: Event) -> None:
    """The same with the context's lock, once it may, and if nobody else has done so; says how it goes."""
    contexts, context = Store(store), synthetic_context(tokens=400, seed=seed)
    with contexts.lock(context.id, lambda: said.put("waits")):
        if any(manifest.id == context.id for manifest in contexts.list()):
            said.put("found")
            return
        said.put("holds")
        go_on.wait(120)
        context.write(contexts)
        said.put("wrote")


def add(store: Path, id_: str, die_at: int) -> None:
    """Adds an index to a context that is there."""
    die_at_call(die_at, *ADDING)
    add_index(Store(store), Store(store).manifest(id_), name="more")


def add_all(store: Path, id_: str, die_at: int) -> None:
    """Makes a child whole."""
    die_at_call(die_at, *ADDING)
    make_whole(Store(store), Store(store).manifest(id_))


def continue_it(store: Path, id_: str, die_at: int) -> None:
    """Publishes a child."""
    die_at_call(die_at, *WRITING)
    publish_child(Store(store), continuation(Store(store), id_))


def die_at_call(step: int | None, *steps: tuple[Any, str]) -> None:
    """Makes this process kill itself before its n-th call of any of these functions."""
    remaining = [step]

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if remaining[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if remaining[0] is not None:
                remaining[0] -= 1
            return function(*args, **kwargs)

        return call

    for owner, name in steps:
        setattr(owner, name, counted(getattr(owner, name)))
