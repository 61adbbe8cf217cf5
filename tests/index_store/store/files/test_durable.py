"""Files that are durable, their checksums, and locks that die with their process."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import google_crc32c
import numpy as np
import pytest

from index_store.errors import StoreError, StoreUnavailableError
from index_store.store import zarr_io
from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up, find_leftovers
from index_store.store.files import durable, reading
from index_store.store.files.durable import clear_free_lock, is_locked, locked_file, make_folder
from index_store.store.files.reading import Readers, WrongFileError, may_block, read_bounded, read_file
from tests.index_store.store.test_tuned_defaults import record
from tests.support.forking import ran
from tests.support.store import raising, synthetic_context
from tests.support.waiting import wait_until


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths in the order in which they were synced."""
    paths: list[str] = []
    original = os.fsync

    def fsync(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        original(descriptor)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    return paths


def test_the_first_publication_is_durable(tmp_path: Path, synced: list[str]) -> None:
    """Every folder that was made, in the folder that names it, before the context is named in its own."""
    path = tmp_path / "a" / "b" / "store"
    store = Store(path, create=True)
    assert synced[:4] == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b"), str(path)]
    id_ = synthetic_context().write(store)
    assert synced[-1] == str(path / "contexts")
    files = {name.split("/kv/", 1)[-1] for name in synced if f".tmp-{id_}" in name and "/kv/c/" in name}
    assert {"c/2/1/0/0/0", "c/2/1/0/0", "c/2/1/0", "c/2/1", "c/2"} <= files
    synced.clear()
    store.set_default_method(id_, record(id_))
    assert synced[0] == str(path)
    assert synced[-1] == str(path / "defaults")
    synced.clear()
    Store(path, create=True)
    assert synced == []


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(path: Path) -> dict[bool, set[int]]:
    """Permissions of everything at and below a path: of files (False) and of folders (True)."""
    found: dict[bool, set[int]] = {False: set(), True: set()}
    for item in (path, *path.rglob("*")):
        found[item.is_dir()].add(stat.S_IMODE(item.stat().st_mode))
    return found


@pytest.mark.usefixtures("umask")
def test_a_new_store_is_its_owners(tmp_path: Path) -> None:
    store = Store(tmp_path / "above" / "store", create=True)
    id_ = synthetic_context().write(store)
    store.set_default_method(id_, record(id_))
    with store.lock(id_):
        assert modes(store.path) == {False: {0o600}, True: {0o700}}
    assert stat.S_IMODE((tmp_path / "above").stat().st_mode) == 0o755


@pytest.mark.usefixtures("umask")
def test_what_the_owner_opened_stays_open(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", create=True)
    for name in ("contexts", "locks"):
        (store.path / name).chmod(0o750)
    id_ = synthetic_context().write(store)
    store.set_default_method(id_, record(id_))
    assert modes(store.path / "contexts") == {False: {0o640}, True: {0o750}}
    assert modes(store.path / "defaults") == {False: {0o640}, True: {0o750}}
    os.umask(0o077)
    other = synthetic_context(seed=1).write(store)
    assert modes(store.path / "contexts" / other) == {False: {0o600}, True: {0o700}}


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        make_folder(tmp_path / "file" / "inside")
    with pytest.raises(StoreError, match="creating the store failed"):
        Store(tmp_path / "file", create=True)


@pytest.mark.parametrize("size", [0, 1, 7, 63, 500, 4096, 100_001])
def test_checksums_equal_those_of_the_package(size: int) -> None:
    raw = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8)
    for start in (0, 3):
        part = raw[start : start + size]
        for before in (0, 12345, 2**32 - 1):
            assert zarr_io.extend_crc32c(before, part) == google_crc32c.extend(before, part.tobytes())


def test_the_library_is_called_directly_here() -> None:
    """Otherwise threads that write or load take turns: see which function google_crc32c's library has now."""
    assert zarr_io._extend is not google_crc32c.extend


def test_a_lock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    with locked_file(path) as held:
        assert held
        assert is_locked(path)
        assert not clear_free_lock(path)
        with locked_file(path, wait=False) as again:
            assert not again
    assert not path.exists()
    path.touch()
    assert not is_locked(path)
    assert clear_free_lock(path)
    assert not path.exists()


def test_who_waited_holds_the_file_that_is_there_then(tmp_path: Path) -> None:
    """And not the one that its holder has removed, which nobody else would find."""
    waits = Event()

    def hold_second() -> bool:
        with locked_file(tmp_path / "lock", waits.set), locked_file(tmp_path / "lock", wait=False) as third:
            return third

    with ThreadPoolExecutor(1) as pool:
        with locked_file(tmp_path / "lock"):
            second = pool.submit(hold_second)
            assert waits.wait(60)
        assert second.result(60) is False


def test_what_cannot_be_opened_counts_as_locked(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert is_locked(tmp_path / "loop")


def test_network_file_systems_get_locks_that_they_take(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS locks byte ranges: exclusively only files open for writing, shared ones only files open for reading."""
    asked: set[tuple[str, int]] = set()
    original = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        kind = operation & (fcntl.LOCK_EX | fcntl.LOCK_SH)
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        assert os.path.isfile(f"/proc/self/fd/{descriptor}")
        assert (access == os.O_RDWR) if kind == fcntl.LOCK_EX else (access in (os.O_RDONLY, os.O_RDWR))
        asked.add((os.readlink(f"/proc/self/fd/{descriptor}"), kind))
        original(descriptor, operation)

    monkeypatch.setattr(durable.fcntl, "flock", flock)
    (store.path / "contexts" / f".tmp-{'0' * 64}-01").mkdir()
    (store.path / "locks" / ("1" * 64)).touch()
    context = synthetic_context()
    with store.lock(context.id):
        context.write(store)
        find_leftovers(store)
    # The temporary folder went when the next job came.
    assert [item.kind for item in clean_up(store)] == ["lock"]
    assert any(f".tmp-{context.id}" in path for path, _ in asked)
    assert os.listdir(store.path / "locks") == []


SOON = 60.0


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 3_000_000)
    data, status = read_file(path, 3_000_000)
    assert data == path.read_bytes()
    assert status.st_size == 3_000_000
    with pytest.raises(WrongFileError, match="more than 2999999 bytes"):
        read_file(path, 2_999_999)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        for name, said in (
            ("pipe", "a named pipe"),
            ("link", "a named pipe"),
            ("folder", "a folder"),
            ("socket", "a socket"),
        ):
            with pytest.raises(WrongFileError, match=f"{said} instead of a file"):
                read_file(tmp_path / name, 10)
    with pytest.raises(WrongFileError, match="a device"):
        read_file(Path("/dev/zero"), 10)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nothing", 10)


def test_results_and_errors_pass_through() -> None:
    assert read_bounded(lambda: 7) == 7
    assert read_bounded(lambda: read_bounded(threading.current_thread).name) == "read"
    for error in (KeyError("x"), TimeoutError("its own"), FutureTimeoutError("its own"), SystemExit(3)):
        with pytest.raises(type(error)):
            read_bounded(lambda error=error: (_ for _ in ()).throw(error))  # type: ignore[misc]


def test_a_step_that_hangs_is_given_up_and_comes_back(tmp_path: Path) -> None:
    back, ended = threading.Event(), threading.Event()

    def hang() -> None:
        try:
            with may_block(tmp_path / "slow"):
                back.wait(SOON)
            with may_block(tmp_path / "next"):
                pytest.fail("went on although nobody waits")
        finally:
            ended.set()

    with pytest.raises(StoreUnavailableError, match=r"slow: .*not answered for 0.1 s") as caught:
        read_bounded(hang, limit_s=0.1)
    assert not ended.is_set()
    assert "delete" not in caught.value.message
    back.set()
    assert ended.wait(SOON)


def test_work_may_take_as_long_as_it_likes_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own: on a busy machine any step may take longer than a limit that a test can wait for."""
    now = 0.0
    monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: now))
    readers, looks = Readers(1, "test", 0.09), threading.Semaphore(0)

    def is_looked_at() -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(2):  # the first may be of before
            assert looks.acquire(timeout=SOON)

    def slow() -> str:
        nonlocal now
        for _ in range(5):
            with may_block(tmp_path):
                now += 0.08
                is_looked_at()
            now += 0.1
            is_looked_at()
        return "done"

    assert readers.result(readers.submit(slow), looks.release) == "done"
    readers.stop()
    assert readers.join(SOON)


def test_threads_that_hang_are_not_added_to_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_LOST", 2)
    monkeypatch.setattr(reading, "_lost", [])
    monkeypatch.setattr(reading, "_MOST_IDLE", 0)
    monkeypatch.setattr(reading, "_idle", [])
    back = threading.Event()

    def hang() -> None:
        with may_block(tmp_path / "slow"):
            back.wait(SOON)

    others = set(threading.enumerate())

    def hanging() -> int:
        return sum(thread.name == "read" for thread in set(threading.enumerate()) - others)

    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="has not answered"):
            read_bounded(hang, limit_s=0.02)
    for _ in range(5):
        with pytest.raises(StoreUnavailableError, match="2 reads wait for it"):
            read_bounded(hang, limit_s=0.02)
    assert hanging() == 2
    back.set()
    wait_until(lambda: not hanging())
    assert read_bounded(lambda: 1) == 1


