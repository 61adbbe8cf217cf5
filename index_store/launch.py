"""Loops compiled by numba: which vectors they take, where they run, and how several threads start them.

`njit` and `prange` are imported from here, so that the vectors are chosen before the first loop is compiled.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, get_num_threads, njit, prange, set_num_threads, threading_layer, types
from numba.core import cgutils, codegen, config
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor


def _prefer_wide_vectors() -> None:
    """Lets loops take vectors of 512 bits where the processor has them, unless NUMBA_CPU_FEATURES says something else.

    LLVM takes 256 on Intel's, for the sake of old ones whose clock fell with 512. Sums of tables on current ones take
    a quarter less time with 512 (docs/offload.md).
    """
    features = codegen.get_host_cpu_features()
    if config.CPU_FEATURES is None and "+avx512bw" in features.split(","):
        config.CPU_FEATURES = f"{features},-prefer-256-bit"


_prefer_wide_vectors()

__all__ = [
    "byte_table",
    "get_num_threads",
    "int16_table",
    "launch",
    "njit",
    "on_host",
    "prange",
    "thread_count",
    "worth_sharing",
]

_workqueue_guard = threading.Lock()

_WORTH = 100_000
"""Nanoseconds of work that other threads are woken for, which takes about half as long."""


def on_host(tensor: Tensor) -> bool:
    """Whether the compiled kernels can read the tensor; their eager references run on any device."""
    return tensor.device.type == "cpu"


def thread_count() -> int:
    """How many threads a parallel kernel of this thread takes."""
    return int(get_num_threads())


def worth_sharing(work: float) -> bool:
    """Whether other threads are woken for so many nanoseconds of work, where there are any."""
    return work >= _WORTH


def launch(kernel: Callable[..., None], *args: object, work: float = math.inf) -> None:
    """Runs a parallel kernel; the GIL is free meanwhile.

    work: nanoseconds that one thread takes for it, to within a factor of two or so; of several parallel loops, for one
    of them on average. It says whether one thread takes all of it or all threads share it: OpenMP ends threads that a
    smaller team has no use for, and starts them anew. What a kernel computes does not depend on their number.

    numba's fallback threading layer, workqueue, aborts the process when two threads enter it at once, so there launches
    take turns.
    """
    most = get_num_threads()  # chooses the layer, where that was not done yet
    alone = most > 1 and not worth_sharing(work)
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


@njit(cache=True, nogil=True)
def int16_table(address: int, rows: int, width: int) -> NDArray[np.int16]:  # pragma: no cover - compiled
    """[rows, width] int16 at an address, for loops over tables of many sessions; whoever calls keeps them alive."""
    return carray(_pointer(address), (rows, width), np.int16)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def byte_table(address: int, rows: int, width: int) -> NDArray[np.uint8]:  # pragma: no cover - compiled
    """[rows, width] uint8 at an address, likewise."""
    return carray(_pointer(address), (rows, width), np.uint8)  # type: ignore[no-any-return]
