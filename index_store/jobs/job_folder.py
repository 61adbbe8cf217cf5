"""The files of one job: its record, the document that comes with its order, and whether it is still wanted.

`job.json` (`job_record`), `tokens` (uint32) and perhaps `conversation` (the messages that they are), both until it has
ended, `cancel` (a file that says that it is not wanted any more), and whatever its workers keep there to go on from.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index_store.errors import JobCorruptError, JobNotFoundError
from index_store.jobs.job_record import JOBS, JobRecord
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    new_file,
    permissions_in,
    remove_tree,
    replace_file,
    storing,
    sync_path,
    sync_tree,
    unused_name,
)
from index_store.store.files.reading import WrongFileError, read_file, unavailable

_RECORD, _TOKENS, _CONVERSATION, _CANCEL = "job.json", "tokens", "conversation", "cancel"
_LARGEST = 1 << 20
_LARGEST_CONVERSATION = 1 << 28


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """A record that was read. stamp: what tells its file from a later one."""

    record: JobRecord
    stamp: tuple[int, int, int]


class JobFolder:
    """One job's files, which need not be there. What reads may raise StoreUnavailableError."""

    def __init__(self, id_: str, path: Path) -> None:
        self.path = path
        self._id = id_

    def read(self, known: ReadRecord | None) -> ReadRecord:
        """The record as it is now: `known` itself where that is it. Raises JobNotFoundError, JobCorruptError."""
        path = self.path / _RECORD
        try:
            if known is not None and known.stamp == _stamp(os.stat(path)):
                return known
            data, status = read_file(path, _LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            if self.path.is_dir():
                raise _damaged(path, "not there") from None
            raise self._missing() from None
        except WrongFileError as error:
            raise _damaged(path, error.strerror or "no file") from error
        except OSError as error:
            raise unavailable(path, error) from error
        record = JOBS.parse(data, str(path))
        if record.id != self._id:
            raise _damaged(path, f"of job {record.id}")
        return ReadRecord(record, _stamp(status))

    def write(self, record: JobRecord) -> None:
        """Replaces the record, durably. Raises StoreFullError or StoreError."""
        path = self.path / _RECORD
        with storing("writing a job", path):
            replace_file(path, JOBS.render(record), permissions_in(self.path.parent))

    def create(
        self, record: JobRecord, tokens: NDArray[np.uint32] | None, conversation: bytes | None
    ) -> None:
        """Makes the folder appear with all of its files at once; without the document where the job has ended."""
        permissions = permissions_in(self.path.parent)
        folder = unused_name(self.path.parent, f"{TEMPORARY_PREFIX}{record.id}")
        folder.mkdir(permissions)
        try:
            if record.open and tokens is not None:
                with new_file(folder / _TOKENS, permissions) as file:
                    file.write(np.ascontiguousarray(tokens, dtype="<u4").data)
                if conversation is not None:
                    with new_file(folder / _CONVERSATION, permissions) as file:
                        file.write(conversation)
            with new_file(folder / _RECORD, permissions) as file:
                file.write(JOBS.render(record))
            sync_tree(folder)
            os.rename(folder, self.path)
            sync_path(self.path.parent)
        except BaseException:
            remove_tree(folder)
            raise

    def clear(self) -> None:
        """Removes all of an ended job but its record."""
        with storing("removing what a job needs no more", self.path):
            for path in self.path.iterdir() if self.path.is_dir() else ():
                if path.name != _RECORD:
                    remove_tree(path)

    @property
    def unwanted(self) -> bool:
        """Whether the job is to be cancelled."""
        return (self.path / _CANCEL).exists()

    def mark_unwanted(self) -> None:
        """Notes, durably, that the job is to be cancelled. Raises JobNotFoundError."""
        with storing("cancelling a job", self.path):
            try:
                new_file(self.path / _CANCEL, permissions_in(self.path.parent)).close()
                sync_path(self.path)
            except FileNotFoundError as error:
                raise self._missing() from error

    def tokens(self, record: JobRecord) -> NDArray[np.uint32]:
        """The document, uint32 [tokens]. Raises JobCorruptError."""
        expected = record.order.tokens * 4
        data = self._read(_TOKENS, expected)
        if len(data) != expected:
            raise _damaged(self.path / _TOKENS, f"{len(data)} bytes, expected {expected}")
        return np.frombuffer(data, dtype="<u4")

    def conversation(self, record: JobRecord) -> bytes | None:
        """What is kept of the messages that the tokens are, None for a text. Raises JobCorruptError."""
        expected = record.order.conversation
        if not expected:
            return None
        data = self._read(_CONVERSATION, _LARGEST_CONVERSATION)
        if hashlib.sha256(data).hexdigest() != expected:
            raise _damaged(self.path / _CONVERSATION, "not what was written")
        return data

    def _missing(self) -> JobNotFoundError:
        return JobNotFoundError(f"there is no operation {self._id}", operation=self._id)

    def _read(self, name: str, most: int) -> bytes:
        path = self.path / name
        try:
            return read_file(path, most)[0]
        except (FileNotFoundError, WrongFileError) as error:
            raise _damaged(path, error.strerror or "not there") from error
        except OSError as error:
            raise unavailable(path, error) from error


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_ino, status.st_size


def _damaged(path: Path, found: str) -> JobCorruptError:
    return JobCorruptError(
        f"{path}: the file is {found}; remove the job's folder, or delete its operation, and create the context again",
        path=path,
    )