def test_several_threads_and_a_stop() -> None:
    readers = Readers(3, "test")
    begun, go_on = threading.Semaphore(0), threading.Event()

    def work(number: int) -> int:
        begun.release()
        assert go_on.wait(SOON)
        return number

    futures = [readers.submit(lambda number=number: work(number)) for number in range(8)]
    for _ in range(3):
        assert begun.acquire(timeout=SOON)
    assert not begun.acquire(blocking=False)
    readers.stop()
    assert not readers.join(0.0)
    go_on.set()
    assert readers.join(SOON)
    assert [future.cancelled() for future in futures] == [False] * 3 + [True] * 5
    assert [future.result() for future in futures[:3]] == [0, 1, 2]


def test_a_check_ends_the_wait() -> None:
    readers, back = Readers(1, "test"), threading.Event()

    with pytest.raises(KeyError):
        readers.result(readers.submit(back.wait), raising(KeyError))
    back.set()
    readers.stop()
    assert readers.join(SOON)


def test_a_process_ends_although_a_read_hangs() -> None:
    program = (
        "import threading\n"
        "from pathlib import Path\n"
        "from index_store.store.files.reading import may_block, read_bounded\n"
        "def hang():\n"
        "    with may_block(Path('slow')):\n"
        "        threading.Event().wait()\n"
        "read_bounded(hang, limit_s=0.05)\n"
    )
    ended = ran([sys.executable, "-c", program], timeout=120)
    assert ended.returncode == 1
    assert "StoreUnavailableError: slow: the file system has not answered" in ended.stderr


def test_a_thread_reads_for_one_after_the_other_and_after_errors(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        read_bounded(raising(KeyError("once")))
    before = {thread.ident for thread in threading.enumerate() if thread.name == "read"}
    names = {read_bounded(threading.get_ident) for _ in range(20)}
    assert names <= before
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: read_bounded(lambda: number), range(64))) == [*range(64)]
