"""What cannot be read now is not called damaged, and holds nobody up; what is no file is refused by name."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from index_store.errors import (
    ContextCorruptError,
    MemoryBudgetError,
    SparseKVError,
    StoreError,
    StoreUnavailableError,
)
from index_store.memory.arena import Arena
from index_store.store import zarr_io
from index_store.store.catalog import Store, TunedDefaultError
from index_store.store.files import reading
from index_store.store.listing import BrokenContext
from index_store.store.zarr_io import chunk_path
from tests.index_store.store.test_tuned_defaults import record
from tests.support.memory import resident_bytes
from tests.support.store import SyntheticContext, synthetic_context

SIZE = resident_bytes(synthetic_context().manifest)
SOON = 30.0  # seconds; less than reads hang that nobody lets go


def files(store: Store, context: SyntheticContext) -> dict[str, Path]:
    """One file of every kind that reading a context looks at."""
    folder = store.path / "contexts" / context.id
    store.set_default_method(context.id, record(context.id))
    return {
        "manifest": folder / "manifest.json",
        "group": folder / "zarr.json",
        "metadata": folder / "kv" / "zarr.json",
        "tokens": chunk_path(folder, context.manifest.tokens, (0,)),
        "kv": chunk_path(folder, context.manifest.kv, (1, 1)),
        "default": store.path / "defaults" / f"{context.id}.json",
    }


KINDS = ("manifest", "group", "metadata", "tokens", "kv", "default")


def failing_open(path: Path, code: int) -> Callable[..., int]:
    original = os.open

    def open_file(file: Any, *args: Any, **kwargs: Any) -> int:
        if str(file) == str(path):
            raise OSError(code, os.strerror(code), str(file))
        return original(file, *args, **kwargs)

    return open_file


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_cannot_be_opened_now_is_not_damaged(
    stored: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch, kind: str, code: int
) -> None:
    path = files(stored, context)[kind]
    with monkeypatch.context() as patch:
        patch.setattr(reading.os, "open", failing_open(path, code))
        fresh = Store(stored.path)
        (problem,) = fresh.verify(context.id)
        assert isinstance(problem, StoreUnavailableError)
        assert not isinstance(problem, ContextCorruptError)
        assert str(path) in problem.message
        assert os.strerror(code) in problem.message
        assert "delete" not in problem.message
        use = (
            (lambda: fresh.default_method(context.id)) if kind == "default" else lambda: load(fresh, context)
        )
        with pytest.raises(StoreUnavailableError):
            use()
        (entry,) = fresh.entries()
        if kind == "manifest":
            assert isinstance(entry, BrokenContext)
            assert isinstance(entry.error, StoreUnavailableError)
            with pytest.raises(StoreUnavailableError):
                fresh.manifest(context.id)
    assert fresh.verify(context.id) == []
    assert fresh.entries() == [context.manifest]
    load(fresh, context)


def load(store: Store, context: SyntheticContext) -> None:
    with Arena(SIZE).acquire(store, context.id):
        pass


def test_a_folder_that_cannot_be_listed_now(
    stored: Store, context: SyntheticContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scandir(path: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        with pytest.raises(
            StoreUnavailableError, match=r"contexts: cannot be read now \(Too many open files\)"
        ):
            stored.entries()
    assert stored.entries() == [context.manifest]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_instead_of_a_file_is_refused_by_name(
    stored: Store, context: SyntheticContext, kind: str
) -> None:
    path = files(stored, context)[kind]
    path.unlink()
    os.mkfifo(path)
    before = time.monotonic()
    fresh = Store(stored.path)
    (problem,) = fresh.verify(context.id)
    assert isinstance(problem, ContextCorruptError)
    assert str(path) in problem.message
    uses: list[Callable[[], object]] = [lambda: fresh.open(context.id)]
    if kind == "default":
        uses = [lambda: fresh.default_method(context.id)]
    elif kind == "kv":
        uses.append(lambda: fresh.open(context.id).array("kv", 1, 1))
    for use in uses:
        with pytest.raises(TunedDefaultError if kind == "default" else ContextCorruptError):
            use()
    assert time.monotonic() - before < SOON


class HangingReads:
    """Reads of pieces of chunks that wait until they are let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def readv(self, descriptor: int, buffers: Any) -> int:
        self.begun.set()
        assert self.go_on.wait(60)
        return _readv(descriptor, buffers)


