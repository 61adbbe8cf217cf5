"""Where a batch on a device and threads that search for it leave each other queries and lists; and these threads.

Each thread runs one compiled function for as long as it lives and never holds the interpreter's lock there. It sleeps
on a semaphore while no step is in flight, and spins over the mailboxes of the steps that are.

Shape legend: B rows of a batch, H KV heads, R = B * H lists, G query heads per KV head, d head dim, W room of a list, S
searches of a step, P tiles of the longest context, N keys of it, L searched queries of a list.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.host_search import shared_search_numba as jobs
from decode_engine.host_search.mailbox_triton import SharedWords
from decode_engine.host_search.shared_search_numba import compile_search, take_part
from decode_engine.host_search.table_lists_numba import BINS
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.indexes.query_tables.search_numba import TILE

_WORD_BYTES = 8
LIST_SHARE = 8
"""Lists have room for an eighth of the longest context's keys."""
_LEAST_WIDTH = 1024


def list_width(max_keys: int) -> int:
    """Room of a list in contexts of up to so many keys."""
    return max(_LEAST_WIDTH, max_keys // LIST_SHARE)


@dataclass(frozen=True, slots=True)
class MailboxSizes:
    """What a mailbox is sized for.

    rows: B. layers: of the model, all of which may be searched. max_keys: N.
    """

    rows: int
    heads: int
    group: int
    head_dim: int
    subspaces: int
    centroids: int
    pooled: bool
    strided: bool
    layers: int
    max_keys: int

    @property
    def waves(self) -> int:
        """In how many parts, by KV heads, the device waits for the lists of a layer.

        A wave costs three launches a layer, about 7 us, and hides fetches behind searches, which take longer for more
        rows: two were fastest for one, four for more.
        """
        return min(2 if self.rows == 1 else 4, self.heads)

    @property
    def wave_heads(self) -> list[range]:
        ends = [self.heads * wave // self.waves for wave in range(self.waves + 1)]
        return [range(*pair) for pair in pairwise(ends)]

    @property
    def queries(self) -> int:
        """Searched queries of a KV head."""
        return 1 if self.pooled else self.group

    @property
    def lists(self) -> int:
        return self.rows * self.heads

    @property
    def tiles(self) -> int:
        return -(-self.max_keys // TILE)

    @property
    def width(self) -> int:
        """Room of a list."""
        return list_width(self.max_keys)


@dataclass(frozen=True, slots=True)
class SearchedRow:
    """What one row of a batch searches in a step.

    row: its number. Keys [first, end) are searched and `keep` of them listed; length: keys of the context. places:
    addresses of tables, centroids and scales for every search, [S, 3] int64. What lies there must stay until the step
    has ended.
    """

    row: int
    first: int
    end: int
    keep: int
    length: int
    places: NDArray[np.int64]


class Mailbox:
    """Queries, lists and words, page-locked when a device shares them, and what threads leave each other.

    One thread begins and ends steps; others may cancel and fail them.
    """

    def __init__(self, sizes: MailboxSizes, *, page_locked: bool) -> None:
        self.sizes = sizes

        def shared(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=page_locked)

        lists = sizes.lists
        self.shared = SharedWords(
            q_BX=shared(sizes.rows, sizes.heads * sizes.group * sizes.head_dim, dtype=torch.float32),
            posted_BX=shared(sizes.rows, jobs.LINE),
            answers_RX=shared(lists, jobs.LINE),
            ids_RW=shared(lists, sizes.width, dtype=torch.int32),
            waits_LR2=shared(sizes.layers, lists, 2),
            trouble_X=shared(jobs.LINE),
        )
        self.steps = 0
        """Steps that were begun. The number of a layer's search in step s is s * layers + layer."""
        self.used: list[int] = []
        self.order: list[int] = []
        self._stop = np.zeros(jobs.LINE, np.int64)
        self._board = np.zeros((sizes.layers, 1 + lists, jobs.LINE), np.int64)
        self._rows = np.zeros((sizes.rows, jobs.ROW_FIELDS), np.int64)
        self._places = np.zeros((sizes.layers, sizes.rows, jobs.PLACES_FIELDS), np.int64)
        self._order = np.zeros(sizes.layers, np.int64)
        queries, tiles = sizes.queries, sizes.tiles
        self._between: dict[int, NDArray[Any]] = {
            jobs.PICKS: np.empty((lists, queries * sizes.subspaces), np.int32),
            jobs.WEIGHTS: np.empty((lists, queries * sizes.subspaces), np.float32),
            jobs.BOUNDS: np.empty((lists, jobs.LINE), np.float32),
            jobs.HISTOGRAMS: np.empty((lists * tiles, BINS), np.int32),
            jobs.PEAKS: np.empty((lists * tiles, queries), np.float32),
            jobs.TOTALS: np.empty((lists * tiles, queries), np.float32),
            jobs.CANDIDATES: np.empty((lists, sizes.max_keys), np.int32),
            jobs.SCORES: np.empty((lists, sizes.max_keys), np.float32),
            jobs.COUNTS: np.empty((lists, tiles), np.int64),
        }
        self._job = self._describe()

    @property
    def job(self) -> NDArray[np.int64]:
        """What compiled searches read (`shared_search_numba`)."""
        return self._job

    @property
    def gave_up(self) -> bool:
        """Whether the device has stopped waiting in this step."""
        return bool(self.shared.trouble_X[0])

    @property
    def stopped(self) -> bool:
        """Whether the step was cancelled or has failed."""
        return bool(jobs.read_word(self._stop.ctypes.data))

    @property
    def finished(self) -> bool:
        """Whether every list of the step's last search has been answered."""
        answers = self.shared.answers_RX.view(self.sizes.rows, self.sizes.heads, jobs.LINE)[self.used, :, 0]
        return bool((answers >> jobs.COUNT_BITS == self.number_of(self.order[-1])).all())

    def begin(self, rows: Sequence[SearchedRow], order: Sequence[int]) -> int:
        """Makes ready for a step of these rows, at least one; its number, from 1 on.

        order: the layers that are searched, ascending, at least one. No thread may be at work. Raises
        InvalidArgumentError for rows that keep more than lists have room for.
        """
        sizes, searches = self.sizes, len(order)
        for row in rows:
            if min(row.keep, row.end - row.first) > sizes.width or row.end > sizes.max_keys:
                raise InvalidArgumentError(
                    f"{row.keep} of {row.end} keys are to be listed; there is room for {sizes.width} of "
                    f"{sizes.max_keys}"
                )
        places = self._places.reshape(-1)[: searches * len(rows) * jobs.PLACES_FIELDS]
        for number, row in enumerate(rows):
            self._rows[number] = row.row, row.first, row.end, row.keep, row.length
            places.reshape(searches, len(rows), jobs.PLACES_FIELDS)[:, number] = row.places
        self.steps += 1
        self.used, self.order = [row.row for row in rows], list(order)
        self._order[:searches] = order
        self._job[jobs.USED] = len(rows)
        self._job[jobs.SEARCHES] = searches
        self._job[jobs.BASE] = self.number_of(0)
        self._board.reshape(-1)[: searches * (1 + len(rows) * sizes.heads) * jobs.LINE] = 0
        if self.stopped:
            self._stop[:] = 0
            self.shared.answers_RX.zero_()
        self.shared.trouble_X.zero_()
        return self.steps

    def cancel(self) -> None:
        """Ends searching, and every wait of the device for this step, at once."""
        jobs.write_word(self._stop.ctypes.data, 1)
        for number in range(self.sizes.lists):
            jobs.write_word(self.shared.answers_RX.data_ptr() + number * jobs.LINE * _WORD_BYTES, jobs.FAILED)

    def number_of(self, layer: int) -> int:
        """What words say about a layer's search in this step."""
        return self.steps * self.sizes.layers + layer

    def post(self, layer: int, q_BX: Tensor) -> None:
        """What a device does: writes the queries of all used rows, and then their words."""
        for row in self.used:
            self.shared.q_BX[row] = q_BX[row]
            jobs.write_word(
                self.shared.posted_BX.data_ptr() + row * jobs.LINE * _WORD_BYTES, self.number_of(layer)
            )

    def answer(self, layer: int, number: int) -> Tensor | None:
        """The ids of a list, once it is there. Raises InterruptedError for a step that has failed."""
        word = jobs.read_word(self.shared.answers_RX.data_ptr() + number * jobs.LINE * _WORD_BYTES)
        if word == jobs.FAILED:
            raise InterruptedError("the search was cancelled")
        if word >> jobs.COUNT_BITS < self.number_of(layer):
            return None
        return self.shared.ids_RW[number, : word & ((1 << jobs.COUNT_BITS) - 1)]

    def waits(self) -> NDArray[np.int64]:
        """When the device waited in the last step, [X, 2] nanoseconds of its clock: a beginning and an end each.

        A wait for every wave of every search, in that order, until the wave's last list came; none before any step.
        """
        if not self.used:
            return np.empty((0, 2), np.int64)
        sizes, searches = self.sizes, len(self.order)
        waits = self.shared.waits_LR2.numpy()[self.order]
        waits_SBH2 = waits.reshape(searches, sizes.rows, sizes.heads, 2)[:, self.used]
        of_waves = [waits_SBH2[:, :, wave.start : wave.stop] for wave in sizes.wave_heads]
        begins = np.stack([wave[..., 0].min((1, 2)) for wave in of_waves], 1)
        ends = np.stack([wave[..., 1].max((1, 2)) for wave in of_waves], 1)
        return np.stack([begins.ravel(), ends.ravel()], 1)

    def waited_ns(self) -> int:
        """Nanoseconds that the device waited in the last step."""
        waits = self.waits()
        return int((waits[:, 1] - waits[:, 0]).sum())

    def _describe(self) -> NDArray[np.int64]:
        sizes = self.sizes
        job = np.zeros(jobs.JOB_FIELDS, np.int64)
        numbers = {
            jobs.HEADS: sizes.heads,
            jobs.GROUP: sizes.group,
            jobs.DIM: sizes.head_dim,
            jobs.SUBSPACES: sizes.subspaces,
            jobs.CENTROIDS: sizes.centroids,
            jobs.QUERIES: sizes.queries,
            jobs.STRIDED: int(sizes.strided),
            jobs.TILES: sizes.tiles,
            jobs.KEYS: sizes.max_keys,
            jobs.WIDTH: sizes.width,
        }
        arrays: dict[int, NDArray[Any]] = {
            jobs.STOP: self._stop,
            jobs.BOARD: self._board,
            jobs.PLACES: self._places,
            jobs.ROWS: self._rows,
            jobs.ORDER: self._order,
        }
        arrays.update(self._between)
        tensors = {
            jobs.Q: self.shared.q_BX,
            jobs.POSTED: self.shared.posted_BX,
            jobs.ANSWERS: self.shared.answers_RX,
            jobs.IDS: self.shared.ids_RW,
        }
        for field, number in numbers.items():
            job[field] = number
        for field, array in arrays.items():
            job[field] = array.ctypes.data
        for field, tensor in tensors.items():
            job[field] = tensor.data_ptr()
        return job


_END_SECONDS, _DEAD_SECONDS = 10.0, 0.1

logger = logging.getLogger(__name__)


class SearchThreads:
    """Threads that are started when they are first asked for."""

    def __init__(self, threads: int) -> None:
        """Raises InvalidArgumentError without a thread."""
        _check_threads(threads)
        self.threads = threads
        self._workers: SearchWorkers | None = None

    @property
    def workers(self) -> SearchWorkers:
        if self._workers is None:
            self._workers = SearchWorkers(self.threads)
            logger.info("%d threads search on the host", self.threads)
        return self._workers

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None


class SearchWorkers:
    """Threads that search for one step at a time, in whichever mailbox."""

    def __init__(self, threads: int) -> None:
        """Raises InvalidArgumentError without a thread."""
        _check_threads(threads)
        compile_search()
        self._step = np.zeros(jobs.STEP_WORDS, np.int64)
        self._mailbox: Mailbox | None = None
        self._epochs = 0
        self._end = np.zeros(jobs.LINE, np.int64)
        self._semaphores = np.zeros((threads, jobs.SEMAPHORE_WORDS), np.int64)
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"search-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def check(self) -> None:
        """Raises SparseKVError when a thread has died or does not end: mailboxes are then as threads may use them."""
        if self._error is not None:
            raise SparseKVError(
                f"searching on the host has failed: {self._error}; restart the server, or serve such contexts with "
                "--placement hybrid"
            ) from self._error

    def begin(self, mailbox: Mailbox) -> None:
        """Lets the threads search for a step that the mailbox has begun. The step before must have ended.

        Raises SparseKVError when a thread has died.
        """
        self.check()
        if self._mailbox is not None:
            raise RuntimeError("a step is in flight")
        self._mailbox = mailbox
        self._epochs += 1
        self._step[jobs.JOB] = mailbox.job.ctypes.data
        jobs.write_word(self._address(jobs.EPOCH), self._epochs)
        if self._error is not None:  # a thread that died meanwhile saw no mailbox here
            mailbox.cancel()
        for semaphore in self._semaphores:
            jobs.post(semaphore.ctypes.data)

    def end(self) -> None:
        """Returns when no thread is at work on the step any more; one that is unfinished is cancelled.

        Raises SparseKVError when a thread has died.
        """
        mailbox = self._mailbox
        if mailbox is None:
            return
        jobs.write_word(self._address(jobs.EPOCH), 0)
        if not mailbox.finished:
            mailbox.cancel()
        limit = time.monotonic() + _END_SECONDS
        while jobs.read_word(self._address(jobs.INSIDE)):
            now = time.monotonic()
            if self._error is not None:  # also a thread that dies only now: it leaves no step any more
                limit = min(limit, now + _DEAD_SECONDS)
            if now > limit:
                self._error = self._error or SparseKVError("search threads do not end")
                break
            time.sleep(0)
        self.check()  # what threads may still write to stays where it is
        self._mailbox = None

    def close(self) -> None:
        """Cancels what is in flight and ends all threads."""
        if self._mailbox is not None:
            self._mailbox.cancel()
        jobs.write_word(self._end.ctypes.data, 1)
        for semaphore in self._semaphores:
            jobs.post(semaphore.ctypes.data)
        for thread in self._threads:
            thread.join()
        self._mailbox = None

    def _address(self, word: int) -> int:
        return int(self._step.ctypes.data) + word * _WORD_BYTES

    def _run(self, number: int) -> None:
        semaphore = int(self._semaphores[number].ctypes.data)
        try:
            take_part(self._step.ctypes.data, semaphore, self._end.ctypes.data)
        except BaseException as error:
            logger.exception("a search thread has died")
            self._error = error
            if self._mailbox is not None:
                self._mailbox.cancel()


def _check_threads(threads: int) -> None:
    if threads < 1:
        raise InvalidArgumentError(f"{threads} search threads, expected at least one")
