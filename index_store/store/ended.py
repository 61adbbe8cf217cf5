"""What it takes to make contexts again that expired, or had to go for others: their manifest, tokens and messages.

`ended/<id>/` holds that of each, as a context's folder does. A few bytes a token, it is kept for a while within a
bound. Nothing is kept of what somebody deleted, and what is kept goes when somebody deletes it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest
from index_store.store.elsewhere import kept_entries
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    TRASH_PREFIX,
    discard,
    make_folder,
    move_into_place,
    permissions_in,
    remove_tree,
    storing,
    sync_tree,
    unused_name,
)
from index_store.store.listing import Listing

if TYPE_CHECKING:
    from index_store.store.zarr_io import ContextFiles

MOST_BYTES = 1 << 30
KEPT_FOR = timedelta(days=30)
_STRAY_S = 3600.0


class Ended:
    """Those of one store. Safe to use from several threads and processes at once."""

    def __init__(self, store: Path, most_bytes: int = MOST_BYTES) -> None:
        self._contexts, self.folder, self._most = store / "contexts", store / "ended", most_bytes
        self._listing = Listing(self.folder)

    def known(self, id_: str) -> Manifest | None:
        """Of one context. Raises StoreUnavailableError."""
        if not self.folder.is_dir():
            return None
        entry = self._listing.known(id_)
        return entry if isinstance(entry, Manifest) else None

    def find(self, ref: str, tenant: str, model: str) -> Manifest | None:
        """That of a tenant, by id or by name, for which the newest counts. model: a fingerprint."""
        if not self.folder.is_dir():
            return None
        fits = (
            entry
            for entry in self._listing.entries()
            if isinstance(entry, Manifest)
            and ref in (entry.id, entry.name)
            and (entry.tenant, entry.model.fingerprint) == (tenant, model)
        )
        return max(fits, key=lambda each: (each.id == ref, each.created_at), default=None)

    def files(self, manifest: Manifest) -> ContextFiles:
        """Tokens and messages of one, read and verified."""
        from index_store.store.zarr_io import ContextFiles

        return ContextFiles(self.folder / manifest.id, manifest)

    def keep(self, manifest: Manifest) -> None:
        """Copies that of a context that is there, durably. Raises StoreFullError or StoreError."""
        source, target = self._contexts / manifest.id, self.folder / manifest.id
        with storing("keeping what it takes to make a context again", target):
            permissions = permissions_in(self._contexts)
            make_folder(self.folder, permissions)
            made = unused_name(self.folder, f"{TEMPORARY_PREFIX}{manifest.id}")
            try:
                made.mkdir(permissions)
                for entry in kept_entries(manifest):
                    shutil.copytree(source / entry.path, made / entry.path)
                (made / MANIFEST_NAME).write_bytes(MANIFESTS.render(manifest))
                sync_tree(made)
                move_into_place(made, target, lambda: False)
            finally:
                remove_tree(made)
        self.trim()

    def forget(self, id_: str) -> bool:
        """Removes that of a context; whether there was any. Raises StoreError."""
        if not os.path.lexists(self.folder / id_):
            return False
        with storing("deleting", self.folder / id_):
            return discard(self.folder / id_)

    def trim(self) -> None:
        """Removes what is too old, and of who has most the oldest, until all of it is within the bound."""
        if not self.folder.is_dir():
            return
        now = time.time()
        for path in self.folder.glob(".*"):
            stray = path.name.startswith((TEMPORARY_PREFIX, TRASH_PREFIX))
            with suppress(OSError):
                if stray and os.stat(path).st_mtime < now - _STRAY_S:
                    remove_tree(path)
        aged: list[tuple[float, str, str, int]] = []
        for entry in self._listing.entries():
            with suppress(OSError):
                at = os.stat(self.folder / entry.id).st_mtime
                if at < now - KEPT_FOR.total_seconds() or not isinstance(entry, Manifest):
                    self.forget(entry.id)
                else:
                    aged.append((at, entry.id, entry.tenant, _bytes(entry)))
        held: Counter[str] = Counter()
        for _, _, tenant, nbytes in aged:
            held[tenant] += nbytes
        aged.sort()
        while held.total() > self._most:
            most = max(held, key=lambda each: held[each])
            oldest = next(each for each in aged if each[2] == most)
            aged.remove(oldest)
            held[most] -= oldest[3]
            self.forget(oldest[1])


def _bytes(manifest: Manifest) -> int:
    """About what it takes: its arrays, and its manifest, which tells of every chunk."""
    return sum(each.nbytes for each in kept_entries(manifest)) + len(MANIFESTS.render(manifest))
