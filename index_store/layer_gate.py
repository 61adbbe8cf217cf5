"""Which layers of a context are in memory while it is loaded in the background, and who waits for one."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from time import perf_counter_ns

_CHECK_INTERVAL_S = 0.05


class LayerGate:
    """Opens layer by layer, in order, or fails once and for all. Safe to use from several threads."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._ready = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._begun_ns = perf_counter_ns()
        self._first_ns = self._all_ns = 0

    @property
    def complete(self) -> bool:
        """Whether every layer is in memory."""
        return self._ready == self._layers

    @property
    def first_layer_ns(self) -> int:
        """Nanoseconds from the beginning until the first layer was in memory; 0 before."""
        return self._first_ns

    @property
    def all_layers_ns(self) -> int:
        """Nanoseconds from the beginning until every layer was in memory; 0 before."""
        return self._all_ns

    def open_next(self) -> None:
        """Notes that the next layer is in memory."""
        spent = perf_counter_ns() - self._begun_ns
        with self._changed:
            if self._ready == 0:
                self._first_ns = spent
            self._ready += 1
            if self.complete:
                self._all_ns = spent
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Tells all who wait, now and later, for a layer that is not in memory. The first error counts."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def wait(self, layer: int, check: Callable[[], None] | None = None) -> None:
        """Returns when the layer is in memory. Raises what `fail` was given where it will not come.

        check: called every 50 ms while waiting; what it raises ends the wait.
        """
        if self._ready > layer:
            return
        with self._changed:
            while self._ready <= layer and self._error is None:
                self._changed.wait(None if check is None else _CHECK_INTERVAL_S)
                if check is not None:
                    check()
            error = self._error
        if error is not None and self._ready <= layer:
            # A copy: every thread gets a traceback of its own.
            raise copy.copy(error) from error

    def wait_for_all(self, check: Callable[[], None] | None = None) -> None:
        """Returns when every layer is in memory. Raises as `wait` does."""
        self.wait(self._layers - 1, check)
