"""The queue of jobs: what is added stays, in order and within bounds; one bad file hides no other job."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from index_store.errors import (
    ContextCorruptError,
    InvalidArgumentError,
    JobCorruptError,
    JobNotFoundError,
    JobUnfinishedError,
    ManifestError,
    QueueFullError,
    SparseKVError,
    StoreUnavailableError,
    UploadNotFoundError,
)
from index_store.jobs import uploads as module
from index_store.jobs.job_queue import KEPT_ENDED, BrokenJob, JobQueue
from index_store.jobs.job_record import JOBS, JobFailure, JobOrder, JobRecord, JobState, ReadRecord
from index_store.jobs.uploads import LIFETIME, Upload, Uploads
from index_store.store.catalog import Store
from index_store.store.files import durable
from index_store.store.store_folders import JOB_LOCK_PREFIX
from tests.support.store import raising

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class Times:
    """A clock that a test sets."""

    now = BEGIN

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Times:
    return Times()


@pytest.fixture
def queue(tmp_path: Path, clock: Times) -> JobQueue:
    Store(tmp_path, create=True)
    return JobQueue(tmp_path, most_jobs=4, most_bytes=400, clock=clock)


def record(number: int, age: int = 0, *, tokens: int = 3, request: str = "", priority: int = 0) -> JobRecord:
    order = JobOrder(
        context=f"{number:064x}",
        model="m",
        model_name="model",
        name="",
        title="title",
        methods=("csattention",),
        dtype="float32",
        ttl=None,
        tokens=tokens,
    )
    created = BEGIN - timedelta(seconds=age)
    return JobRecord(f"{number:032x}", order, created, request=request, priority=priority)


def ids(count: int = 3) -> NDArray[np.uint32]:
    return np.arange(count, dtype=np.uint32)


def test_jobs_are_taken_by_priority_then_by_age(queue: JobQueue) -> None:
    for added in (record(1, 1), record(2, 5), record(3, 2, priority=1)):
        queue.add(added, ids())
    taken = []
    for _ in range(3):
        with queue.claim() as claim:
            assert claim.tokens().tolist() == [0, 1, 2]
            taken.append(int(claim.record.id, 16))
            claim.end(queue.cancelled(claim.record))
    assert taken == [3, 2, 1]
    with queue.claim() as claim:
        assert claim is None


def test_a_job_is_one_workers_at_a_time_and_contexts_are_not_made_twice(queue: JobQueue) -> None:
    first = queue.add(record(1, 2), ids())
    twin = replace(record(2, 1, request="other"), order=first.order)
    queue.add(twin, ids())
    other = JobQueue(queue.folder(first.id).parents[1])
    with queue.claim() as claim, other.claim() as second:
        assert claim.record.id == first.id
        assert second is None
        assert other.held(first.id)
        assert not other.held(twin.id)
    assert not other.held(first.id)
    with other.claim(lambda found: found.id == twin.id) as second:
        assert second is not None


def test_a_look_at_a_job_does_not_keep_it_from_others(
    queue: JobQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks whether a job is held has a shared lock for a moment; here until its claimer waits."""
    job = queue.add(record(1), ids())
    lock = tmp_path / "locks" / f"{JOB_LOCK_PREFIX}{job.id}"
    looking: list[int] = []

    def look() -> None:
        looking.append(os.open(lock, os.O_RDONLY | os.O_CREAT))
        fcntl.flock(looking[-1], fcntl.LOCK_SH)

    monkeypatch.setattr(durable.time, "sleep", lambda seconds: os.close(looking.pop()))
    look()
    with queue.claim() as claim:
        claim.end(queue.cancelled(claim.record))
    look()
    queue.remove(job.id)
    assert queue.entries() == []
    assert looking == []


def test_a_list_is_made_while_others_make_theirs(queue: JobQueue) -> None:
    class Exchanged(dict[str, ReadRecord]):
        """What another thread replaces between two looks at it."""

        def __contains__(self, id_: object) -> bool:
            queue._known = {}
            return super().__contains__(id_)

    job = queue.add(record(1), ids())
    queue._known = Exchanged(queue._known)
    assert queue.entries() == [job]


def test_the_same_order_is_one_job_unless_requests_differ(queue: JobQueue) -> None:
    first = queue.add(record(1), ids())
    assert queue.add(replace(record(2), order=first.order), ids()) == first
    assert queue.add(first, ids()) == first
    other = replace(record(3, request="r"), order=first.order)
    assert queue.add(other, ids()).id == other.id
    with pytest.raises(InvalidArgumentError, match="request_id"):
        queue.add(replace(other, digest="0" * 64), ids())
    queue.cancel(first.id)
    again = replace(record(4), order=first.order)
    assert queue.add(again, ids()).id == other.id
    queue.cancel(other.id)
    assert queue.add(again, ids()).id == again.id


