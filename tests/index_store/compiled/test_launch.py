"""Compiled loops: which vectors they take, and how many threads a launch starts for them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from numba import get_num_threads, njit, prange, set_num_threads
from numpy.typing import NDArray

from index_store.compiled import launch as compiled
from index_store.compiled.launch import launch, spread, thread_count

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


def test_what_the_environment_says_about_the_processor_counts() -> None:
    wide, _ = wide_and_possible("-avx512f")
    assert not wide


@njit(parallel=True)
def count_threads(threads: NDArray[np.int64]) -> None:  # pragma: no cover - compiled
    for task in prange(threads.shape[0]):
        threads[task] = get_num_threads()


@compiled.njit()
def note(task: int, counts: NDArray[np.int64], spoiled: int) -> None:  # pragma: no cover - compiled
    if task == spoiled:
        raise ValueError("spoiled")
    counts[task] += get_num_threads()


@njit
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
    def fail(threads: NDArray[np.int64]) -> None:
        raise ValueError("spoiled")

    most = thread_count()
    with pytest.raises(ValueError, match="spoiled"):
        launch(fail, np.zeros(1, np.int64), work=0.0)
    assert thread_count() == most
