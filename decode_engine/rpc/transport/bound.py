"""How many calls may do one thing at once, such as hold a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from decode_engine.errors import TooManyRequestsError


class Bound:
    """How many calls may do something at once."""

    def __init__(self, most: int, what: str) -> None:
        """what: is being done, as a sentence goes on after a number."""
        self._most = most
        self._what = what
        self._now = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """For one call. Raises TooManyRequestsError."""
        if self._now >= self._most:
            raise TooManyRequestsError(
                f"{self._now} {self._what}, which is the limit; try again later", limit=self._most
            )
        self._now += 1
        try:
            yield
        finally:
            self._now -= 1
