"""How commands that serve are told to stop, and that they then do.

A signal may reach any thread of the process, and Python runs its handlers on the main thread only, when that comes
by: one that sleeps without an end does not, unless the signal has woken it. What a signal does at once, whatever the
threads do, is to write its number into a pipe; a thread of its own reads there. What has not ended in time is ended by
the interpreter's watchdog, which is no Python thread and needs no lock.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

IN_ORDER_S = 4.0
"""What stopping takes beside the grace, at most: after that the process is ended where it is."""


@contextmanager
def stop_signals(grace_s: float) -> Iterator[threading.Event]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends the process at once.

    grace_s: of running requests. If the process lives IN_ORDER_S after that, it says what its threads do and ends
    with 1.
    """
    stopping = threading.Event()
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    thread = threading.Thread(
        target=_watch, args=(reading, frozenset(numbers), stopping, grace_s), name="signals", daemon=True
    )
    wakeup = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, _pass) for number in numbers}
    thread.start()
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        writing.close()  # which ends the thread
        thread.join()
        reading.close()


def end_process(code: int) -> None:
    """Ends the process without waiting for threads, of which some may compile or read for minutes."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody may read there any more
            stream.flush()
    os._exit(code)


def _pass(number: int, frame: FrameType | None) -> None:
    """A handler has to be there for the signal to be written into the pipe."""


def _watch(
    reading: socket.socket, numbers: frozenset[signal.Signals], stopping: threading.Event, grace_s: float
) -> None:
    while received := reading.recv(1):
        number = received[0]
        if number not in numbers:
            continue
        if stopping.is_set():
            end_process(128 + number)
        faulthandler.dump_traceback_later(grace_s + IN_ORDER_S, exit=True, file=sys.__stderr__ or 2)
        stopping.set()
    if stopping.is_set():
        faulthandler.cancel_dump_traceback_later()
