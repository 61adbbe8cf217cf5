"""A durable queue of prefill jobs beside a store's contexts: workers take jobs from it, servers add and watch them.

`jobs/<id>/` holds one job (`job_record`). Only who holds the job's lock writes its record; the lock dies with its
process, so a job without one is nobody's. A job appears by one rename.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index_store.errors import (
    InvalidArgumentError,
    JobCorruptError,
    JobNotFoundError,
    JobUnfinishedError,
    QueueFullError,
    StoreUnavailableError,
)
from index_store.jobs.job_record import (
    Claim,
    JobFolder,
    JobRecord,
    JobState,
    ReadRecord,
    is_job_id,
    unknown_job,
)
from index_store.store.description.callers import OPERATOR, Caller, crowds
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    TRASH_PREFIX,
    discard,
    is_locked,
    locked_file,
    locked_within,
    make_folder,
    permissions_in,
    remove_tree,
    storing,
)
from index_store.store.files.reading import unavailable
from index_store.store.store_folders import JOB_LOCK_PREFIX

MOST_JOBS = 1000
"""Jobs that have not ended."""
MOST_BYTES = 4 << 30
"""Of their documents, as token ids."""
MOST_ENDED = 1000
KEPT_ENDED = timedelta(days=7)
"""How many jobs that have ended are remembered, and how long."""

_NEVER = datetime.min.replace(tzinfo=UTC)
_QUEUE_LOCK = f"{JOB_LOCK_PREFIX}queue"
_WORKER_LOCK = f"{JOB_LOCK_PREFIX}worker-"
_STRAY = timedelta(hours=1)
_RETRY_S = 5.0
_LOOKS_S = 0.05  # a look at who holds a lock (`held`) holds it for a moment, too

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokenJob:
    """A job whose record cannot be used."""

    id: str
    error: JobCorruptError | StoreUnavailableError


Entry = JobRecord | BrokenJob


class JobQueue:
    """The jobs of one store. Safe to use from several threads and processes at once.

    What reads may raise StoreUnavailableError, what writes StoreFullError and StoreError.
    """

    def __init__(
        self,
        store: str | Path,
        *,
        most_jobs: int = MOST_JOBS,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """store: the folder of a store that is there. most_jobs, most_bytes: of jobs that have not ended."""
        self._store = Path(store)
        self._jobs = self._store / "jobs"
        self._locks = self._store / "locks"
        self._most_jobs = most_jobs
        self._most_bytes = most_bytes
        self._clock = clock
        self._caller = OPERATOR
        self._known: dict[str, ReadRecord] = {}
        self._told: set[str] = set()

    def seen_by(self, caller: Caller) -> JobQueue:
        """The same queue for a caller, for whom others' jobs, and those that cannot be read, are not there."""
        seen = copy.copy(self)
        seen._caller = caller
        return seen

    def repeated(self, record_id: str, request: str, digest: str) -> JobRecord | None:
        """The job of a request that came before, if it did. request: its id. digest: of what it is.

        Raises InvalidArgumentError where it was another one, JobCorruptError.
        """
        try:
            found = self.get(record_id)
        except JobNotFoundError:
            return None
        if found.digest != digest:
            raise InvalidArgumentError(
                f"request_id {request!r} was used for another request (operation {found.id}); choose a new one for "
                "every request",
                field="request_id",
            )
        return found

    def add(
        self, record: JobRecord, tokens: NDArray[np.uint32] | None = None, conversation: bytes | None = None
    ) -> JobRecord:
        """Queues a job durably, or returns the one that there is already. tokens: None where none come with its order.

        That is the job of the same id, an open one of the same order, or one that is done where this one is. A record
        that has ended already is kept as it is, without its tokens. Raises InvalidArgumentError where the job of
        the same id has another order, QueueFullError when there are too many jobs.
        """
        self._make_folders()
        with locked_file(self._locks / _QUEUE_LOCK):
            entries = self.entries()
            there = self.repeated(record.id, record.request, record.digest)
            if there is not None:
                return there
            jobs = [entry for entry in entries if isinstance(entry, JobRecord)]
            for job in jobs:
                alike = job.order == record.order and job.state is record.state
                if alike and not record.request and not self._files(job.id).unwanted:
                    return job
            self._forget([job for job in jobs if not job.open])
            if record.open:
                self._check_room(record, [job for job in jobs if job.open])
            with storing("queueing a job", self._jobs):
                self._files(record.id).create(record, tokens, conversation)
        return record

    def entries(self) -> list[Entry]:
        """All jobs: open ones in the order in which they are to be taken, then those that ended, the newest first.

        A tenant's are taken by priority, then by age; tenants take turns. Those that cannot be used come last.
        """
        try:
            names = os.listdir(self._jobs)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unavailable(self._jobs, error) from error
        found: list[Entry] = []
        for name in names:
            if is_job_id(name):
                with suppress(JobNotFoundError):
                    found.append(self.entry(name))
        known = self._known  # which other threads replace
        self._known = {entry.id: known[entry.id] for entry in found if entry.id in known}
        records = [entry for entry in found if isinstance(entry, JobRecord)]
        waiting = sorted((record for record in records if record.open), key=lambda record: record.turn)
        ended = sorted((record for record in records if not record.open), key=_newest_first)
        broken = sorted(
            (entry for entry in found if isinstance(entry, BrokenJob)), key=lambda entry: entry.id
        )
        served: dict[str, datetime] = {}
        for record in ended:
            last = served.get(record.order.tenant, _NEVER)
            served[record.order.tenant] = max(last, record.ended_at or record.created_at)
        return [*_in_rounds(waiting, served), *ended, *broken]

    def entry(self, id_: str) -> Entry:
        """One job, as it is now. Raises JobNotFoundError."""
        try:
            return self.get(id_)
        except (JobCorruptError, StoreUnavailableError) as error:
            if not self._caller.admin:
                raise unknown_job(id_) from None
            return BrokenJob(id_, error)

    def get(self, id_: str) -> JobRecord:
        """A job's record. Raises JobNotFoundError, JobCorruptError."""
        found = self._known[id_] = self._files(id_).read(self._known.get(id_))
        if not self._caller.owns(found.record.order.tenant):
            raise unknown_job(id_)
        return found.record

    def held(self, id_: str) -> bool:
        """Whether a worker has the job now."""
        return is_locked(self._lock(id_))

    @contextmanager
    def attending(self, model: str) -> Iterator[None]:
        """Shows while the block runs that somebody takes jobs of the model. model: its fingerprint.

        Raises StoreFullError or StoreError.
        """
        self._make_folders()
        with locked_file(self._locks / f"{_WORKER_LOCK}{model}-{secrets.token_hex(8)}"):
            yield

    def attended(self, model: str) -> bool:
        """Whether somebody takes jobs of the model now; also True where that cannot be found out."""
        try:
            names = os.listdir(self._locks)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        return any(
            is_locked(self._locks / name) for name in names if name.startswith(f"{_WORKER_LOCK}{model}-")
        )

    def cancel(self, id_: str) -> None:
        """Has an open job end as cancelled: at once where no worker has it, soon otherwise; nothing happens to others.

        Raises JobNotFoundError, JobCorruptError.
        """
        if not self.get(id_).open:
            return
        self._files(id_).mark_unwanted()
        with self._claimed(id_) as claim:
            if claim is not None:
                claim.end(self.cancelled(claim.record))

    def remove(self, id_: str) -> None:
        """Forgets a job that has ended, or that is damaged. Raises JobNotFoundError, JobUnfinishedError."""
        entry = self.entry(id_)
        with locked_within(self._lock(id_), _LOOKS_S) as held:
            if not held or (isinstance(entry, JobRecord) and entry.open):
                raise JobUnfinishedError(
                    f"operation {id_} has not ended; cancel it first, or wait for its end", operation=id_
                )
            with storing("removing a job", self.folder(id_)):
                discard(self.folder(id_))

    @contextmanager
    def claim(self, accepts: Callable[[JobRecord], bool] = lambda record: True) -> Iterator[Claim | None]:
        """Takes the next job that nobody has and that is accepted; None without one. The lock is held in the block.

        Jobs whose context another worker makes right now are passed over: they would only wait for it.
        """
        with ExitStack() as stack:
            busy: set[str] = set()
            claimed: Claim | None = None
            for entry in self.entries():
                if isinstance(entry, BrokenJob):
                    self._tell(entry)
                    continue
                if not entry.open or entry.order.context in busy or not accepts(entry):
                    continue
                attempt = ExitStack()
                claimed = attempt.enter_context(self._claimed(entry.id))
                if claimed is not None:
                    stack.push(attempt)
                    break
                attempt.close()
                busy.add(entry.order.context)
            yield claimed

    def cancelled(self, record: JobRecord) -> JobRecord:
        """The record of a job that was cancelled now."""
        return replace(record, state=JobState.CANCELLED, ended_at=self._clock())

    def now(self) -> datetime:
        """The present time in UTC."""
        return self._clock()

    def tidy(self) -> None:
        """Removes what nobody needs: what killed writers left, and jobs that ended long ago."""
        try:
            names = os.listdir(self._jobs)
        except OSError:
            return
        stray = (self._clock() - _STRAY).timestamp()
        for name in names:
            path = self._jobs / name
            with suppress(OSError):
                if name.startswith((TEMPORARY_PREFIX, TRASH_PREFIX)) and os.stat(path).st_mtime < stray:
                    remove_tree(path)
        ended = [entry for entry in self.entries() if isinstance(entry, JobRecord) and not entry.open]
        self._forget(ended)
        for record in ended[:MOST_ENDED]:
            self._files(record.id).clear()

    def folder(self, id_: str) -> Path:
        """A job's folder. Only well-formed ids become paths."""
        if not is_job_id(id_):
            raise InvalidArgumentError(f"job id {id_[:80]!r} is not 32 lower-case hex digits")
        return self._jobs / id_

    def _files(self, id_: str) -> JobFolder:
        return JobFolder(id_, self.folder(id_))

    @contextmanager
    def _claimed(self, id_: str) -> Iterator[Claim | None]:
        """The job with its lock, None where somebody else has it or it is not open any more."""
        with locked_within(self._lock(id_), _LOOKS_S) as held:
            entry = None
            if held:
                with suppress(JobNotFoundError):
                    entry = self.entry(id_)  # as it is now that nobody else changes it
            yield Claim(id_, self.folder(id_), entry) if isinstance(entry, JobRecord) and entry.open else None

    def _forget(self, ended: Sequence[JobRecord]) -> None:
        """Removes records of jobs that ended long ago, and the oldest where there are too many."""
        for number, record in enumerate(_in_rounds(ended)):
            if number >= MOST_ENDED or (record.ended_at or self._clock()) < self._clock() - KEPT_ENDED:
                with suppress(JobNotFoundError, JobUnfinishedError):
                    self.remove(record.id)

    def _lock(self, id_: str) -> Path:
        self.folder(id_)
        return self._locks / f"{JOB_LOCK_PREFIX}{id_}"

    def _make_folders(self) -> None:
        with storing("making the queue's folder", self._jobs):
            permissions = permissions_in(self._store / "contexts")
            make_folder(self._jobs, permissions)
            make_folder(self._locks, permissions)

    def _check_room(self, record: JobRecord, jobs: Sequence[JobRecord]) -> None:
        queued = sum(job.order.tokens * 4 for job in jobs)
        tenant = record.order.tenant
        own = [job.order.tokens * 4 for job in jobs if job.order.tenant == tenant]
        crowded = crowds(tenant, len(own), self._most_jobs - len(jobs)) or crowds(
            tenant, sum(own), self._most_bytes - queued
        )
        if (
            len(jobs) < self._most_jobs
            and queued + record.order.tokens * 4 <= self._most_bytes
            and not crowded
        ):
            return
        error = QueueFullError(
            f"{len(jobs)} contexts with documents of {queued} bytes wait to be made, the limits are {self._most_jobs} "
            f"and {self._most_bytes}; try again later",
            jobs=len(jobs),
            limit=self._most_jobs,
        )
        error.retry_after_s = _RETRY_S
        raise error

    def _tell(self, broken: BrokenJob) -> None:
        """Logs a job that cannot be used, once."""
        if broken.id not in self._told:
            self._told.add(broken.id)
            logger.warning("a job is passed over: %s", broken.error.message)


def _in_rounds(records: Iterable[JobRecord], served: Mapping[str, datetime] | None = None) -> list[JobRecord]:
    """The first of each tenant, then the second of each, and so on: nobody's many keep others' from their turn.

    served: when each had one last; in every round who had none for longest is first.
    """
    counts: Counter[str] = Counter()
    rounds: list[tuple[int, datetime, JobRecord]] = []
    for record in records:
        tenant = record.order.tenant
        rounds.append((counts[tenant], (served or {}).get(tenant, _NEVER), record))
        counts[tenant] += 1
    return [record for _, _, record in sorted(rounds, key=lambda each: each[:2])]


def _newest_first(record: JobRecord) -> tuple[float, str]:
    return (-record.created_at.timestamp(), record.id)
