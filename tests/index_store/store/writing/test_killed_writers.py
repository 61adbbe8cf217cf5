"""Writers that are killed or that meet: nothing half-written is ever visible, and clean-up takes the rest."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from index_store.store.catalog import Store
from index_store.store.clean_up import clean_up
from tests.support.store import synthetic_context

ROOT = Path(__file__).resolve().parents[4]


class Processes:
    """Children of tests.index_store.store.writing.writer_processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.index_store.store.writing.writer_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            bufsize=1,
        )
        self._said: deque[str] = deque()

    def start(self, store: Store, **request: object) -> int:
        """Starts one child; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"store": str(store.path), **request}) + "\n")
        while not (line := self._read()).startswith("started "):  # other children are at it, too
            assert line
            self._said.append(line)
        return int(line.split()[1])

    def line(self) -> str:
        """The next line that the children or their parent say, but for what `start` returns."""
        return self._said.popleft() if self._said else self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def wait(self, pid: int) -> int:
        """Waits for the end of the only child; returns its status (negative: the signal that killed it)."""
        ended = self.line().split()
        assert ended[:2] == ["ended", str(pid)], ended
        return os.waitstatus_to_exitcode(int(ended[2]))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(120)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    started = Processes()
    yield started
    started.close()


def names(store: Store) -> list[str]:
    return sorted(os.listdir(store.path / "contexts"))


def test_writer_killed_at_any_step(store: Store, processes: Processes) -> None:
    context = synthetic_context(tokens=50, seed=1)
    kept = synthetic_context(seed=2)
    kept.write(store)
    steps = 0
    while True:
        status = processes.wait(processes.start(store, seed=1, tokens=50, die_at=steps))
        if status == 0:
            break
        assert status == -9
        visible = {manifest.id for manifest in store.list()}
        if context.id in visible:
            # Killed after the rename, before it was made durable: complete, or not there at all.
            assert store.verify(context.id) == []
            store.delete(context.id)
        else:
            assert visible == {kept.id}
            (left,) = (name for name in names(store) if name.startswith("."))
            assert left.startswith(f".tmp-{context.id}-")
            assert [item.kind for item in clean_up(store)] == ["temporary"]
        assert names(store) == [kept.id]
        steps += 1
    # 7 arrays, 1 + 6 + 6 + 4 * 4 chunks, the sync, and the rename's sync
    assert steps == 7 + 29 + 2
    assert store.verify(context.id) == []


@pytest.mark.nightly
def test_writer_killed_at_random_moments(store: Store, processes: Processes) -> None:
    chooser = random.Random(0)
    expected = set()
    for seed in (100, 101):  # the first one waits for the interpreter's start
        began = time.monotonic()
        assert processes.wait(processes.start(store, seed=seed)) == 0
        duration = time.monotonic() - began
        expected.add(synthetic_context(tokens=400, seed=seed).id)
    killed = 0
    for seed in range(1, 91):
        pid = processes.start(store, seed=seed)
        time.sleep(chooser.uniform(0, duration))
        with suppress(ProcessLookupError):
            os.kill(pid, 9)
        if processes.wait(pid) == -9:
            killed += 1
        else:  # it was done before the blow: the machine has less to do than when the duration was taken
            duration *= 0.8
        visible = {manifest.id for manifest in store.list()}
        assert expected <= visible <= expected | {synthetic_context(tokens=400, seed=seed).id}
        expected = visible
        if killed == 8:
            break
    assert killed == 8
    for id_ in expected:
        assert store.verify(id_) == []
    clean_up(store)
    assert set(names(store)) == expected


def test_a_new_writer_clears_what_a_killed_one_left(store: Store, processes: Processes) -> None:
    assert processes.wait(processes.start(store, seed=1, die_at=9)) == -9
    assert len(names(store)) == 1
    context = synthetic_context()
    context.write(store)
    assert names(store) == [context.id]


def test_two_jobs_on_the_same_content(store: Store, processes: Processes, tmp_path: Path) -> None:
    go_on = tmp_path / "go on"
    processes.start(store, seed=3, lock=True, until=str(go_on))
    assert processes.line() == "holds"
    processes.start(store, seed=3, lock=True)
    assert processes.line() == "waits"
    go_on.touch()
    said = [processes.line() for _ in range(4)]
    assert [line for line in said if not line.startswith("ended")] == ["wrote", "found"]
    assert [line.split()[2] for line in said if line.startswith("ended")] == ["0", "0"]
    assert names(store) == [synthetic_context(tokens=400, seed=3).id]
    assert os.listdir(store.path / "locks") == []


def test_a_killed_holder_gives_up_its_lock(store: Store, processes: Processes) -> None:
    pid = processes.start(store, seed=3, lock=True, until="/never")
    context = synthetic_context(tokens=400, seed=3)
    assert processes.line() == "holds"
    waits = threading.Event()
    threading.Thread(target=lambda: (waits.wait(60), os.kill(pid, 9))).start()
    with store.lock(context.id, waits.set):
        assert waits.is_set()
    assert processes.wait(pid) == -9


def test_unlocked_writers_of_the_same_content(store: Store, processes: Processes) -> None:
    for _ in range(4):
        processes.start(store, seed=4)
    assert [processes.line().split()[2] for _ in range(4)] == ["0"] * 4
    context = synthetic_context(tokens=400, seed=4)
    assert names(store) == [context.id]
    assert store.verify(context.id) == []


def test_lock_between_threads(store: Store) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with store.lock("0" * 64):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(most) == 120


def test_clean_up_never_takes_a_living_writer(store: Store) -> None:
    contexts = [synthetic_context(tokens=20, seed=seed, index_dtypes=("int8",)) for seed in range(12)]
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            # It may take a folder that is empty and not locked yet: the writer then makes another.
            assert sum(item.nbytes for item in clean_up(store)) == 0

    with ThreadPoolExecutor(5) as pool:
        cleaners = [pool.submit(clean) for _ in range(2)]
        try:
            for written in [pool.submit(context.write, store) for context in contexts]:
                written.result()
        finally:
            done.set()
        for cleaner in cleaners:
            cleaner.result()
    assert names(store) == sorted(context.id for context in contexts)
