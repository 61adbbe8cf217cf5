"""What a thread that searches runs for as long as it lives, compiled, without the interpreter's lock.

Steps of several *lanes* may be in flight at once, each with a job of its own (`shared_search_numba`). A thread goes
round them: where the next search of a step has been asked for it takes part, and while nothing is in flight it sleeps.

numba's cache notices changes of this file, and not of those that it calls: who changes `shared_search_numba` or
`table_lists_numba` removes what is in `__pycache__` here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decode_engine.host_search.shared_search_numba import (
    JOB_FIELDS,
    LINE,
    QUERIES,
    SEARCHES,
    STOP,
    TILES,
    is_posted,
    serve_search,
)
from decode_engine.host_search.shared_words_numba import (
    SEMAPHORE_WORDS,
    add_to_word,
    int64_rows,
    let_others_run,
    load_word,
    relax,
    sleep_us,
    wait_for_post,
)
from index_store.compiled.launch import njit
from index_store.indexes.query_tables.search_numba import TILE

EPOCH, JOB, INSIDE = 0, LINE, 2 * LINE
LANE_WORDS = 3 * LINE
"""Of a lane: the number of the step in flight or 0, the address of its job, and how many threads are inside."""

_SPINS = 64
_PATIENCE, _NAP_US = 50_000, 50
"""Turns of waiting, a few milliseconds, after which a thread naps between looks."""


@njit(cache=True)
def take_part(
    lanes_address: int, lanes: int, semaphore: int, end: int
) -> None:  # pragma: no cover - compiled
    """Takes part in the searches of all lanes' steps until told to end.

    Given the address of the lanes, their number, and addresses of this thread's semaphore and of the word that ends it.
    """
    words = int64_rows(lanes_address, lanes, LANE_WORDS)
    served = np.zeros(lanes, np.int64)
    searched = np.zeros(lanes, np.int64)
    inside = np.zeros(lanes, np.bool_)
    held = np.zeros((1, 3), np.int64)
    buffers = np.empty(1, np.float32)
    tile_words = np.empty(TILE // 32 + 2, np.uint64)
    bins = np.empty(2 * TILE, np.int32)
    spins = 0
    while load_word(end) == 0:
        busy = worked = False
        for lane in range(lanes):
            base = words[lane].ctypes.data
            if not inside[lane]:
                inside[lane] = _enter(base, served[lane])
                if not inside[lane]:
                    continue
                served[lane], searched[lane] = load_word(base + 8 * EPOCH), 0
            busy = True
            job = int64_rows(load_word(base + 8 * JOB), 1, JOB_FIELDS)[0]
            leaving = searched[lane] == job[SEARCHES] or load_word(job[STOP]) != 0
            if not leaving and is_posted(job, searched[lane]):
                width = (job[QUERIES] + 1) * TILE
                if held.shape[0] < job[TILES] or buffers.shape[0] < job[TILES] * width:
                    held, buffers = (
                        np.zeros((job[TILES], 3), np.int64),
                        np.empty(job[TILES] * width, np.float32),
                    )
                own = buffers[: job[TILES] * width].reshape(job[TILES], width)
                leaving = not serve_search(job, searched[lane], held[: job[TILES]], own, tile_words, bins)
                searched[lane] += 1
                worked = True
            if leaving:
                inside[lane] = False
                add_to_word(base + 8 * INSIDE, -1)
        if not busy:
            wait_for_post(semaphore)
        elif worked:
            spins = 0
        else:
            spins += 1
            _spin(spins)
    _leave(words, inside)


def compile_search() -> None:
    """Returns when `take_part` is compiled: half a minute on a machine that has no such code yet.

    A device that has asked for lists waits no longer than a few seconds.
    """
    ended, semaphore = np.ones(1, np.int64), np.zeros(SEMAPHORE_WORDS, np.int64)
    no_lanes = np.zeros((1, LANE_WORDS), np.int64)
    take_part(no_lanes.ctypes.data, 1, semaphore.ctypes.data, ended.ctypes.data)


@njit(cache=True)
def _spin(spins: int) -> None:  # pragma: no cover - compiled
    """One turn of waiting for a device: it asks again within a fraction of a millisecond, unless it is held up."""
    relax()
    if spins > _PATIENCE:
        sleep_us(_NAP_US)
    elif spins % _SPINS == 0:
        let_others_run()


@njit(cache=True)
def _leave(words: NDArray[np.int64], inside: NDArray[np.bool_]) -> None:  # pragma: no cover - compiled
    """Leaves every lane's step."""
    for lane in range(inside.shape[0]):
        if inside[lane]:
            add_to_word(words[lane].ctypes.data + 8 * INSIDE, -1)


@njit(cache=True)
def _enter(base: int, served: int) -> bool:  # pragma: no cover - compiled
    """Whether this thread is inside of a step now: one that it has not served yet, and that has not ended."""
    epoch = load_word(base + 8 * EPOCH)
    if epoch in (0, served):
        return False
    # First counted, then looked at again: who ends a step waits for those who are counted.
    add_to_word(base + 8 * INSIDE, 1)
    if load_word(base + 8 * EPOCH) == 0:
        add_to_word(base + 8 * INSIDE, -1)
        return False
    return True
