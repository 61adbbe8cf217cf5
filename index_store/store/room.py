"""How much a store holds: contexts that have expired go by themselves, and some make room for others within a bound.

Early go only contexts that somebody has said may go: those with an expiry, and beginnings that a server kept of its
own accord (`KEPT_BEGINNING`). Nothing goes that is pinned, that a living context continues, that somebody writes, or
that was used lately. Use is noted in the time of a context's folder, so that all who share the store see it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from index_store.errors import StoreBoundError, format_bytes
from index_store.store.catalog import Store
from index_store.store.clean_up import needed_ids, remove_if
from index_store.store.description.array_shapes import kv_entry, state_entry, window_entry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest

logger = logging.getLogger(__name__)

MARGIN = timedelta(minutes=10)
"""Nothing goes that was used, or that lived, so lately."""
KEPT_BEGINNING = "sparsekv.kept-beginning"
"""Label of contexts that a server made of what came again and again, and may drop."""


def note_use(store: Store, id_: str) -> None:
    """Notes that a context is used now, where this process may."""
    with suppress(OSError):
        os.utime(store.folders.context(id_))


class StoreRoom:
    """The contexts of a store within a bound. Safe to use from several threads and processes at once."""

    def __init__(self, store: Store, most_bytes: int | None = None, margin: timedelta = MARGIN) -> None:
        """most_bytes: of keys, values and indexes of all contexts; None without a bound."""
        self._store = store
        self._most = most_bytes
        self._margin = margin

    def used(self) -> int:
        """Bytes of all contexts whose manifest can be used."""
        return sum(map(_size, self._store.list()))

    def needed(self, id_: str, model: ModelIdentity, dtype: str, tokens: int, methods: Sequence[str]) -> int:
        """Bytes that a context will take about; 0 of one that is there. id_: "" where it is not known yet.

        methods: whose indexes it gets, none of a child's. They are taken to be as those of a context for the same
        methods, and without one as large as keys and values.
        """
        if id_ and self._store.folders.context(id_).is_dir():
            return 0
        whole = bool(methods)
        beside = (window_entry(model, tokens, dtype, whole=whole), state_entry(model, dtype))
        rows = kv_entry(model, tokens, dtype, whole=whole).nbytes
        others = sum(entry.nbytes for entry in beside if entry is not None)
        if not methods:
            return rows + others
        like = next(
            (
                manifest
                for manifest in self._store.list()
                if manifest.model.fingerprint == model.fingerprint
                and manifest.parent is None
                and set(methods) <= set(manifest.methods)
            ),
            None,
        )
        return rows + others + (rows if like is None else like.index_bytes * tokens // like.token_count)

    def require(self, nbytes: int) -> None:
        """Raises StoreBoundError where there is no room for so many bytes more, and none can be made."""
        if self._most is None or nbytes <= 0:
            return
        used, may_go = self.used(), sum(map(_size, self._may_go()))
        if used - may_go + nbytes > self._most:
            raise StoreBoundError(
                f"a context of about {format_bytes(nbytes)} does not fit: the store holds {format_bytes(used)}, of "
                f"which {format_bytes(may_go)} may go, and --store-bytes is {format_bytes(self._most)}; remove "
                "contexts, give some a time to live, or raise the bound",
                needed=nbytes,
                used=used,
                bound=self._most,
            )

    def make(self, nbytes: int) -> Sequence[str]:
        """Makes room for so many bytes more, by removing the least recently used that may go; returns their ids.

        Raises StoreBoundError, with nothing removed, where that does not suffice; StoreError where removing fails.
        """
        self.require(nbytes)
        return self._bring_down(nbytes)

    def sweep(self) -> Sequence[str]:
        """Removes what expired before the margin, and what has to go for the bound; returns ids. Raises StoreError.

        Where what may go does not suffice, the store stays above its bound: nothing else is removed.
        """
        if not os.access(self._store.folders.contexts, os.W_OK):
            return ()
        expired = [
            manifest.id
            for manifest in self._store.list()
            if self._over(manifest) and self._idle(manifest) and self._remove(manifest, self._over)
        ]
        return [*expired, *self._bring_down(0)]

    def _bring_down(self, nbytes: int) -> Sequence[str]:
        """Removes what may go until there is room for so many bytes, or nothing may go any more."""
        removed: list[str] = []
        over = 0 if self._most is None else self.used() + nbytes - self._most
        for manifest in self._may_go() if over > 0 else ():
            if over > 0 and self._remove(manifest, self._idle):
                removed.append(manifest.id)
                over -= _size(manifest)
        return removed

    def _remove(self, manifest: Manifest, unwanted: Callable[[Manifest], bool]) -> bool:
        if not remove_if(self._store, manifest.id, unwanted):
            return False
        logger.info(
            "removed context %s, %s (%s): %s",
            manifest.id[:12],
            manifest.name,
            format_bytes(_size(manifest)),
            "it had expired" if self._over(manifest) else "others needed room within the bound of the store",
        )
        return True

    def _over(self, manifest: Manifest) -> bool:
        """Whether it expired before the margin."""
        return manifest.expired(self._now() - self._margin)

    def _may_go(self) -> list[Manifest]:
        """What may be removed before its time, the least recently used first."""
        entries = self._store.entries()
        needed = needed_ids(self._store, entries)
        found = [
            manifest
            for manifest in entries
            if isinstance(manifest, Manifest)
            and (manifest.expires_at is not None or KEPT_BEGINNING in manifest.labels)
            and manifest.id not in needed
            and self._idle(manifest)
        ]
        return sorted(found, key=self._used_at)

    def _idle(self, manifest: Manifest) -> bool:
        """Whether it is neither pinned nor was used lately."""
        return not (manifest.pinned or self._used_at(manifest) > self._now() - self._margin)

    def _used_at(self, manifest: Manifest) -> datetime:
        try:
            used = os.stat(self._store.folders.context(manifest.id)).st_mtime
        except OSError:
            return self._now()
        return datetime.fromtimestamp(used, UTC)

    def _now(self) -> datetime:
        return self._store.now()


def _size(manifest: Manifest) -> int:
    return manifest.kv_bytes + manifest.index_bytes
