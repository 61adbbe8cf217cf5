"""Loops compiled by numba: how they are compiled, where they run, and how several threads start them."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
import numpy as np
from numba import carray, get_num_threads, set_num_threads, threading_layer, types
from numba.core import cgutils, event
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from index_store.compiled.loop_cache import LoopCache
from index_store.compiled.parts import PartCompiler
from index_store.compiled.spreading import spread

__all__ = [
    "byte_table",
    "compiling_told",
    "get_num_threads",
    "int16_table",
    "launch",
    "njit",
    "on_host",
    "set_num_threads",
    "spread",
    "thread_count",
]

_NUMBERS = {
    "f4": types.float32,
    "i8": types.int64,
    "i4": types.int32,
    "i2": types.int16,
    "i1": types.int8,
    "u2": types.uint16,
    "u1": types.uint8,
    "b1": types.boolean,
}

_workqueue_guard = threading.Lock()

_WORTH = 100_000
"""Nanoseconds of work that other threads are woken for, which takes about half as long."""


def njit(declared: str = "", *, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function when it is first called. The GIL is free while it runs.

    declared: types of the arguments of a loop that Python calls: a number's kind (`i8`), or `f4x3` for contiguous
    arrays of three dimensions. Such a loop is kept on disk (`index_store.compiled`), and can be compiled before it is
    called. What loops call needs no declaration and becomes part of them. cache: keeps a loop without one.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        entry = declared or cache
        own = {} if entry else {"pipeline_class": PartCompiler}
        loop = numba.njit(nogil=True, **own, **options)(function)
        if entry:
            loop.declared = tuple(_type_of(each) for each in declared.split())
            loop._cache = LoopCache(function)
        return loop

    return compiled


def _type_of(word: str) -> Any:
    number, _, dimensions = word.partition("x")
    return types.Array(_NUMBERS[number], int(dimensions), "C") if dimensions else _NUMBERS[number]


def on_host(tensor: Tensor) -> bool:
    """Whether the compiled kernels can read the tensor; their eager references run on any device."""
    return tensor.device.type == "cpu"


def thread_count() -> int:
    """How many threads a parallel kernel of this thread takes."""
    return int(get_num_threads())


def launch(kernel: Callable[..., None], *args: object, work: float = math.inf) -> None:
    """Runs a parallel kernel; the GIL is free meanwhile.

    work: nanoseconds that one thread takes for it, to within a factor of two or so; of several parallel loops, for one
    of them on average. It says whether one thread takes all of it or all threads share it: OpenMP ends threads that a
    smaller team has no use for, and starts them anew. What a kernel computes does not depend on their number.

    numba's fallback threading layer, workqueue, aborts the process when two threads enter it at once, so there launches
    take turns.
    """
    most = get_num_threads()  # chooses the layer, where that was not done yet
    alone = work < _WORTH and most > 1
    if alone:
        set_num_threads(1)
    try:
        if threading_layer() != "workqueue":
            kernel(*args)
        else:
            with _workqueue_guard:
                kernel(*args)
    finally:
        if alone:
            set_num_threads(most)


@intrinsic
def _pointer(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit()
def int16_table(address: int, rows: int, width: int) -> NDArray[np.int16]:  # pragma: no cover - compiled
    """[rows, width] int16 at an address, for loops over tables of many sessions; whoever calls keeps them alive."""
    return carray(_pointer(address), (rows, width), np.int16)  # type: ignore[no-any-return]


@njit()
def byte_table(address: int, rows: int, width: int) -> NDArray[np.uint8]:  # pragma: no cover - compiled
    """[rows, width] uint8 at an address, likewise."""
    return carray(_pointer(address), (rows, width), np.uint8)  # type: ignore[no-any-return]


@contextmanager
def compiling_told(say: Callable[[str, str], None]) -> Iterator[None]:
    """Inside, each loop that this process compiles is told by its name, as a part of the phase "compile loops"."""

    class Told(event.Listener):  # type: ignore[misc]
        def on_start(self, found: Any) -> None:
            say("compile loops", found.data["dispatcher"].py_func.__name__)

        def on_end(self, found: Any) -> None:
            pass

    with event.install_listener("numba:compile", Told()):
        yield