def test_jobs_and_bytes_are_bounded(queue: JobQueue) -> None:
    queue.add(record(1, tokens=90), ids(90))
    with pytest.raises(QueueFullError, match="the limits are 4 and 400") as caught:
        queue.add(record(2, tokens=11), ids(11))
    assert caught.value.retry_after_s is not None
    for number in (2, 3, 4):
        queue.add(record(number), ids())
    with pytest.raises(QueueFullError):
        queue.add(record(5, tokens=1), ids(1))
    queue.cancel(record(1).id)
    queue.add(record(5, tokens=1), ids(1))


def test_a_cancelled_job_ends_at_once_or_with_its_worker(queue: JobQueue) -> None:
    waiting, held = queue.add(record(1, 1), ids()), queue.add(record(2), ids())
    queue.cancel(waiting.id)
    assert queue.get(waiting.id).state is JobState.CANCELLED
    with queue.claim() as claim:
        queue.cancel(held.id)
        assert queue.get(held.id).open
        assert claim.unwanted
        with pytest.raises(JobUnfinishedError):
            queue.remove(held.id)
        claim.end(queue.cancelled(claim.record))
    assert [path.name for path in queue.folder(held.id).iterdir()] == ["job.json"]
    queue.remove(held.id)
    with pytest.raises(JobNotFoundError):
        queue.get(held.id)
    with pytest.raises(JobNotFoundError):
        queue.cancel(held.id)


def test_one_bad_file_hides_no_other_job(queue: JobQueue, caplog: pytest.LogCaptureFixture) -> None:
    fine = queue.add(record(1), ids())
    for number, contents in ((2, b"{}"), (3, b"\xff"), (4, None)):
        folder = queue.folder(f"{number:032x}")
        folder.mkdir()
        if contents is not None:
            (folder / "job.json").write_bytes(contents)
    entries = queue.entries()
    assert entries[0] == fine
    assert [type(entry) for entry in entries[1:]] == [BrokenJob] * 3
    for _ in range(2):
        with queue.claim() as claim:
            assert claim.record == fine
    assert [logged.levelname for logged in caplog.records] == []  # the one that is taken comes first
    queue.cancel(fine.id)
    for _ in range(2):
        with queue.claim() as claim:
            assert claim is None
    assert len(caplog.records) == 3
    queue.remove(f"{2:032x}")


def test_what_a_record_says_is_checked() -> None:
    good = record(1)
    failure = JobFailure.of(ContextCorruptError("two\nlines", path="p"))
    failed = replace(
        good, state=JobState.FAILED, failure=failure, ended_at=BEGIN, notes=("a",), furthest=(7, 2)
    )
    assert JOBS.parse(JOBS.render(failed), "file") == failed
    for wrong in ({"ttl": 0.5}, {"tokens": 0}, {"methods": ()}, {"context": "x"}, {"dtype": "int8"}):
        with pytest.raises(ManifestError):
            replace(good.order, **wrong)  # type: ignore[arg-type]
    for furthest in ((1,), (1, 2, 3), (0, -1)):
        with pytest.raises(ManifestError, match="furthest"):
            JOBS.render(replace(good, furthest=furthest))


def test_notes_and_failures_are_bounded_and_printable() -> None:
    noted = record(1)
    for number in range(30):
        noted = noted.noted(f"{number}\n" + "x" * 9000)
    assert len(noted.notes) == 20
    assert noted.notes[-1].startswith("29 x")
    assert JOBS.parse(JOBS.render(noted), "file") == noted
    assert JobFailure.of(SparseKVError("a\x00b" * 9000)).message.isprintable()


def test_messages_travel_with_their_tokens(queue: JobQueue) -> None:
    kept = b'{"messages": []}'
    plain = record(1)
    order = replace(plain.order, conversation=hashlib.sha256(kept).hexdigest())
    job = queue.add(replace(plain, order=order), ids(), kept)
    with queue.claim() as claim:
        assert claim.conversation() == kept
        (claim.path / "conversation").write_bytes(b"{}")
        with pytest.raises(JobCorruptError, match="not what was written"):
            claim.conversation()
        claim.end(queue.cancelled(claim.record))
    assert not (queue.folder(job.id) / "conversation").exists()
    queue.add(record(2), ids())
    with queue.claim() as claim:
        assert claim.conversation() is None


