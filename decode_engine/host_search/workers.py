"""Threads that search on the host while a device computes.

Each runs one compiled function for as long as it lives and never holds the interpreter's lock there. It sleeps on a
semaphore while no step is in flight, and spins over the mailboxes of the steps that are.
"""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from decode_engine.host_search.mailbox import Mailbox
from decode_engine.host_search.shared_search_numba import LINE
from decode_engine.host_search.shared_words_numba import SEMAPHORE_WORDS, post, read_word, write_word
from decode_engine.host_search.thread_loop_numba import (
    EPOCH,
    INSIDE,
    JOB,
    LANE_WORDS,
    compile_search,
    take_part,
)
from index_store.errors import InvalidArgumentError, SparseKVError

_WORD_BYTES = 8
_END_SECONDS, _DEAD_SECONDS = 10.0, 0.1

logger = logging.getLogger(__name__)


class SearchThreads:
    """Threads that are started when they are first asked for."""

    def __init__(self, threads: int, lanes: int = 1, waves: int = 0) -> None:
        """waves: in how many parts a layer's lists are waited for, by KV heads: rows of one part are brought to the
        device while threads search for the next. 0 for as many as usually pay (`mailbox.usual_waves`).

        Raises InvalidArgumentError without a thread or a lane, and for a number below 0.
        """
        _check_numbers(threads, lanes)
        if waves < 0:
            raise InvalidArgumentError(
                f"lists are waited for in {waves} waves, expected some, or 0 for as many as pay"
            )
        self.threads, self.lanes, self.waves = threads, lanes, waves
        self._workers: SearchWorkers | None = None

    @property
    def workers(self) -> SearchWorkers:
        """The threads, for all lanes."""
        if self._workers is None:
            self._workers = SearchWorkers(self.threads, self.lanes)
            logger.info("%d threads search on the host for %d lanes", self.threads, self.lanes)
        return self._workers

    def close(self) -> None:
        """Ends the threads, if there are any."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class SearchWorkers:
    """Threads shared by the lanes: up to `lanes` steps are in flight at once, each with a mailbox of its own."""

    def __init__(self, threads: int, lanes: int) -> None:
        """Raises InvalidArgumentError unless there is a thread and a lane."""
        _check_numbers(threads, lanes)
        compile_search()
        self._lanes = np.zeros((lanes, LANE_WORDS), np.int64)
        self._mailboxes: list[Mailbox | None] = [None] * lanes
        self._epochs = 0
        self._end = np.zeros(LINE, np.int64)
        self._semaphores = np.zeros((threads, SEMAPHORE_WORDS), np.int64)
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"search-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> int:
        """Threads that live."""
        return sum(thread.is_alive() for thread in self._threads)

    def check(self) -> None:
        """Raises SparseKVError when a thread has died or does not end: mailboxes are then as threads may use them."""
        if self._error is not None:
            raise SparseKVError(
                f"searching on the host has failed: {self._error}; restart the server, or serve such contexts with "
                "--placement hybrid"
            ) from self._error

    def begin(self, lane: int, mailbox: Mailbox) -> None:
        """Lets the threads search for a step that the mailbox has begun. The lane's step before must have ended.

        Raises SparseKVError when a thread has died.
        """
        self.check()
        if self._mailboxes[lane] is not None:
            raise RuntimeError(f"lane {lane} has a step in flight")
        self._mailboxes[lane] = mailbox
        self._epochs += 1
        self._lanes[lane, JOB] = mailbox.job.ctypes.data
        write_word(self._address(lane, EPOCH), self._epochs)
        if self._error is not None:  # a thread that died meanwhile saw no mailbox here
            mailbox.cancel()
        for semaphore in self._semaphores:
            post(semaphore.ctypes.data)

    def end(self, lane: int) -> None:
        """Returns when no thread is at work on the lane's step any more; one that is unfinished is cancelled.

        Raises SparseKVError when a thread has died.
        """
        mailbox = self._mailboxes[lane]
        if mailbox is None:
            return
        write_word(self._address(lane, EPOCH), 0)
        if not mailbox.finished:
            mailbox.cancel()
        limit = time.monotonic() + _END_SECONDS
        while read_word(self._address(lane, INSIDE)):
            now = time.monotonic()
            if self._error is not None:  # also a thread that dies only now: it leaves no step any more
                limit = min(limit, now + _DEAD_SECONDS)
            if now > limit:
                self._error = self._error or SparseKVError("search threads do not end")
                break
            time.sleep(0)
        self.check()  # what threads may still write to stays where it is
        self._mailboxes[lane] = None

    def close(self) -> None:
        """Cancels what is in flight and ends all threads."""
        for mailbox in self._mailboxes:
            if mailbox is not None:
                mailbox.cancel()
        write_word(self._end.ctypes.data, 1)
        for semaphore in self._semaphores:
            post(semaphore.ctypes.data)
        for thread in self._threads:
            thread.join()
        self._mailboxes = [None] * len(self._mailboxes)

    def _address(self, lane: int, word: int) -> int:
        return int(self._lanes.ctypes.data) + (lane * LANE_WORDS + word) * _WORD_BYTES

    def _run(self, number: int) -> None:
        semaphore = int(self._semaphores[number].ctypes.data)
        try:
            take_part(self._lanes.ctypes.data, len(self._lanes), semaphore, self._end.ctypes.data)
        except BaseException as error:
            logger.exception("a search thread has died")
            self._error = error
            for mailbox in self._mailboxes:
                if mailbox is not None:
                    mailbox.cancel()


def _check_numbers(threads: int, lanes: int) -> None:
    if threads < 1 or lanes < 1:
        raise InvalidArgumentError(f"{threads} search threads for {lanes} lanes, expected at least one each")
