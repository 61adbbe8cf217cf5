"""An object store through a few verbs: S3, GCS, Azure, a folder, memory. Its failures are ours, and bounded in time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from index_store.errors import ContextFileError, InvalidArgumentError, ObjectsUnavailableError, SparseKVError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_REQUEST = "60s"
_CONNECT = "5s"
_RETRIES, _RETRIED_FOR = 3, timedelta(seconds=90)
_PIECE_BYTES, _PIECES_AT_ONCE, _MOST_PIECES = 8 << 20, 4, 9_000


_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER"


def check_url(url: str) -> None:
    """Raises InvalidArgumentError for a URL with secrets in it: URLs stand in logs and in the store."""
    parts = urlsplit(url)
    if parts.password is not None or parts.query or parts.fragment:
        raise InvalidArgumentError(
            f"--objects has a password or settings in its URL; expected {_FORMS} alone, with credentials in the "
            "environment, as the cloud's tools have them",
            field="objects",
        )


def folder_of(url: str) -> Path | None:
    """The folder that a URL means, None where it is none of this machine."""
    return Path(unquote(urlsplit(url).path)) if url.startswith("file://") else None


class ObjectMissingError(ObjectsUnavailableError):
    """There is no object of that name, now."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object of a list."""

    key: str
    size: int
    changed_at: datetime


class Bucket:
    """A store of objects. Safe to use from several threads; every call may take as long as its retries do.

    Every verb raises ObjectsUnavailableError.
    """

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store, self.url = store, url

    @classmethod
    def open(cls, url: str) -> Bucket:
        """What a URL names; settings are the environment's, as each cloud's tools have them. Nothing is asked yet.

        Raises InvalidArgumentError for a URL that names none, and where the package is missing.
        """
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise InvalidArgumentError(
                "--objects needs the package obstore; install it with `pip install 'sparsekv[objects]'`",
                field="objects",
            ) from error
        scheme = url.partition("://")[0]
        # Options that are given here replace the environment's, this one among them.
        plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
        try:
            if scheme == "file":
                return cls(from_url(url, mkdir=True), url)
            if scheme == "memory":
                return cls(from_url(url), url)
            return cls(
                from_url(
                    url,
                    client_options={"timeout": _REQUEST, "connect_timeout": _CONNECT, "allow_http": plain},
                    retry_config={"max_retries": _RETRIES, "retry_timeout": _RETRIED_FOR},
                ),
                url,
            )
        except (BaseError, ValueError, OSError) as error:
            raise InvalidArgumentError(
                f"--objects is {url[:200]!r} ({_first_line(error)}); expected {_FORMS}", field="objects"
            ) from error

    def list(self, prefix: str) -> Sequence[Found]:
        """Every object below a prefix that ends with a slash."""
        import obstore

        with self._asking(prefix):
            return [
                Found(each["path"], each["size"], each["last_modified"])
                for some in obstore.list(self._store, prefix, chunk_size=1000)
                for each in some
            ]

    def get(self, key: str) -> bytes:
        """A small object. Raises ObjectMissingError."""
        import obstore

        with self._asking(key):
            return bytes(obstore.get(self._store, key).bytes())

    def size(self, key: str) -> int:
        """Raises ObjectMissingError."""
        import obstore

        with self._asking(key):
            return obstore.head(self._store, key)["size"]

    def read(self, key: str, start: int, count: int) -> bytes:
        """A range of an object. Raises ObjectMissingError, ContextFileError where it ends before."""
        import obstore

        with self._asking(key):
            found = bytes(obstore.get_range(self._store, key, start=start, length=count))
        if len(found) != count:
            raise ContextFileError(
                f"{self.url}/{key}: {len(found)} bytes came from byte {start} on, expected {count}", path=key
            )
        return found

    def put_new(self, key: str, data: bytes) -> bool:
        """Makes an object where there is none of that name; whether it holds these bytes now."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._asking(key):
            try:
                obstore.put(self._store, key, data, mode="create")
                return True
            except (AlreadyExistsError, PreconditionError):
                pass
        return self.get(key) == data  # our own, of which the answer was lost, or another writer's

    def put(self, key: str, pieces: Iterator[bytes], nbytes: int) -> None:
        """Makes or replaces an object, all at once. What `pieces` raises leaves none."""
        import obstore

        piece = max(_PIECE_BYTES, -(-nbytes // _MOST_PIECES))
        with self._asking(key):
            if nbytes <= piece:
                obstore.put(self._store, key, b"".join(pieces), use_multipart=False)
            else:
                obstore.put(self._store, key, pieces, chunk_size=piece, max_concurrency=_PIECES_AT_ONCE)

    def delete(self, keys: Sequence[str]) -> None:
        """Removes objects; those that are not there are no error."""
        import obstore

        for key in keys:
            with self._asking(key):
                try:
                    obstore.delete(self._store, key)
                except FileNotFoundError:
                    continue

    @contextmanager
    def _asking(self, key: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except SparseKVError:
            raise
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{self.url}/{key}: no such object", path=key) from error
        except (BaseError, OSError, ValueError) as error:
            raise ObjectsUnavailableError(
                f"{self.url}/{key}: the object store cannot be used now ({_first_line(error)}); see whether it "
                "answers, and what the credentials allow, and try again",
                path=key,
            ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class BucketFile:
    """One object, as a source of a context's file."""

    def __init__(self, bucket: Bucket, key: str) -> None:
        """Raises ObjectMissingError or ObjectsUnavailableError."""
        self._bucket, self._key = bucket, key
        self.where, self.size = f"{bucket.url}/{key}", bucket.size(key)

    def read(self, start: int, count: int) -> bytes:
        """A range, which is asked for again where the answer is cut short."""
        if not count:
            return b""
        try:
            return self._bucket.read(self._key, start, count)
        except ContextFileError:
            return self._bucket.read(self._key, start, count)
