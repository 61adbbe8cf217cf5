"""When a request without tokens is told something.

A notice comes after a quarter of a second, then at every change, and now and then in between, so that neither people
nor idle connections give up.
"""

from __future__ import annotations

import time

from decode_engine.orders.events import Waits

_FIRST_NOTICE_S = 0.25
_NOTICE_S = 1.0
_LONGEST_SILENCE_S = 10.0


class Notices:
    """Those of one request."""

    def __init__(self) -> None:
        self._due = time.monotonic() + _FIRST_NOTICE_S
        self._last: Waits | None = None
        self._said = 0.0

    def due_in_s(self) -> float:
        """Seconds until there may be something to tell."""
        return max(self._due - time.monotonic(), 0.0)

    def take(self, waits: Waits) -> bool:
        """Whether to tell this now: neither before its time, nor where it is no news."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _NOTICE_S
        if self._last == waits and now - self._said < _LONGEST_SILENCE_S:
            return False
        self._last, self._said = waits, now
        return True
