"""Reading: regular files only, a limit on every step, and nobody who waits longer than that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import SimpleNamespace

import pytest

from index_store.errors import StoreUnavailableError
from index_store.store.files import reading
from index_store.store.files.reading import Readers, WrongFileError, may_block, read_bounded, read_file
from tests.support.waiting import wait_until

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

    def check() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        readers.result(readers.submit(back.wait), check)
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
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "StoreUnavailableError: slow: the file system has not answered" in ended.stderr
