"""Places: how many requests there may be at once, how many of them on one context, and how many of one client."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from decode_engine.errors import TooManyRequestsError


class Places:
    """Counts requests from before they cost anything until they have ended. Thread-safe."""

    def __init__(self, most: int, kept: int, client: int | None = None) -> None:
        """most: places. kept: that requests on one context, or of one client, leave for others. client: that one client
        may have, if not so many."""
        self._most = most
        self._most_of_one = most - kept
        self._most_of_client = client or most - kept
        self._taken: Counter[str] = Counter()  # by context
        self._clients: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Places that are taken."""
        with self._lock:
            return self._taken.total()

    def take(self, context: str, client: str) -> Place:
        """client: "" is nobody. Raises TooManyRequestsError when there is no place left for context or client."""
        with self._lock:
            if client and self._clients[client] >= self._most_of_client:
                raise TooManyRequestsError(
                    f"{self._clients[client]} requests of this client are running or waiting, which is the limit for "
                    "one client; try again later",
                    limit=self._most_of_client,
                )
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
            self._clients[client] += 1
        return Place(lambda: self._give_back(context, client))

    def _give_back(self, context: str, client: str) -> None:
        with self._lock:
            for taken, key in ((self._taken, context), (self._clients, client)):
                taken[key] -= 1
                if not taken[key]:
                    del taken[key]


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
