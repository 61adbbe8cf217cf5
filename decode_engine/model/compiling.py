"""Compiles what serving needs in processes of their own, beside the loading of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from index_store.compiled import beside
from index_store.compiled.loops import loops_of

_MULTIPLY_ROWS = "decode_engine.model.row_products_numba:_multiply_rows"


def compile_beside(
    model: str, dtype: str, methods: Sequence[str], *, processes: int, told: Callable[[str], None]
) -> Future[None]:
    """Compiles what decode steps of full attention and of these methods run on a host, as far as the cache lacks it.

    model: is not looked at: the same loops take every shape. dtype: of the model's numbers, or `auto`; loops that
    multiply weights are of float32. told: called with a clause whenever a loop is done, by other threads. A loop that
    fails is logged, and compiled again when it is first called. Cancelling the Future ends the processes; so does the
    end of this process.
    """
    weights = (_MULTIPLY_ROWS,) if dtype in ("auto", "float32") else ()
    return beside.compile_beside([*loops_of(methods), *weights], processes=processes, told=told)
