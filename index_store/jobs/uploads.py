"""Documents that were sent ahead of the request that uses them: plain files with a day to live.

`uploads/<id>-<sha256>` holds one document, whose name ends with that of the tenant that sent it. A document appears by
one rename when all of it is there.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from index_store.errors import InvalidArgumentError, JobCorruptError, QueueFullError, UploadNotFoundError
from index_store.store.description.callers import crowds
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    make_folder,
    new_file,
    permissions_in,
    storing,
    sync_path,
    unused_name,
)
from index_store.store.files.reading import read_file, unavailable

MOST_DOCUMENT_BYTES = 64 << 20
"""Of one document."""
MOST_UPLOADED_BYTES = 1 << 30
"""Of all documents that wait to be used."""
LIFETIME = timedelta(days=1)

_UPLOAD_ID = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(?P<id>[0-9a-f]{32})-(?P<sha256>[0-9a-f]{64})(?:-(?P<tenant>.+))?")
_STRAY = timedelta(hours=1)
_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Upload:
    """A document that is there. id: 32 lower-case hex digits. sha256: of its bytes, in hex digits."""

    id: str
    nbytes: int
    sha256: str
    expires_at: datetime


class Uploads:
    """The uploaded documents of a store. What writes raises StoreFullError or StoreError."""

    def __init__(
        self,
        store: str | Path,
        most_bytes: int = MOST_UPLOADED_BYTES,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = Path(store)
        self._folder = self._store / "uploads"
        self._most_bytes = most_bytes
        self._clock = clock

    def begin(self, tenant: str = "") -> UploadWriting:
        """Starts on a document, which is there for the tenant alone. Raises QueueFullError when too many bytes wait to
        be used."""
        self.tidy()
        with storing("making the uploads' folder", self._folder):
            make_folder(self._folder, permissions_in(self._store / "contexts"))
            found = [(path.name, _status(path)) for path in self._folder.iterdir()]
        sizes = {name: status.st_size for name, status in found if status is not None}
        waiting = sum(sizes.values())
        own = sum(
            size for name, size in sizes.items() if (of := _NAME.fullmatch(name)) and of["tenant"] == tenant
        )
        if waiting + MOST_DOCUMENT_BYTES > self._most_bytes or crowds(
            tenant, own, self._most_bytes - waiting
        ):
            error = QueueFullError(
                f"uploaded documents of {waiting} bytes wait to be used, the limit is {self._most_bytes}; try again "
                "later",
                limit=self._most_bytes,
            )
            error.retry_after_s = _RETRY_S
            raise error
        return UploadWriting(self._folder, self._clock, tenant)

    def read(self, id_: str, tenant: str = "") -> bytes:
        """A document, compared with its checksum. Raises UploadNotFoundError, JobCorruptError."""
        try:
            path, sha256 = self._path(id_, tenant)
            data, _ = read_file(path, MOST_DOCUMENT_BYTES)
        except FileNotFoundError as error:
            raise _unknown(id_) from error
        except OSError as error:
            raise unavailable(self._folder, error) from error
        if sha256 != hashlib.sha256(data).hexdigest():
            raise JobCorruptError(
                f"{path}: the uploaded document does not fit its checksum; upload it again", upload=id_
            )
        return data

    def remove(self, id_: str, tenant: str = "") -> None:
        """Removes a document, if it is there."""
        with suppress(UploadNotFoundError), storing("removing an upload", self._folder):
            self._path(id_, tenant)[0].unlink(missing_ok=True)

    def tidy(self) -> None:
        """Removes documents that nobody used in time, and what killed servers left of one."""
        now = self._clock().timestamp()
        for path in self._folder.glob("*"):
            life = _STRAY if path.name.startswith(TEMPORARY_PREFIX) else LIFETIME
            with suppress(OSError):
                if path.stat().st_mtime < now - life.total_seconds():
                    path.unlink()

    def _path(self, id_: str, tenant: str) -> tuple[Path, str]:
        """Where a tenant's document is, and its checksum. Raises UploadNotFoundError."""
        if _UPLOAD_ID.fullmatch(id_):
            for path in self._folder.glob(f"{id_}-*"):
                status = _status(path)
                name = _NAME.fullmatch(path.name)
                if status is None or name is None or (name["tenant"] or "") != tenant:
                    continue
                if status.st_mtime + LIFETIME.total_seconds() >= self._clock().timestamp():
                    return path, name["sha256"]
        raise _unknown(id_)


class UploadWriting:
    """One document on its way. `add` and `finish` are called in turn; `discard` gives it up at any time."""

    def __init__(self, folder: Path, clock: Callable[[], datetime], tenant: str = "") -> None:
        self._tenant = tenant
        self._path = unused_name(folder, TEMPORARY_PREFIX)
        self._clock = clock
        self._digest = hashlib.sha256()
        self._nbytes = 0
        with storing("taking an upload", self._path):
            self._file = new_file(self._path, permissions_in(folder))

    def add(self, data: bytes) -> None:
        """Takes the next bytes. Raises InvalidArgumentError when the document gets too large."""
        self._nbytes += len(data)
        if self._nbytes > MOST_DOCUMENT_BYTES:
            raise InvalidArgumentError(
                f"the document has more than {MOST_DOCUMENT_BYTES} bytes, which is the most that is taken; split it",
                field="data",
            )
        self._digest.update(data)
        with storing("taking an upload", self._path):
            self._file.write(data)

    def finish(self, sha256: str) -> Upload:
        """Has the document be there, durably. sha256: what it must have, or "".

        Raises InvalidArgumentError for an empty document and for one with another checksum.
        """
        found = self._digest.hexdigest()
        if not self._nbytes:
            raise InvalidArgumentError("the document is empty, expected text", field="data")
        if sha256 and sha256.lower() != found:
            raise InvalidArgumentError(
                f"sha256 is {sha256[:80]!r}, the document that came has {found}; send it again",
                field="sha256",
            )
        id_ = secrets.token_hex(16)
        with storing("taking an upload", self._path):
            self._file.close()
            sync_path(self._path)
            name = "-".join((id_, found, *([self._tenant] if self._tenant else [])))
            os.rename(self._path, self._path.with_name(name))
            sync_path(self._path.parent)
        return Upload(id_, self._nbytes, found, self._clock() + LIFETIME)

    def discard(self) -> None:
        """Removes what is there of a document that is not finished."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    """Of a file that was listed; None where it was removed meanwhile. Raises OSError."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _unknown(id_: str) -> UploadNotFoundError:
    return UploadNotFoundError(
        f"there is no upload {id_[:80]!r}: it was used, has expired, or never was; upload the document again",
        upload=id_[:80],
    )
