"""Words of memory that threads and devices share: atomic access, waiting, and views of memory by its address.

For functions that numba compiles. Every word is an int64 at an address that is a multiple of 8. Accesses to words are
sequentially consistent: what was written before a word was stored is seen after it was loaded, and of two threads
that each store one word and then load the other's, one sees the other's. Compilers leave none of them out of a loop.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from index_store.compiled.launch import njit

_WORD = ir.IntType(64)
_BYTES = 8
_ON_X86 = platform.machine().lower() in ("x86_64", "amd64")

_Generated = tuple[Any, Callable[..., Any]]


@intrinsic
def load_word(typing: Any, address: Any) -> _Generated:
    """load_word(address) -> int64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(values[0], _WORD.as_pointer()), "seq_cst", _BYTES)

    return types.int64(types.int64), generate


@intrinsic
def store_word(typing: Any, address: Any, value: Any) -> _Generated:
    """store_word(address, value)."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _WORD.as_pointer())
        builder.store_atomic(values[1], pointer, "seq_cst", _BYTES)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_to_word(typing: Any, address: Any, value: Any) -> _Generated:
    """add_to_word(address, value) -> the word before."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer = builder.inttoptr(values[0], _WORD.as_pointer())
        return builder.atomic_rmw("add", pointer, values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def relax(typing: Any) -> _Generated:
    """Tells the processor that this thread spins; where it cannot be told, lets another thread run."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if _ON_X86:
            function = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
        else:
            _call(builder, "sched_yield")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def let_others_run(typing: Any) -> _Generated:
    """Gives the core to another thread that waits for one."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _call(builder, "sched_yield")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep_us(typing: Any, microseconds: Any) -> _Generated:
    """sleep_us(microseconds): this thread sleeps for about that long."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        number = ir.IntType(32)
        function = ir.FunctionType(number, [number])
        called = cgutils.get_or_insert_function(builder.module, function, "usleep")
        builder.call(called, [builder.trunc(values[0], number)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def _sem_wait(typing: Any, address: Any) -> _Generated:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _call(builder, "sem_wait", values[0])

    return types.int32(types.int64), generate


@intrinsic
def _sem_post(typing: Any, address: Any) -> _Generated:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _call(builder, "sem_post", values[0])

    return types.int32(types.int64), generate


@intrinsic
def _pointer(typing: Any, address: Any) -> _Generated:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def _call(builder: Any, name: str, *addresses: Any) -> Any:
    """Calls a function of the C library that takes addresses and returns an int."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    function = ir.FunctionType(number, [pointer] * len(addresses))
    called = cgutils.get_or_insert_function(builder.module, function, name)
    return builder.call(called, [builder.inttoptr(address, pointer) for address in addresses])


SEMAPHORE_WORDS = 8
"""Words of a semaphore, more than the C library needs. All zeros is a semaphore that nobody has posted."""


@njit(cache=True)
def wait_for_post(semaphore: int) -> None:  # pragma: no cover - compiled
    """Sleeps until the semaphore at that address has been posted; may also return for no reason."""
    _sem_wait(semaphore)


@njit(cache=True)
def post(semaphore: int) -> None:  # pragma: no cover - compiled
    """Lets one thread that waits for the semaphore go on, now or when it comes to wait."""
    _sem_post(semaphore)


@njit(cache=True)
def read_word(address: int) -> int:  # pragma: no cover - compiled
    """`load_word` for code that is not compiled."""
    return load_word(address)  # type: ignore[no-any-return]


@njit(cache=True)
def write_word(address: int, value: int) -> None:  # pragma: no cover - compiled
    """`store_word` for code that is not compiled."""
    store_word(address, value)


@njit(cache=True)
def int8_rows(address: int, rows: int, width: int) -> NDArray[np.int8]:  # pragma: no cover - compiled
    """[rows, width] int8 at an address."""
    return carray(_pointer(address), (rows, width), np.int8)  # type: ignore[no-any-return]


@njit(cache=True)
def int32_rows(address: int, rows: int, width: int) -> NDArray[np.int32]:  # pragma: no cover - compiled
    """[rows, width] int32 at an address."""
    return carray(_pointer(address), (rows, width), np.int32)  # type: ignore[no-any-return]


@njit(cache=True)
def int64_rows(address: int, rows: int, width: int) -> NDArray[np.int64]:  # pragma: no cover - compiled
    """[rows, width] int64 at an address."""
    return carray(_pointer(address), (rows, width), np.int64)  # type: ignore[no-any-return]


@njit(cache=True)
def float32_rows(address: int, rows: int, width: int) -> NDArray[np.float32]:  # pragma: no cover - compiled
    """[rows, width] float32 at an address."""
    return carray(_pointer(address), (rows, width), np.float32)  # type: ignore[no-any-return]
