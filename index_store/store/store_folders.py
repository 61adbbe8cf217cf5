"""Where things lie in a store's folder, and by which files they are locked.

`contexts/<id>/` holds one published context (`manifest.json` and its zarr arrays); names that begin with a dot are
contexts being written (`.tmp-`) or removed (`.trash-`), which no reader sees. `locks/` holds the locks of running jobs
and of families, `defaults/<id>.json` what a context was tuned to, `objects/` what is known of an object store,
`ended/` what it takes to make contexts again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from index_store.errors import InvalidArgumentError, StoreError
from index_store.store.description.context_id import is_context_id
from index_store.store.files.durable import TEMPORARY_PREFIX, make_folder, permissions_in, storing

JOB_LOCK_PREFIX = "job-"
"""Of the names of locks on jobs that make contexts (`index_store.jobs`)."""

NAMES_LOCK = f"{JOB_LOCK_PREFIX}names"

_FAMILY, _FETCH = ".family", ".fetch"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)


class StoreFolders:
    """The folders of one store. Nothing is made here but folders, and nothing is locked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contexts = path / "contexts"
        self.locks = path / "locks"
        self.defaults = path / "defaults"

    def make(self) -> None:
        """Makes what does not exist of the store. Raises StoreFullError or StoreError."""
        with storing("creating the store", self.path):
            for folder in (self.path, self.contexts, self.locks):
                make_folder(folder)

    def check_writable(self) -> None:
        """Raises StoreError where contexts cannot be made: who is to make some finds out before the first one."""
        for folder in (self.path, self.contexts, self.locks):
            if folder.exists() and not os.access(folder, os.W_OK):
                raise StoreError(
                    f"{folder}: nothing may be written here, but contexts are to be made; check the permissions and "
                    "how it is mounted",
                    path=folder,
                )

    def context(self, id_: str) -> Path:
        """Where a context is, or would be. Raises InvalidArgumentError for what is no id."""
        # Only well-formed ids become paths, so that no reference leads outside the store.
        if not is_context_id(id_):
            raise InvalidArgumentError(f"context id {id_[:80]!r} is not 64 lower-case hex digits")
        return self.contexts / id_

    def lock_path(self, id_: str) -> Path:
        """The file by which writers of a context exclude each other; makes the folder of locks where it is missing."""
        return self._lock(self.context(id_).name)

    def names_lock_path(self) -> Path:
        """The file that is locked while a name moves from one context to another; likewise."""
        return self._lock(NAMES_LOCK)

    def family_lock_path(self, id_: str) -> Path:
        """The file by which publishing a context's children and removing it exclude each other; likewise."""
        return self._lock(self.context(id_).name + _FAMILY)

    def fetch_lock_path(self, id_: str) -> Path:
        """The file by which those exclude each other who move a context's arrays here or away; likewise."""
        return self._lock(self.context(id_).name + _FETCH)

    def _lock(self, name: str) -> Path:
        with storing("creating the locks' folder", self.locks):
            make_folder(self.locks, permissions_in(self.contexts))
        return self.locks / name


def require_local(path: str | Path, what: str) -> Path:
    """The path of a file or folder of this machine. what: it is, as the error says it.

    Raises InvalidArgumentError for a URL: taken as a path, it would be a folder named like `s3:`.
    """
    url = _URL.fullmatch(str(path))
    if url is not None:
        raise InvalidArgumentError(
            f"{what} is {f'{url[1]}://{url[2]}'[:100]!r}, a URL; expected a path on this machine: stores and files "
            "elsewhere are reached where they are mounted"
        )
    return Path(path)


def is_lock_name(name: str) -> bool:
    """Whether a file of that name in the locks' folder is one: of a context, of a folder being written, or of a job."""
    return is_context_id(name.removesuffix(_FAMILY).removesuffix(_FETCH)) or name.startswith(
        (TEMPORARY_PREFIX, JOB_LOCK_PREFIX)
    )
