"""Keeping what sessions have added: done on threads beside the scheduler's, a few at a time.

A request that is being kept has ended for the scheduler. It still counts with its memory and its place, so that those
bound how many wait here, until it was kept or could not be; then its stream ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

from decode_engine.engine.requests import Finished
from decode_engine.errors import ShuttingDownError

_THREADS = 2

Work = Callable[[], str]
"""Keeps it, and returns the name of what was kept."""


class Keepers:
    """The threads that keep. Safe to use from several threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="keep")

    def keep(self, work: Work, finished: Finished, ended: Callable[[Finished | Exception], None]) -> None:
        """Begins some work; `ended` gets the end of the request with the name of what was kept, or an error.

        It is called on any thread.
        """

        def tell(done: Future[str]) -> None:
            try:
                ended(replace(finished, kept=done.result()))
            except CancelledError:
                ended(ShuttingDownError("the server shut down before the session was kept"))
            except Exception as error:
                ended(error)

        self._pool.submit(work).add_done_callback(tell)

    def close(self) -> None:
        """Waits for what has begun; what has not is not kept."""
        self._pool.shutdown(wait=True, cancel_futures=True)
