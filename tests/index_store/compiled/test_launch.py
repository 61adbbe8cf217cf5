"""Compiled loops: which vectors they take, and how many threads a launch starts for them."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numba
import numpy as np
import pytest
from numba import get_num_threads, prange, set_num_threads
from numpy.typing import NDArray

from index_store.compiled import loop_cache
from index_store.compiled.beside import compile_beside
from index_store.compiled.launch import launch, njit, spread, thread_count
from index_store.compiled.loop_cache import LoopCache, compiled_from
from index_store.compiled.places import distrust, make, remove_unused
from tests.support.store import raising

SCRIPT = """
import json
import index_store.compiled.launch
import numba
import numpy as np
from numba.core import codegen

@numba.njit
def add(a, b):
    for i in range(len(a)):
        a[i] += b[i]

add(np.zeros(64, np.uint16), np.ones(64, np.uint16))
print(json.dumps(["zmm" in add.inspect_asm(add.signatures[0]), "+avx512bw" in codegen.get_host_cpu_features()]))
"""


def wide_and_possible(features: str | None) -> tuple[bool, bool]:
    """Whether a loop took vectors of 512 bits, and whether the processor has them."""
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CPU_FEATURES"}
    if features is not None:
        environment["NUMBA_CPU_FEATURES"] = features
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    wide, possible = json.loads(result.stdout)
    return wide, possible


def test_loops_take_512_bits_where_the_processor_has_them() -> None:
    wide, possible = wide_and_possible(None)
    assert wide == possible


@pytest.mark.nightly
def test_what_the_environment_says_about_the_processor_counts() -> None:
    wide, _ = wide_and_possible("-avx512f")
    assert not wide


@numba.njit(parallel=True)
def count_threads(threads: NDArray[np.int64]) -> None:  # pragma: no cover - compiled
    for task in prange(threads.shape[0]):
        threads[task] = get_num_threads()


@njit()
def note(task: int, counts: NDArray[np.int64], spoiled: int) -> None:  # pragma: no cover - compiled
    if task == spoiled:
        raise ValueError("spoiled")
    counts[task] += get_num_threads()


@numba.njit
def spread_notes(counts: NDArray[np.int64], spoiled: int) -> None:  # pragma: no cover - compiled
    spread(note, counts.shape[0], (counts, spoiled))


@pytest.mark.parametrize("work", [0.0, math.inf])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_every_task_runs_once_on_one_thread_and_on_all(count: int, work: float) -> None:
    counts = np.zeros(count, np.int64)
    launch(spread_notes, counts, -1, work=work)
    assert (counts == (thread_count() if work else 1)).all()


@pytest.mark.parametrize("work", [0.0, math.inf])
def test_a_task_that_raises_is_told(work: float) -> None:
    with pytest.raises(RuntimeError, match="a task of a compiled loop raised"):
        launch(spread_notes, np.zeros(9, np.int64), 8, work=work)


def threads_for(work: float) -> int:
    threads = np.zeros(4, np.int64)
    launch(count_threads, threads, work=work)
    return int(threads.max())


def test_all_threads_are_started_for_100_microseconds_of_work_and_one_for_less() -> None:
    most = thread_count()
    assert threads_for(math.inf) == threads_for(100_000) == most
    assert threads_for(0.0) == threads_for(1_000) == threads_for(99_000) == 1
    assert thread_count() == most


def test_a_launch_starts_no_more_threads_than_are_allowed() -> None:
    most = thread_count()
    set_num_threads(1)
    try:
        assert threads_for(math.inf) == 1
        assert thread_count() == 1
    finally:
        set_num_threads(most)


def test_a_launch_that_fails_leaves_the_threads_as_they_were() -> None:
    most = thread_count()
    with pytest.raises(ValueError, match="spoiled"):
        launch(raising(ValueError("spoiled")), np.zeros(1, np.int64), work=0.0)
    assert thread_count() == most


_TOP_K = "index_store.selection.top_k_numba:_top_k_rows"


def ignore(_: str) -> None:
    pass


def test_a_loop_that_fails_is_logged_and_the_others_are_compiled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loops = ["index_store.selection.top_k_numba:no_such_loop", _TOP_K]
    with caplog.at_level(logging.WARNING):
        compile_beside(loops, processes=1, told=ignore, into=tmp_path).result(timeout=300)
    assert "no_such_loop is not compiled beforehand: error: AttributeError" in caplog.text
    assert [path.name.partition("-")[0] for path in tmp_path.glob("*/*.nbi")] == ["top_k_numba._top_k_rows"]


def test_cancelling_ends_the_processes(tmp_path: Path) -> None:
    done = compile_beside([_TOP_K] * 50, processes=2, told=ignore, into=tmp_path)
    assert done.cancel()
    with pytest.raises(CancelledError):
        done.result(timeout=0)
    for thread in threading.enumerate():
        if thread.name.startswith("compiling-"):
            thread.join(timeout=300)
            assert not thread.is_alive()


def test_a_process_that_compiles_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "index_store.compiled.beside"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdin.write(f"{_TOP_K}\n".encode())
        child.stdin.close()  # as when whoever started it dies
        assert child.wait(timeout=300) == 0
        assert os.waitstatus_to_exitcode(child.returncode) == 0


def test_a_loop_is_named_by_all_that_it_is_compiled_from() -> None:
    module = "index_store.indexes.coarse_rows.best_keys_numba"
    found = compiled_from(module)
    assert {module, "index_store.selection.top_k_numba", "index_store.attention.vectors.code"} <= found
    assert {"index_store.compiled.launch", "index_store.indexes.coarse_rows.coded_passes_numba"} <= found
    assert (
        "index_store.selection.collect_numba" not in found
    )  # a change there compiles this one no second time


def test_a_changed_source_gets_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module, called = "index_store.attention.rows_in_line_numba", "index_store.attention.vectors.code"
    before = loop_cache._content.__wrapped__(module)
    read = loop_cache._source

    def changed(name: str) -> bytes:
        return read(name) + (b"\n" if name == called else b"")

    monkeypatch.setattr(loop_cache, "_source", changed)
    assert loop_cache._content.__wrapped__(module) != before


def test_a_loop_is_written_once_and_read_from_any_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(numbers, addend):  # type: ignore[no-untyped-def]
        numbers[0] += addend

    own, shared = tmp_path / "own", tmp_path / "shared"
    monkeypatch.setattr(loop_cache, "file_name", lambda module, function: f"{function}-0")
    monkeypatch.setattr(loop_cache, "own_place", lambda: own)
    monkeypatch.setattr(loop_cache, "shared_place", lambda: shared)
    numbers = np.zeros(1, np.float32)
    first = njit("f4x1 i8")(add)
    first._cache = LoopCache(add, into=shared)
    first(numbers, 2)
    second = njit("f4x1 i8")(add)
    second(numbers, 3)
    assert numbers[0] == 5
    assert (sum(first.stats.cache_misses.values()), sum(second.stats.cache_misses.values())) == (1, 0)
    assert sum(second.stats.cache_hits.values()) == 1
    assert not own.exists()
    assert sorted(path.suffix for path in shared.rglob("*.nb*")) == [".nbc", ".nbi"]


def test_a_folder_that_others_can_write_to_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "above" / "loops"
    make(folder)
    assert distrust(folder) is None
    folder.chmod(0o777)
    assert distrust(folder) == f"other users may write to {folder}"
    folder.chmod(0o755)
    folder.parent.chmod(0o1777)  # others may add to it, not rename what is there
    assert distrust(folder) is None
    folder.parent.chmod(0o777)
    assert distrust(folder) == f"other users may write to {folder.parent}"


def test_a_folder_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    expected = None if owner == 0 else f"{tmp_path} belongs to user {owner}"
    assert distrust(tmp_path) == expected


def test_files_that_nobody_used_for_months_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "one" / "old.nbc", tmp_path / "one" / "new.nbc"
    old.parent.mkdir()
    for file in (old, new):
        file.write_bytes(b"")
    os.utime(old, (time.time() - 100 * 24 * 3600,) * 2)
    remove_unused(tmp_path)
    assert (old.exists(), new.exists()) == (False, True)
