"""Who made, read, changed and deleted what, and who was refused: a line of JSON for every call, never texts or tokens.

Lines are written by a thread of their own, so that no call waits for a disk, and to a file that may be moved away.
"""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path

from index_store.store.files.durable import storing

_TOLD = ("context", "operation", "upload", "kept", "readers", "requests", "failed")
"""Facts of a call that its line has, where they are known."""
_PRIVATE_FILE = 0o600


logger = logging.getLogger(__name__)

_TELL_EVERY_S = 60.0


class _PrivateFile(WatchedFileHandler):
    """lost: lines that could not be written, as on a full disk."""

    lost = 0
    _told_s = -math.inf

    def handleError(self, record: logging.LogRecord) -> None:
        """A line could not be written: the log says so, once a minute."""
        self.lost += 1
        with suppress(OSError):  # it still has the line
            self.close()
        if time.monotonic() - self._told_s >= _TELL_EVERY_S:
            self._told_s = time.monotonic()
            error = sys.exception()
            logger.error("the audit log %s lacks %d lines now: %s", self.baseFilename, self.lost, error)

    def emit(self, record: logging.LogRecord) -> None:
        """As its class, of which looking for a file that was moved away raises on a full disk, too."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        """The file, which is its owner's alone also where it has to be begun anew."""
        opener = partial(os.open, mode=_PRIVATE_FILE)
        return open(self.baseFilename, "a", encoding="utf-8", opener=opener)


class AuditLog:
    """Appends to a file, from any thread, until `close`. Several processes may share it."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError for a file that cannot be written."""
        with storing("opening the audit log", path):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _PRIVATE_FILE))
        lines: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._file = _PrivateFile(path, delay=True)
        self._listener = QueueListener(lines, self._file)
        self._logger = logging.Logger("audit", logging.INFO)  # of its own: no other log has these lines
        self._logger.addHandler(QueueHandler(lines))
        self._listener.start()

    @property
    def lost(self) -> int:
        """Lines that could not be written so far."""
        return self._file.lost

    def tell(
        self,
        *,
        id_: str,
        host: str,
        tenant: str,
        caller: str,
        right: str,
        call: str,
        outcome: str,
        facts: Mapping[str, object],
    ) -> None:
        """One call that has ended. right: that it takes. outcome: OK, a reason, or a status of HTTP."""
        told = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": id_,
            "host": host,
            "tenant": tenant,
            "caller": caller,
            "right": right,
            "call": call,
            "outcome": outcome,
            **{name: facts[name] for name in _TOLD if name in facts},
        }
        self._logger.info("%s", json.dumps(told))

    def close(self) -> None:
        """Returns when all lines are written. Idempotent."""
        if self._listener._thread is not None:
            self._listener.stop()
