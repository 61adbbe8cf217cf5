"""What a request without tokens is told, and when.

A message without tokens comes after a quarter of a second, then at every change, and now and then in between, so that
neither people nor idle connections give up.
"""

from __future__ import annotations

import time

from sparsekv.v1 import generation_pb2

_FIRST_NOTICE_S = 0.25
_NOTICE_S = 1.0
_LONGEST_SILENCE_S = 10.0


class Notices:
    """Those of one request. told: whether a message with its usage was sent."""

    def __init__(self, usage: generation_pb2.Usage) -> None:
        """usage: before the first token."""
        self.told = False
        self._usage = usage
        self._due = time.monotonic() + _FIRST_NOTICE_S
        self._last: tuple[generation_pb2.Waiting.Cause | None, int] | None = None
        self._said = 0.0

    def due_in_s(self) -> float:
        """Seconds until there may be something to tell."""
        return max(self._due - time.monotonic(), 0.0)

    def of_ahead(self, ahead: int | None) -> generation_pb2.GenerateResponse | None:
        """`take` of a request in the engine. ahead: requests that are admitted before it; None where it was."""
        return self.take(None, 0) if ahead is None else self.take(generation_pb2.Waiting.SESSION, ahead)

    def take(
        self, cause: generation_pb2.Waiting.Cause | None, ahead: int
    ) -> generation_pb2.GenerateResponse | None:
        """The next notice: None before its time, and where there is no news. cause None: it waits no longer."""
        now = time.monotonic()
        if now < self._due:
            return None
        self._due = now + _NOTICE_S
        if self._last == (cause, ahead) and now - self._said < _LONGEST_SILENCE_S:
            return None
        usage = None if self.told else self._usage
        self._last, self._said, self.told = (cause, ahead), now, True
        waiting = None if cause is None else generation_pb2.Waiting(cause=cause, requests_ahead=ahead)
        return generation_pb2.GenerateResponse(usage=usage, waiting=waiting)
