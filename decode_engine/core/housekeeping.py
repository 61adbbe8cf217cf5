"""A server tidies its store: contexts that have expired go by themselves, and what is too much for the store's bound.

It does so while nobody is answered, or after half an hour in which somebody always was. What is in use is noted in the
store first, where all who share it see that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from index_store.errors import SparseKVError
from index_store.store.catalog import Store
from index_store.store.clean_up import StoreRoom, note_use

_EVERY_S = 60.0
_MOST_PUT_OFF = 30

logger = logging.getLogger(__name__)


class Housekeeping:
    """Looks after a store once a minute, from `start` to `stop`, on a thread of its own."""

    def __init__(
        self,
        store: Store,
        room: StoreRoom,
        in_use: Callable[[], Iterable[str]],
        idle: Callable[[], bool],
        every_s: float = _EVERY_S,
    ) -> None:
        """in_use: ids of contexts that somebody uses now. idle: whether nobody is answered now."""
        self._store = store
        self._room = room
        self._in_use = in_use
        self._idle = idle
        self._every_s = every_s
        self._put_off = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)

    def start(self) -> None:
        """Begins after the first minute."""
        self._thread.start()

    def stop(self) -> None:
        """Ends, when what is being removed is gone. Idempotent."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Notes what is in use, and removes what is to go where it is time for that."""
        for id_ in self._in_use():
            note_use(self._store, id_)
        if not self._idle() and self._put_off < _MOST_PUT_OFF:
            self._put_off += 1
            return
        self._put_off = 0
        try:
            self._room.sweep()
        except SparseKVError as error:
            logger.warning("contexts that have expired are not removed now: %s", error.message)

    def _run(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self.look()
            except Exception:
                logger.exception("looking after the store failed")
