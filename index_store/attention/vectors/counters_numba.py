"""Counters that threads of one loop share: who takes which task of a phase, and when all of them are done.

For functions that numba compiles. Counters are [phases, LINE] int64, of which the first of a row counts. No thread
waits for one that has not come: only for tasks that were taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types

from index_store.attention.vectors.code import SIZE, WORD, Rows, call, emits
from index_store.compiled.launch import I8, njit

LINE = 8
"""Numbers of a cache line."""

_PATIENCE = 4000
"""Looks, some microseconds, before the core is offered to others: its owner may be what is waited for."""


@emits(types.intp, "rows i")
def claim(builder: Any, counters: Rows, phase: Any) -> Any:
    """claim(counters, phase): what the counter was, which becomes one more."""
    return builder.atomic_rmw("add", counters.address(phase, SIZE(0), SIZE), SIZE(1), "seq_cst")


@emits(types.intp, "rows i")
def _seen(builder: Any, counters: Rows, phase: Any) -> Any:
    return builder.load_atomic(counters.address(phase, SIZE(0), SIZE), "acquire", 8)


@emits(types.void, "")
def _let_others_run(builder: Any) -> None:
    call(builder, "sched_yield", WORD)


@njit(_nrt=False)
def wait_until(counters: I8, phase: int, count: int) -> None:
    """Returns when the counter is at `count`, at least; what was written before it counted is seen."""
    looks = 0
    while _seen(counters, phase) < count:
        looks += 1
        if looks > _PATIENCE:
            _let_others_run()


def phase_of(task: Callable[..., None], **options: Any) -> Any:
    """What each thread of a loop calls for tasks of one phase: `run(counters, phase, count, arguments)`.

    task: compiled, a function of a task's number and the arguments. Whoever comes takes tasks, so it does not matter
    how many come, or when; all are done when a thread returns. Counters `phase` and `phase + 1` are its own.
    """

    @njit(**options)
    def run(counters: I8, phase: int, count: int, arguments: Any) -> None:
        number = claim(counters, phase)
        while number < count:
            task(number, *arguments)
            claim(counters, phase + 1)
            number = claim(counters, phase)
        wait_until(counters, phase + 1, count)

    return run
