# mypy: disallow-untyped-decorators=False
"""Compiled loops of `search_cpu.py`: one thread plays the device, and threads read tables together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from decode_engine.host_search.shared_search_numba import (
    ANSWERS,
    COUNT_BITS,
    HEADS,
    LINE,
    POSTED,
    ROW,
    ROW_FIELDS,
    ROWS,
    SEARCHES,
    USED,
    add_to_word,
    int64_rows,
    let_others_run,
    load_word,
    number_of,
    relax,
    serve_search,
    store_word,
)
from index_store.compiled.launch import njit

_SPINS = 64


@njit(cache=True)
def search_all(
    job: NDArray[np.int64],
    held: NDArray[np.int64],
    buffers: NDArray[np.float32],
    words: NDArray[np.uint64],
    bins: NDArray[np.int32],
) -> None:  # pragma: no cover - compiled
    """Plays the device: asks for all of a step's searches, one after the other, and takes part in each.

    Queries are those that are there. The other arguments as `serve_search` takes them.
    """
    rows = int64_rows(job[ROWS], job[USED], ROW_FIELDS)
    for search in range(job[SEARCHES]):
        number = number_of(job, search)
        for a in range(job[USED]):
            store_word(job[POSTED] + rows[a, ROW] * LINE * 8, number)
        serve_search(job, search, held, buffers, words, bins)
        for index in range(job[USED] * job[HEADS]):
            answered = rows[index // job[HEADS], ROW] * job[HEADS] + index % job[HEADS]
            spins = 0
            while load_word(job[ANSWERS] + answered * LINE * 8) >> COUNT_BITS < number:
                spins += 1
                _spin(spins)


@njit(cache=True)
def read_shares(
    data: NDArray[np.int64], share: int, turns: int, threads: int, number: int, words: NDArray[np.int64]
) -> int:  # pragma: no cover - compiled
    """One of several threads that read `turns` times `threads` shares together, beginning each turn together.

    words: [LINE], zeros before; the first one counts who has come to a turn. Every turn reads other data. Returns
    when all have read, the sum of what this thread has.
    """
    total = 0
    for turn in range(turns + 1):
        add_to_word(words.ctypes.data, 1)
        spins = 0
        while load_word(words.ctypes.data) < (turn + 1) * threads:
            spins += 1
            _spin(spins)
        if turn < turns:
            begin = (turn * threads + number) * share % (data.shape[0] - share)
            part = data[begin : begin + share]
            for i in range(share):
                total += part[i]
    return total


@njit(cache=True)
def _spin(spins: int) -> None:  # pragma: no cover - compiled
    """One turn of waiting."""
    relax()
    if spins % _SPINS == 0:
        let_others_run()
