"""A prefill worker in a thread of the test's process: one of its own imports for seconds what this one has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefill_worker.worker.queue_worker import QueueWorker


@contextmanager
def working(worker: QueueWorker) -> Iterator[None]:
    """Inside, it does what is queued."""
    stopping = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stopping,))
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
