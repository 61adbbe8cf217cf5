"""Which contexts a folder holds, newest first: every manifest is read once, and again when it has changed.

A context is published and deleted by a rename, which the folder's own times show, and what is added to one is first
written into that folder. So the list is kept in memory, and asking for it again costs one look at the folder; when that
has changed, one look at every manifest, of which those are read that are not the ones that were read before. A context
that is asked for by its id is looked at for itself.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from bisect import bisect_right, insort
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from index_store.errors import (
    ContextNotFoundError,
    FormatVersionError,
    ManifestError,
    SparseKVError,
    StoreUnavailableError,
)
from index_store.store.description.context_id import is_context_id
from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest
from index_store.store.files.reading import WrongFileError, may_block, read_file, unavailable

_LARGEST_MANIFEST = 64 << 20
_LOOKED_AT_TOGETHER = 64
_SETTLED_S = 2.0  # later changes show in a file's times, whatever the file system's clock ticks in

_TOLD_AS_NAMED = ("token_count", "kv_bytes", "index_bytes", "pinned", "owner", "tenant", "rows")

Stamp = tuple[int, ...]
Place = tuple[int, float, str]


@dataclass(frozen=True, slots=True)
class BrokenContext:
    """A context whose manifest cannot be used, and why: it is damaged, or cannot be read now. last: the one that was
    read when it could, None where it never was."""

    id: str
    error: SparseKVError
    last: Manifest | None = field(default=None, compare=False, repr=False)


Entry = Manifest | BrokenContext

STATES = ("READY", "EXPIRED", "CORRUPT", "UNSUPPORTED", "UNAVAILABLE")


def state_of(entry: Entry, *, expired: bool) -> str:
    """What is to be said of a context: one of STATES."""
    if isinstance(entry, Manifest):
        return "EXPIRED" if expired else "READY"
    if isinstance(entry.error, FormatVersionError):
        return "UNSUPPORTED"
    return "UNAVAILABLE" if isinstance(entry.error, StoreUnavailableError) else "CORRUPT"


def told_of(own: Manifest, read: Manifest | None = None) -> dict[str, Any]:
    """What the API's message tells of a context that stands in its manifest, by field. read: whose methods and indexes
    it has, where that is not itself."""
    read = read or own
    indexes = [
        {
            "name": index.name,
            "kind": index.kind,
            "parameters": {name: str(value) for name, value in index.parameters.items()},
            "bytes_per_token": index.nbytes / read.token_count,
            "layers": tuple(index.layers),
        }
        for index in read.indexes
    ]
    return {
        "name": f"contexts/{own.id}",
        "display_name": own.name,
        "model": read.model.name,
        "architecture": read.model.architecture,
        "dtype": read.dtype,
        "create_time": own.created_at,
        "expire_time": own.expires_at,
        "indexes": indexes,
        "dense_layers": tuple(read.dense_layers),
        "labels": dict(own.labels),
        "is_conversation": own.conversation is not None,
        "parent": "" if own.parent is None else f"contexts/{own.parent.id}",
        "parent_token_count": 0 if own.parent is None else own.parent.token_count,
        "readers": tuple(own.readers),
        **{name: getattr(own, name) for name in _TOLD_AS_NAMED},
    }


def place_of(entry: Entry) -> Place:
    """Where an entry stands in a list: newest first, those without a manifest at the end."""
    if isinstance(entry, BrokenContext):
        return 1, 0.0, entry.id
    return 0, -entry.created_at.timestamp(), entry.id


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of one context. stamp: of the file; None where it is to be read again the next time."""

    entry: Entry
    stamp: Stamp | None


