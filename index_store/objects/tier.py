"""Contexts fetched from an object store: on demand, one fetch for all who wait, verified before it is used.

A fetch has threads of its own and goes on whoever leaves. What it brought before it failed, or its process ended, is
verified and kept by the next one. It makes room for itself within the store's bound.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from index_store.errors import (
    ContextCorruptError,
    ContextFetchingError,
    ContextFileError,
    InvalidArgumentError,
    ObjectsUnavailableError,
    SparseKVError,
    StoreError,
    format_bytes,
)
from index_store.objects.bucket import Bucket, BucketFile, ObjectMissingError, check_url, folder_of
from index_store.objects.context_file import Contents, Part, parts_of, read_contents, receive
from index_store.objects.records import Marks, content_key, damage_key
from index_store.store.array_files import ArrayFiles
from index_store.store.catalog import Store, neutral
from index_store.store.clean_up import StoreRoom
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import Manifest
from index_store.store.elsewhere import other_entries
from index_store.store.files.durable import locked_file, permissions_in, storing, sync_tree
from index_store.store.zarr_io import METADATA_NAME, chunk_path, compare_metadata, metadata

MOST_FETCHES = 4
"""At once; more wait for their turn."""
FETCH_TIMEOUT_S = 60.0
_THREADS = 8
_LOOK_S = 0.05
_TOLD_EVERY_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Fetch:
    """One that is under way. total, done: bytes. error: why it failed, once `ended` is set."""

    id: str
    total: int
    done: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    ended: threading.Event = field(default_factory=threading.Event)
    error: SparseKVError | None = None
    wanted: int = 0

    def told(self) -> str:
        """How far it is."""
        return f"{format_bytes(self.done)} of {format_bytes(self.total)}"

    def refusal(self, waited_s: float) -> ContextFetchingError:
        """For who does not wait any longer."""
        seconds = time.monotonic() - self.begun_s
        left = (self.total - self.done) * seconds / self.done if self.done else None
        error = ContextFetchingError(
            f"context {self.id[:12]} is being fetched from the object store: {self.told()} in {seconds:.0f} s"
            f"{'' if left is None else f', about {left:.0f} s are left'}; after waiting {waited_s:g} s for it: ask "
            "again, or send the text in place of the context",
            context=self.id,
            bytes_done=self.done,
            bytes_total=self.total,
        )
        error.retry_after_s = min(60.0, max(1.0, left or 5.0))
        return error


class Tier:
    """Contexts of one bucket, as a store's `beyond`. Safe to use from several threads and processes at once."""

    def __init__(
        self,
        store: Store,
        url: str,
        open_bucket: Callable[[str], Bucket] = Bucket.open,
        store_bytes: int | None = None,
        fetch_timeout_s: float | None = FETCH_TIMEOUT_S,
    ) -> None:
        """open_bucket: called when it is first needed. store_bytes: as of `StoreRoom`. fetch_timeout_s: how long one
        waits who says nothing else; None as long as it takes."""
        self.url = url.rstrip("/")
        self.marks = Marks(store.path, self.url)
        self._store = store
        self._open = open_bucket
        self._bucket: Bucket | None = None
        self._room = StoreRoom(store, store_bytes)
        self._timeout_s = fetch_timeout_s
        self._fetches: dict[str, Fetch] = {}
        self._waiting: deque[Fetch] = deque()
        self._workers = 0
        self._lock = threading.Lock()
        self._closed = False
        self._mending: set[str] = set()
        self.mended = 0
        """Contexts that were found damaged here, and were made whole from the bucket."""

    @classmethod
    def of(cls, store: Store) -> Tier:
        """That of a store which has one. Raises InvalidArgumentError."""
        if not isinstance(store.beyond, cls):
            raise InvalidArgumentError(f"{store.path}: there is no object store behind it; give --objects")
        return store.beyond

    @property
    def bucket(self) -> Bucket:
        """Raises InvalidArgumentError for a URL that names none, ObjectsUnavailableError where a folder has gone that
        was in use: an empty one in its place would be that of a disk that is not mounted."""
        with self._lock:
            folder = folder_of(self.url)
            if folder is not None and not folder.is_dir() and (self._bucket or self.marks.all()):
                raise ObjectsUnavailableError(
                    f"{self.url} was in use, and there is no such folder now; mount it, or make it where all of it may "
                    "be uploaded anew"
                )
            if self._bucket is None:
                self._bucket = self._open(self.url)
            return self._bucket

    def close(self) -> None:
        """Has fetches end soon, and begins no more. What they brought is kept."""
        self._closed = True

    def held(self) -> Mapping[str, Manifest]:
        """What the bucket is known to hold, verified, by id."""
        marks = self.marks.all().items()
        return {id_: mark.manifest for id_, mark in marks if mark.manifest is not None}

    def fetches(self) -> Sequence[Fetch]:
        with self._lock:
            return list(self._fetches.values())

    def bring(self, id_: str, check: Callable[[], None] = lambda: None, limit_s: float | None = None) -> None:
        """See `Beyond.bring`. Raises what the fetch raised."""
        limit_s = self._timeout_s if limit_s is None else limit_s
        fetch = self._begin(id_)
        began = time.monotonic()
        while not fetch.ended.wait(_LOOK_S):
            try:
                check()
            except BaseException:
                self._leave(fetch)
                raise
            if limit_s is not None and time.monotonic() - began >= limit_s:
                raise fetch.refusal(limit_s)  # and it goes on, for who asks again
        if fetch.error is not None:
            raise copy.copy(fetch.error) from fetch.error

    def mend(self, id_: str, error: ContextCorruptError) -> None:
        held = self.held().get(id_)
        if self._closed or held is None or neutral(held) != neutral(self._store.manifest(id_)):
            return
        with locked_file(self._store.folders.fetch_lock_path(id_), wait=False) as alone:
            if not alone:  # it is being brought, or leaves
                return
            self._store.notes.note_elsewhere(id_, self.url)
        logger.warning("context %s is damaged here, and fetched again: %s", id_[:12], error.message)
        self._mending.add(id_)
        self._begin(id_)

    def report(self, id_: str, error: ContextCorruptError) -> None:
        """Tells others that what the bucket has of a context is damaged: who has it whole uploads it again."""
        try:
            if self.bucket.put_new(damage_key(id_), error.message.encode()):
                logger.warning("context %s is damaged in %s: %s", id_[:12], self.url, error.message)
        except SparseKVError as failed:
            logger.warning("%s is not told of damage: %s", self.url, failed.message)

    def _begin(self, id_: str) -> Fetch:
        with self._lock:
            fetch = self._fetches.get(id_)
            if fetch is None:
                manifest = self._store.manifest(id_)
                total = sum(array.nbytes for array in other_entries(manifest))
                fetch = self._fetches[id_] = Fetch(id_, total)
                self._waiting.append(fetch)
                if self._workers < MOST_FETCHES:
                    self._workers += 1
                    threading.Thread(target=self._work, name="fetch", daemon=True).start()
            fetch.wanted += 1
            return fetch

    def _leave(self, fetch: Fetch) -> None:
        """Somebody does not want it any more: where nobody does, and it has not begun, it never does."""
        with self._lock:
            fetch.wanted -= 1
            if not fetch.wanted and fetch in self._waiting:
                self._waiting.remove(fetch)
                del self._fetches[fetch.id]
                fetch.ended.set()

    def _work(self) -> None:
        """Fetches what waits, one after the other, until nothing does."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._workers -= 1
                    return
                fetch = self._waiting.popleft()
            self._run(fetch)

    def _run(self, fetch: Fetch) -> None:
        try:
            with locked_file(self._store.folders.fetch_lock_path(fetch.id)):
                if self._store.elsewhere(fetch.id):  # no other process was faster
                    self._fetch(fetch)
            if fetch.id in self._mending:
                self._mending.discard(fetch.id)
                self.mended += 1
                logger.info("context %s is whole again", fetch.id[:12])
        except SparseKVError as error:
            fetch.error = error
            logger.warning("context %s was not fetched: %s", fetch.id[:12], error.message)
            if isinstance(error, ContextCorruptError):
                self.report(fetch.id, error)
        except Exception:
            fetch.error = StoreError(f"fetching context {fetch.id} failed; the log has the details")
            logger.exception("fetching context %s failed", fetch.id[:12])
        finally:
            with self._lock:
                del self._fetches[fetch.id]
            fetch.ended.set()

    def _fetch(self, fetch: Fetch) -> None:
        manifest = self._store.manifest(fetch.id)
        if not self._store.bytes_here(manifest):  # otherwise its room is taken already
            self._room.make(manifest.kv_bytes + manifest.index_bytes)
        told_s = fetch.begun_s = time.monotonic()

        def note(nbytes: int) -> None:
            nonlocal told_s
            fetch.done = min(fetch.total, fetch.done + nbytes)
            if time.monotonic() - told_s >= _TOLD_EVERY_S:
                told_s = time.monotonic()
                logger.info("fetching context %s: %s", fetch.id[:12], fetch.told())

        def check() -> None:
            if self._closed:
                raise StoreError(f"fetching context {fetch.id} was ended; ask again")

        fetch_arrays(self._store, manifest, self.bucket, note, check)
        seconds = time.monotonic() - fetch.begun_s
        logger.info(
            "fetched context %s, %s, from %s in %.1f s",
            fetch.id[:12],
            format_bytes(fetch.total),
            self.url,
            seconds,
        )


def open_store(
    path: str | Path,
    create: bool = False,
    objects: str | None = None,
    store_bytes: int | None = None,
    fetch_timeout_s: float | None = FETCH_TIMEOUT_S,
) -> Store:
    """A store, in front of the object store of that URL if there is one. Raises what `Store` and `check_url` raise."""
    store = Store(path, create)
    if objects is not None:
        check_url(objects)
        store.beyond = Tier(store, objects, store_bytes=store_bytes, fetch_timeout_s=fetch_timeout_s)
    return store


def open_object(bucket: Bucket, manifest: Manifest) -> tuple[BucketFile, Contents]:
    """The object that holds a context, its beginning checked. Raises ObjectMissingError, a ContextCorruptError."""
    source = BucketFile(bucket, content_key(manifest))
    contents = read_contents(source)
    if neutral(contents.manifest) != neutral(manifest):
        raise ContextFileError(
            f"{source.where}: holds context {contents.manifest.id}, or another edition of it, expected "
            f"{content_key(manifest)}",
            path=source.where,
        )
    return source, contents


def fetch_arrays(
    store: Store,
    manifest: Manifest,
    bucket: Bucket,
    on_bytes: Callable[[int], None],
    check: Callable[[], None],
) -> None:
    """Brings what is not here of a context, or not whole, into its folder, makes it durable, and takes its note away.

    Called with its fetch lock held. Raises ObjectsUnavailableError, a ContextCorruptError, StoreFullError, StoreError.
    """
    folder, entries = store.folders.context(manifest.id), manifest.arrays
    files = write_metadata(folder, entries, permissions_in(store.folders.contexts))
    awaited = {entry.path for entry in other_entries(manifest)}
    try:
        missing = []
        for part in parts_of(manifest, 0):
            check()
            if _is_here(files, folder, part):
                on_bytes(part.nbytes if part.entry.path in awaited else 0)
            else:
                # Not written over: another edition's may be mapped.
                with storing("removing a file", folder):
                    chunk_path(folder, part.entry, part.indices).unlink(missing_ok=True)
                missing.append((part.entry.path, part.indices))
        if missing:
            try:
                source, contents = open_object(bucket, manifest)
            except ObjectMissingError as error:
                raise ObjectMissingError(
                    f"{error.message}; context {manifest.id} may have been deleted or replaced meanwhile: ask again",
                    **error.metadata,
                ) from error
            some = set(missing)
            parts = [part for part in contents.parts if (part.entry.path, part.indices) in some]
            receive(source, parts, writing(files, folder, entries), on_bytes, check, _THREADS)
        with storing("writing", folder):
            files.sync(lambda _: None)
    finally:
        files.seal()
    with storing("writing", folder):
        sync_tree(folder)
    store.notes.note_here(manifest.id)


def write_metadata(folder: Path, entries: Sequence[ArrayEntry], permissions: int) -> ArrayFiles:
    """Has a folder say what arrays there are to be in it; what writes their chunks. What says something else, or was
    cut off when an earlier fetch ended, is replaced. Raises StoreError."""
    files = ArrayFiles(folder, permissions)
    with storing("writing", folder):
        for path, said in metadata(entries).items():
            key = (Path(path) / METADATA_NAME).as_posix()
            if any(compare_metadata(folder / key, path, said)):
                (folder / key).unlink(missing_ok=True)
                files.write(key, json.dumps(said).encode())
    return files


def writing(
    files: ArrayFiles, folder: Path, entries: Sequence[ArrayEntry]
) -> Callable[[str, Sequence[int], int, NDArray[np.uint8]], None]:
    """Writes parts of chunks into a folder."""
    known = {entry.path: entry for entry in entries}

    def write(path: str, indices: Sequence[int], start: int, raw: NDArray[np.uint8]) -> None:
        key = chunk_path(folder, known[path], indices).relative_to(folder).as_posix()
        with storing("writing", folder):
            files.write_part(key, start, raw, known[path].chunk_bytes)

    return write


def _is_here(files: ArrayFiles, folder: Path, part: Part) -> bool:
    """Whether an earlier fetch brought a chunk: it is read, and compared with its checksum."""
    path = chunk_path(folder, part.entry, part.indices)
    if not path.is_file():
        return False
    key = path.relative_to(folder).as_posix()
    return files.adopt_chunk(key, part.entry.chunk_bytes, part.entry.checksum(part.indices))
