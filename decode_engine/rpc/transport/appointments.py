"""When those who are refused come again."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST_DELAY_S = 60.0


class Appointments:
    """When to come again, for those who are refused: one after the other, as fast as places have become free lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._interval_s = 1.0
        self._freed = clock()
        self._given = 0.0

    def place_freed(self) -> None:
        """A request has ended."""
        now = self._clock()
        between = min(max(now - self._freed, 0.01), 10.0)
        self._freed = now
        self._interval_s += 0.2 * (between - self._interval_s)

    def next_s(self) -> float:
        """Seconds until the next free appointment, which is taken by this."""
        now = self._clock()
        self._given = min(max(now, self._given) + self._interval_s, now + _LONGEST_DELAY_S)
        return self._given - now