def test_tokens_that_were_lost_are_found_out(queue: JobQueue) -> None:
    job = queue.add(record(1), ids())
    (queue.folder(job.id) / "tokens").write_bytes(b"12345")
    with queue.claim() as claim, pytest.raises(JobCorruptError, match="5 bytes, expected 12"):
        claim.tokens()


def test_ended_jobs_are_remembered_for_a_week(queue: JobQueue, clock: Times) -> None:
    job = queue.add(record(1), ids())
    queue.cancel(job.id)
    (queue.folder(job.id) / "left").write_text("by a killed worker")
    stray = queue.folder(job.id).parent / ".tmp-1"
    stray.mkdir()
    queue.tidy()
    assert not queue.get(job.id).open
    assert not (queue.folder(job.id) / "left").exists()
    clock.now = datetime.now(UTC) + KEPT_ENDED + timedelta(hours=2)
    queue.tidy()
    assert not queue.folder(job.id).exists()
    assert not stray.exists()


def test_ids_are_no_paths(queue: JobQueue) -> None:
    for wrong in ("..", "", "A" * 32, "0" * 31, "../" + "0" * 32):
        with pytest.raises(InvalidArgumentError):
            queue.get(wrong)


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    Store(tmp_path, create=True)
    return Uploads(tmp_path)


def send(uploads: Uploads, *parts: bytes, sha256: str = "") -> Upload:
    writing = uploads.begin()
    try:
        for part in parts:
            writing.add(part)
        return writing.finish(sha256)
    finally:
        writing.discard()


def test_a_document_is_its_parts_and_is_used_once(uploads: Uploads, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"one two").hexdigest()
    there = send(uploads, b"one ", b"two", sha256=digest.upper())
    assert (there.nbytes, there.sha256) == (7, digest)
    assert uploads.read(there.id) == b"one two"
    uploads.remove(there.id)
    uploads.remove(there.id)
    with pytest.raises(UploadNotFoundError):
        uploads.read(there.id)
    assert list((tmp_path / "uploads").iterdir()) == []


def test_what_is_wrong_leaves_nothing(
    uploads: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="empty"):
        send(uploads)
    with pytest.raises(InvalidArgumentError, match="send it again"):
        send(uploads, b"a", sha256="0" * 64)
    monkeypatch.setattr(module, "MOST_DOCUMENT_BYTES", 3)
    with pytest.raises(InvalidArgumentError, match="more than 3 bytes"):
        send(uploads, b"ab", b"cd")
    assert list((tmp_path / "uploads").iterdir()) == []


def test_a_damaged_document_is_told(uploads: Uploads, tmp_path: Path) -> None:
    there = send(uploads, b"text")
    (path,) = (tmp_path / "uploads").iterdir()
    path.write_bytes(b"tent")
    with pytest.raises(JobCorruptError, match="does not fit its checksum"):
        uploads.read(there.id)


def test_unused_documents_are_bounded_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path, create=True)
    monkeypatch.setattr(module, "MOST_DOCUMENT_BYTES", 4)
    there = send(Uploads(tmp_path, most_bytes=7), b"text")
    with pytest.raises(QueueFullError, match="the limit is 7"):
        Uploads(tmp_path, most_bytes=7).begin()
    later = Uploads(tmp_path, most_bytes=7, clock=lambda: datetime.now(UTC) + LIFETIME + timedelta(seconds=1))
    with pytest.raises(UploadNotFoundError):
        later.read(there.id)
    later.begin().discard()
    assert list((tmp_path / "uploads").iterdir()) == []


def test_what_is_removed_meanwhile_is_gone(uploads: Uploads, tmp_path: Path) -> None:
    """A link to nothing is listed and not there, as a file that is removed between the two."""
    there = send(uploads, b"text")
    (path,) = (tmp_path / "uploads").iterdir()
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(UploadNotFoundError):
        uploads.read(there.id)
    uploads.remove(there.id)
    uploads.begin().discard()


def test_what_cannot_be_listed_now_is_not_gone(uploads: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    there = send(uploads, b"text")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_status", raising(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(StoreUnavailableError):
            uploads.read(there.id)
    assert uploads.read(there.id) == b"text"


def test_ids_of_uploads_are_no_paths(uploads: Uploads) -> None:
    for wrong in ("", "*", "..", "0" * 31, "?" * 32):
        with pytest.raises(UploadNotFoundError):
            uploads.read(wrong)