class Listing:
    """The contexts in one folder. Safe to use from several threads."""

    def __init__(self, contexts: Path) -> None:
        self._contexts = contexts
        self._known: dict[str, _Known] = {}
        self._unsettled: set[str] = set()  # to be read again the next time
        self._order: list[Entry] = []
        self._folder_stamp: Stamp | None = None
        self._refreshing = threading.Lock()  # one reads for all who ask for the list
        self._books = threading.Lock()  # never held while anything is read

    def entries(self) -> list[Entry]:
        """Every context in its place. Raises StoreUnavailableError when the folder cannot be read."""
        self._refresh()
        with self._books:
            return list(self._order)

    def entries_for(self, id_: str) -> list[Entry]:
        """The same, where contexts that do not continue this one may be as they were: a look at the folder, those that
        are new, and its children, however many there are. Raises as `entries`."""
        with may_block(self._contexts):
            self._refreshing.acquire()
        try:
            found = self._found()
            for each in (*(found - self._known.keys()), *self._unsettled, *self._children(id_)):
                self._note(each, self._read(each, self._known.get(each)))
        finally:
            self._refreshing.release()
        with self._books:
            return list(self._order)

    def _children(self, id_: str) -> list[str]:
        with self._books:
            entries = [entry.last if isinstance(entry, BrokenContext) else entry for entry in self._order]
        return [entry.id for entry in entries if entry and entry.parent and entry.parent.id == id_]

    def _found(self) -> set[str]:
        """The names of all contexts; forgets what is gone. Raises StoreUnavailableError."""
        try:
            with may_block(self._contexts), os.scandir(self._contexts) as items:
                found = {item.name for item in items if is_context_id(item.name)}
        except OSError as error:
            raise unavailable(self._contexts, error) from error
        for id_ in self._known.keys() - found:
            self._note(id_, None)
        return found

    def known(self, id_: str) -> Entry | None:
        """The entry of a context in the list, None where it has none: nothing is done for the one that is not done for
        the other. Raises as `entries`."""
        self._refresh()
        with self._books:
            known = self._known.get(id_)
        return None if known is None else known.entry

    def _refresh(self) -> None:
        with may_block(self._contexts):
            self._refreshing.acquire()
        try:
            stamp, changed = self._changed_ids()
            for id_ in changed:
                self._note(id_, self._read(id_, self._known.get(id_)))
            # Last: a reading that was given up leaves all to be looked at again.
            self._folder_stamp = stamp
        finally:
            self._refreshing.release()

    def manifest(self, id_: str) -> Manifest:
        """The manifest of a context, as it is now.

        Raises ContextNotFoundError, FormatVersionError, StoreUnavailableError or a ContextCorruptError.
        """
        known = self._known.get(id_)
        fresh = self._read(id_, known)
        if fresh is not known:
            self._note(id_, fresh)
        if fresh is None:
            raise ContextNotFoundError(f"{self._contexts.parent}: no context {id_}", context=id_)
        if isinstance(fresh.entry, BrokenContext):
            # A copy: every thread gets a traceback of its own.
            raise copy.copy(fresh.entry.error)
        return fresh.entry

    def _changed_ids(self) -> tuple[Stamp | None, list[str]]:
        """The folder's stamp, None where a later change may not show in it, and the ids of contexts that are new, have
        changed, or were not well when they were read; forgets what is gone."""
        try:
            with may_block(self._contexts):
                stamp, settled = _stamp(os.stat(self._contexts), time.time())
                if stamp == self._folder_stamp:
                    return stamp, list(self._unsettled)
        except OSError as error:
            raise unavailable(self._contexts, error) from error
        ids = sorted(self._found())
        changed: list[str] = []
        for first in range(0, len(ids), _LOOKED_AT_TOGETHER):
            with may_block(self._contexts):
                changed += filter(self._has_changed, ids[first : first + _LOOKED_AT_TOGETHER])
        return stamp if settled else None, changed

    def _has_changed(self, id_: str) -> bool:
        known = self._known.get(id_)
        if known is None or known.stamp is None:
            return True
        try:
            return _stamp(os.stat(f"{self._contexts}/{id_}/{MANIFEST_NAME}"), 0.0)[0] != known.stamp
        except OSError:
            return True

    def _note(self, id_: str, fresh: _Known | None) -> None:
        """Puts an entry into its place, or takes it out."""
        with self._books:
            known = self._known.pop(id_, None)
            self._unsettled.discard(id_)
            if known is not None:
                del self._order[bisect_right(self._order, place_of(known.entry), key=place_of) - 1]
            if fresh is not None:
                if known is not None and isinstance(fresh.entry, BrokenContext):
                    last = known.entry.last if isinstance(known.entry, BrokenContext) else known.entry
                    fresh = replace(fresh, entry=replace(fresh.entry, last=last))
                self._known[id_] = fresh
                if fresh.stamp is None:
                    self._unsettled.add(id_)
                insort(self._order, fresh.entry, key=place_of)

    def _read(self, id_: str, known: _Known | None) -> _Known | None:
        """What is there now: `known` itself where its file is still the same one, None where there is no context."""
        path = self._contexts / id_ / MANIFEST_NAME
        try:
            if known is not None and known.stamp is not None:
                with may_block(path):
                    if _stamp(os.stat(path), 0.0)[0] == known.stamp:
                        return known
            now = time.time()
            data, status = read_file(path, _LARGEST_MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            if not path.parent.is_dir():
                return None
            missing = ManifestError(f"{path}: the manifest is missing; delete the context", path=path)
            return _Known(BrokenContext(id_, missing), None)
        except WrongFileError as error:
            wrong = ManifestError(f"{path}: the manifest is {error.strerror}; delete the context", path=path)
            return _Known(BrokenContext(id_, wrong), None)
        except OSError as error:
            return _Known(BrokenContext(id_, unavailable(path, error)), None)
        stamp, settled = _stamp(status, now)
        return _Known(_parse(id_, path, data), stamp if settled else None)


def _parse(id_: str, path: Path, data: bytes) -> Entry:
    try:
        manifest = MANIFESTS.parse(data, str(path))
        if manifest.id != id_:
            raise ManifestError(
                f"{path}: field 'id' is {manifest.id!r}, expected {id_!r}, its folder's name; delete the context",
                path=path,
                field="id",
            )
    except SparseKVError as error:
        return BrokenContext(id_, error)
    return manifest


def _stamp(status: os.stat_result, now: float) -> tuple[Stamp, bool]:
    """What tells a file from another or an older one, and whether any later change will show in it."""
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return stamp, now - max(status.st_mtime, status.st_ctime) > _SETTLED_S