_readv = os.readv


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingReads]:
    reads = HangingReads()
    monkeypatch.setattr(zarr_io.os, "readv", reads.readv)
    yield reads
    reads.go_on.set()


def test_reads_that_hang_are_given_up(
    stored: Store, context: SyntheticContext, hanging: HangingReads
) -> None:
    store = Store(stored.path, read_limit_s=0.1)
    before = time.monotonic()
    for use in (
        lambda: store.verify(context.id),
        lambda: store.open(context.id).tokens(),
        lambda: store.open(context.id).queries(0),
    ):
        with pytest.raises(StoreUnavailableError, match=r"has not answered for 0\.1 s"):
            use()
    assert time.monotonic() - before < SOON
    hanging.go_on.set()
    store._limit_s = reading.READ_LIMIT_S  # which no read exceeds, however busy the machine is
    assert store.verify(context.id) == []


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tokens_are_read(hanging: HangingReads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tokens' file through, which is read before anything hangs."""

    def readv(descriptor: int, buffers: Any) -> int:
        if "/tokens/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            return _readv(descriptor, buffers)
        return hanging.readv(descriptor, buffers)

    monkeypatch.setattr(zarr_io.os, "readv", readv)


def test_a_load_that_hangs_keeps_its_memory_only_until_the_read_comes_back(
    stored: Store, context: SyntheticContext, hanging: HangingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_are_read(hanging, monkeypatch)
    store, arena = Store(stored.path, read_limit_s=1.0), Arena(SIZE)
    with (
        pytest.raises(StoreUnavailableError, match=r"kv.*has not answered"),
        arena.acquire(store, context.id, early=True) as resident,
    ):
        resident.kv(0)
    store._limit_s = reading.READ_LIMIT_S
    stats = arena.stats()
    assert (stats.leases, stats.contexts) == (0, 0)
    assert stats.used.total == stats.leased.total == SIZE  # it is being written to
    with pytest.raises(MemoryBudgetError, match="in use"), arena.acquire(store, context.id):
        pytest.fail("two loads into the memory of one")
    hanging.go_on.set()
    eventually(lambda: arena.stats().used.total == 0)
    with arena.acquire(store, context.id):
        assert arena.ids() == [context.id]


def test_the_last_lease_of_an_unfinished_load_does_not_wait_for_it(
    stored: Store, context: SyntheticContext, hanging: HangingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_are_read(hanging, monkeypatch)
    monkeypatch.setattr("index_store.memory.context_loading._LAST_READ_S", 4.0)
    arena = Arena(SIZE)
    lease = arena.acquire(stored, context.id, early=True)
    resident = lease.__enter__()
    assert hanging.begun.wait(SOON)
    before = time.monotonic()
    lease.__exit__(None, None, None)
    assert time.monotonic() - before < 4.0  # nor for those that wait for the load
    assert arena.stats().leases == 0
    assert arena.stats().used.total == SIZE
    with pytest.raises(SparseKVError):
        resident.kv(0)
    hanging.go_on.set()
    eventually(lambda: arena.stats().used.total == 0)


def test_a_shutdown_does_not_wait_for_reads_that_hang(
    stored: Store, context: SyntheticContext, hanging: HangingReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens_are_read(hanging, monkeypatch)
    arena, ended = Arena(SIZE), threading.Event()

    def wait() -> None:
        with (
            pytest.raises(StoreError, match="released while it was being loaded"),
            arena.acquire(stored, context.id),
        ):
            pytest.fail("leased what was not loaded")
        ended.set()

    threading.Thread(target=wait).start()
    assert hanging.begun.wait(SOON)
    arena.stop_loading()
    assert ended.wait(SOON)
    arena.clear()
