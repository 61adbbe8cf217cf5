"""Kernels in Triton's interpreter under watch: what they read and write has to be memory that some tensor holds.

The interpreter follows any address. What a GPU ends with an illegal access often is somebody else's memory here, and
nobody sees it, or the process ends without a word about where.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray


class AddressError(Exception):
    """A kernel has come to memory that no tensor holds."""


class HeldMemory:
    """Memory of the tensors that there are, as ranges of addresses."""

    def __init__(self) -> None:
        self._first = [*_LEFT_ALONE]
        self.look()

    def look(self) -> None:
        """Notes which tensors there are now."""
        first = (each for each in (known() for known in self._first) if each is not None)
        spans = {
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
            for storage in (
                each.untyped_storage() for each in (*first, *_tensors()) if each.device.type == "cpu"
            )
        }
        ordered = np.array([(0, 0), *sorted(spans)], dtype=np.uint64)  # with something before every address
        self._starts, self._ends = ordered[:, 0], np.maximum.accumulate(ordered[:, 1])

    def check(self, what: str, addresses: NDArray[np.uint64], nbytes: int) -> None:
        """Raises AddressError unless some tensor holds so many bytes from each of the addresses on."""
        outside = self._outside(addresses, nbytes)
        if outside.any():
            self.look()  # kernels that are not Triton's are launched in other ways
            outside = self._outside(addresses, nbytes)
        if outside.any():
            wrong = addresses[outside]
            raise AddressError(
                f"a kernel {what} {nbytes} bytes at {int(wrong.min()):#x}, and at {len(wrong) - 1} other addresses of "
                f"{len(addresses)}, where no tensor is"
            )

    def _outside(self, addresses: NDArray[np.uint64], nbytes: int) -> NDArray[np.bool_]:
        before = np.searchsorted(self._starts, addresses, "right") - 1
        outside: NDArray[np.bool_] = addresses + np.uint64(nbytes) > self._ends[before]
        return outside


_LEFT_ALONE: list[ref[torch.Tensor]] = []
"""Tensors that the garbage collector was told to leave alone."""


@contextmanager
def left_alone() -> Iterator[None]:
    """Inside, looking for tensors passes over what is there already: a million objects.

    Inside of itself, over what came since as well. Cycles of objects that were there go when the outermost one ends.
    """
    outermost = gc.get_freeze_count() == 0
    _LEFT_ALONE.extend([ref(each) for each in _tensors()])
    gc.freeze()
    try:
        yield
    finally:
        if outermost:
            gc.unfreeze()
            _LEFT_ALONE.clear()


def _tensors() -> list[torch.Tensor]:
    """Those that the garbage collector looks after: all but the ones that it was told to leave alone.

    No others that only stand for tensors, as compilers use them.
    """
    kinds = {torch.Tensor, torch.nn.Parameter}
    return [each for each in gc.get_objects() if type(each) in kinds]


def _chosen(addresses: Any, mask: Any) -> NDArray[np.uint64]:
    """The addresses that the mask lets through; both are arrays of one shape, or numbers."""
    chosen: NDArray[np.uint64] = np.atleast_1d(addresses)[np.atleast_1d(mask).astype(bool)].astype(np.uint64)
    return chosen


@contextmanager
def watched_addresses() -> Iterator[None]:
    """Inside, every launch that comes to other memory than tensors' raises; it has changed nothing there.

    On a GPU, which has its own ways to say so, nothing is watched. Not inside of itself.
    """
    if "TRITON_INTERPRET" not in os.environ:
        yield
        return
    # Not above: triton reads where its kernels run when it is imported first.
    from triton.runtime import interpreter

    memory = interpreter._interpreter
    launch = interpreter.GridExecutor.__call__

    def look_and_launch(self: Any, *arguments: Any, **options: Any) -> Any:
        held.look()
        return launch(self, *arguments, **options)

    def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        held.check("reads", _chosen(addresses, mask), np.dtype(dtype).itemsize)
        return unwatched["load"](addresses, mask, other, dtype)

    def store(addresses: Any, values: Any, mask: Any) -> Any:
        held.check("writes", _chosen(addresses, mask), values.dtype.itemsize)
        return unwatched["store"](addresses, values, mask)

    def atomic_rmw(operation: Any, addresses: Any, values: Any, mask: Any, order: Any) -> Any:
        held.check("changes", _chosen(addresses, mask), values.dtype.itemsize)
        return unwatched["atomic_rmw"](operation, addresses, values, mask, order)

    def atomic_cas(addresses: Any, expected: Any, values: Any, order: Any) -> Any:
        held.check("changes", addresses.reshape(-1), values.dtype.itemsize)
        return unwatched["atomic_cas"](addresses, expected, values, order)

    watching: dict[str, Any] = {each.__name__: each for each in (load, store, atomic_rmw, atomic_cas)}
    unwatched = {name: getattr(memory, name) for name in watching}
    with (
        left_alone(),
        patch.multiple(memory, **watching),
        patch.object(interpreter.GridExecutor, "__call__", look_and_launch),
    ):
        held = HeldMemory()
        yield
