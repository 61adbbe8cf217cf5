"""Compiles what serving needs in processes of their own, beside the loading of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from index_store.cli.options import AUTO
from index_store.compiled import beside
from index_store.compiled.beside import loops_of

_MULTIPLY_ROWS = "decode_engine.model.row_products_numba:multiply_{kind}"


def compile_beside(
    weights: str,
    checkpoint: str,
    methods: Sequence[str],
    *,
    processes: int,
    told: Callable[[str], None],
) -> Future[None]:
    """Compiles what decode steps of full attention and of these methods run on a host, as far as the cache lacks it.

    weights: how the model's are to be kept, one of `WEIGHTS`. checkpoint: the dtype that they are stored in. told:
    called with a clause whenever a loop is done, by other threads. A loop that fails is logged, and compiled again when
    it is first called. Cancelling the Future ends the processes; so does the end of this process.
    """
    # What `auto` compares when it measures, and what it takes for matrices that the checkpoint's dtype does not hold.
    kinds = dict.fromkeys((checkpoint, "float32")) if weights == AUTO else (weights,)
    products = [_MULTIPLY_ROWS.format(kind=kind) for kind in kinds]
    return beside.compile_beside([*loops_of(methods), *products], processes=processes, told=told)
