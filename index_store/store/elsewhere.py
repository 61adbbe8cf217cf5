"""Contexts whose arrays are not in the store's folder: their manifest, tokens and messages are, so that they are
listed, found, named and changed like others.

`objects/elsewhere/<id>` says that, and where the rest is. It stands before anything is removed, and goes when all of it
is back, verified: a context whose note is there is brought before it is read, whatever lies in its folder.
`objects/deleted/<id>` says that a context was deleted here: one that is merely missing is not deleted elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from index_store.errors import ContextCorruptError
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.manifest import Manifest
from index_store.store.files.durable import (
    make_folder,
    permissions_in,
    remove_tree,
    replace_file,
    storing,
    sync_path,
)
from index_store.store.files.reading import unavailable


class Beyond(Protocol):
    """Where contexts are that are not here."""

    url: str

    def bring(self, id_: str, check: Callable[[], None], limit_s: float | None) -> None:
        """Has a context's arrays here. check: called now and then; what it raises ends the wait.

        Raises ContextFetchingError after so many seconds, or those that are configured; it is brought all the same.
        """
        ...

    def mend(self, id_: str, error: ContextCorruptError) -> None:
        """Has a context that was found damaged here brought again, where it is held there."""
        ...

    def held(self) -> Mapping[str, Manifest]:
        """What is known to be there, verified, by id."""
        ...


def kept_entries(manifest: Manifest) -> tuple[ArrayEntry, ...]:
    """The arrays that are here in any case."""
    return tuple(entry for entry in (manifest.tokens, manifest.conversation) if entry is not None)


def other_entries(manifest: Manifest) -> tuple[ArrayEntry, ...]:
    """Those that may be elsewhere."""
    kept = kept_entries(manifest)
    return tuple(entry for entry in manifest.arrays if entry not in kept)


class Notes:
    """The notes of one store."""

    def __init__(self, store: Path) -> None:
        self._objects = store / "objects"
        self._elsewhere, self._deleted = self._objects / "elsewhere", self._objects / "deleted"
        self._contexts = store / "contexts"

    def url(self, id_: str) -> str | None:
        """Where a context's arrays are; None where they are here. Raises StoreUnavailableError."""
        path = self._elsewhere / id_
        try:
            return path.read_text("utf-8", "replace")[:2000]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unavailable(path, error) from error

    def note_elsewhere(self, id_: str, url: str) -> None:
        """Durably, as all of these. Raises StoreFullError or StoreError."""
        self._write(self._elsewhere / id_, url)

    def note_here(self, id_: str) -> None:
        """All of it is here, or nothing is."""
        self._remove(self._elsewhere / id_)

    def deleted(self, id_: str) -> bool:
        """Whether a context was deleted here, and an object store has not been told."""
        return (self._deleted / id_).is_file()

    def note_deleted(self, id_: str) -> None:
        """Nothing is noted where there was never an object store."""
        if self._objects.is_dir():
            self._write(self._deleted / id_, "")

    def forget_deleted(self, id_: str) -> None:
        """It has been told, or is made again."""
        self._remove(self._deleted / id_)

    def forlorn(self) -> list[str]:
        """Ids of contexts that are said to be elsewhere, and are not here at all. Raises StoreUnavailableError."""
        try:
            return [id_ for id_ in os.listdir(self._elsewhere) if not (self._contexts / id_).is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unavailable(self._elsewhere, error) from error

    def _write(self, path: Path, text: str) -> None:
        with storing("noting what is elsewhere", path):
            permissions = permissions_in(self._contexts)
            make_folder(path.parent, permissions)
            replace_file(path, text.encode(), permissions)

    def _remove(self, path: Path) -> None:
        with storing("removing a note", path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            sync_path(path.parent)


def remove_arrays(folder: Path, manifest: Manifest) -> None:
    """Removes what may be elsewhere from a context's folder. Raises OSError."""
    for entry in other_entries(manifest):
        remove_tree(folder / entry.path)
    remove_tree(folder / "index")


def bytes_here(folder: Path, manifest: Manifest, *, elsewhere: bool) -> int:
    """Of keys, values and indexes that take room in a context's folder; all of them where some do."""
    if elsewhere and not (folder / manifest.kv.path).is_dir():
        return 0
    return manifest.kv_bytes + manifest.index_bytes
