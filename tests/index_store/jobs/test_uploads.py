"""Uploaded documents: there as a whole or not at all, within bounds, and not for ever."""

from __future__ import annotations

import errno
import hashlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from index_store.errors import (
    InvalidArgumentError,
    JobCorruptError,
    QueueFullError,
    StoreUnavailableError,
    UploadNotFoundError,
)
from index_store.jobs import uploads as module
from index_store.jobs.uploads import LIFETIME, Upload, Uploads
from index_store.store.catalog import Store


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

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(module, "_status", refuse)
        with pytest.raises(StoreUnavailableError):
            uploads.read(there.id)
    assert uploads.read(there.id) == b"text"


def test_ids_are_no_paths(uploads: Uploads) -> None:
    for wrong in ("", "*", "..", "0" * 31, "?" * 32):
        with pytest.raises(UploadNotFoundError):
            uploads.read(wrong)
