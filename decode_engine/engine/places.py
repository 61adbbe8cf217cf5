"""Places: how many requests there may be at once, and how many of them on one context."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from decode_engine.errors import TooManyRequestsError


class Places:
    """Counts requests from before they cost anything until they have ended. Thread-safe."""

    def __init__(self, most: int, kept: int) -> None:
        """most: places. kept: that requests on one context leave for others."""
        self._most = most
        self._most_of_one = most - kept
        self._taken: Counter[str] = Counter()  # by context
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Places that are taken."""
        with self._lock:
            return self._taken.total()

    def take(self, context: str) -> Place:
        """Raises TooManyRequestsError when there is no place left for the context."""
        with self._lock:
            total, own = self._taken.total(), self._taken[context]
            if total >= self._most:
                raise TooManyRequestsError(
                    f"{total} requests are running or waiting, which is the limit; try again later",
                    limit=self._most,
                )
            if own >= self._most_of_one:
                raise TooManyRequestsError(
                    f"{own} requests on this context are running or waiting, which is the limit for one context; try "
                    "again later",
                    limit=self._most_of_one,
                )
            self._taken[context] += 1
        return Place(lambda: self._give_back(context))

    def _give_back(self, context: str) -> None:
        with self._lock:
            self._taken[context] -= 1
            if not self._taken[context]:
                del self._taken[context]


class Place:
    """The right to submit one request; given back when the request ends, or by `release` if none is submitted."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()

    def release(self) -> None:
        """Gives the place back; calls after the first do nothing."""
        with self._lock:
            give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
