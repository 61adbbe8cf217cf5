"""A store and a bucket, kept alike: what was made, changed or deleted in one of them comes to the other.

A context is uploaded, read back until all of it verifies, and only then recorded. What comes from others appears here
with its manifest and its tokens alone (`store/elsewhere.py`). What was changed in both is told by the record that both
had last: field by field, the local change goes first. All that is to be done follows from what lies in the store and in
the bucket, so that whoever is killed is followed by who does the rest.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

from index_store.errors import ContextCorruptError, ContextNotFoundError, SparseKVError, StoreError
from index_store.objects.bucket import Bucket
from index_store.objects.context_file import file_bytes, nowhere, packed, receive
from index_store.objects.records import Held, Mark, content_key, damage_key, look, read_record, record_key
from index_store.objects.tier import Tier, open_object, write_metadata, writing
from index_store.store.catalog import CHANGEABLE, Store, neutral
from index_store.store.clean_up import BEYOND_MARGIN, remove_if
from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest
from index_store.store.elsewhere import kept_entries
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    locked_file,
    move_into_place,
    new_file,
    permissions_in,
    remove_tree,
    replace_in_context,
    storing,
    sync_tree,
    unused_name,
)
from index_store.store.zarr_io import check_chunks, check_metadata

EVERY_S = 5.0
FORGOTTEN = timedelta(days=30)
"""A deletion is told for so long: a store that was away for longer brings the context back."""
_ORPHANED = timedelta(days=1)
_TRIES = 5
_CERTAIN = 3
"""Readings, with pauses between them, after which a manifest is damaged for good."""
_LONGEST_PAUSE_S = 300.0
_UPDATE_S = 0.5

logger = logging.getLogger(__name__)


class _ConflictError(Exception):
    """Another one was faster: look again."""


@dataclass(frozen=True, slots=True)
class _Sides:
    """One context on both sides. held: what the bucket has of it; mark: its last record that was seen here; local: what
    is here. check: called now and then; what it raises ends the work."""

    bucket: Bucket
    id: str
    held: Held
    mark: Mark | None
    local: Manifest | None
    check: Callable[[], None]

    @property
    def base(self) -> Manifest | None:
        """What both sides had last."""
        return None if self.mark is None else self.mark.manifest


@dataclass(frozen=True, slots=True)
class CourierState:
    """What is to be done. pending: contexts that are not uploaded, or not as they are now, and their bytes. problem:
    the last one that is not mended, "" without."""

    pending: int = 0
    pending_bytes: int = 0
    problem: str = ""


class Courier:
    """Keeps a store and its bucket alike, from `start` to `stop`, on a thread of its own.

    Of all processes of one store one does so at a time.
    """

    def __init__(self, store: Store, tier: Tier, every_s: float = EVERY_S) -> None:
        self._store, self._tier, self._every_s = store, tier, every_s
        self.mended = 0
        """Contexts that others found damaged in the bucket, and that were uploaded again."""
        self._pauses: dict[str, tuple[int, float]] = {}
        self._problems: dict[str, str] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def start(self) -> None:
        """Begins at once."""
        self._thread.start()

    def stop(self, patience_s: float = 5.0) -> None:
        """Ends, and fetches with it, soon: what is not uploaded is uploaded by who comes next. Idempotent."""
        self._stopping.set()
        self._tier.close()
        if self._thread.is_alive():
            self._thread.join(patience_s)

    def state(self) -> CourierState:
        """What is left to be done, by what is in the store."""
        waiting = self.pending()
        problem = next(iter(self._problems.values()), "")
        return CourierState(len(waiting), sum(map(file_bytes, waiting)), problem)

    def figures(self) -> dict[str, Any]:
        """The same without paths, and what is being fetched, under the names of the API's ServerStatus."""
        state = self.state()
        problem = state.problem
        for hidden in (self._tier.url, str(self._store.path)):
            problem = problem.replace(f"{hidden}/", "").replace(hidden, "")
        return {
            "objects_pending": state.pending,
            "objects_pending_bytes": state.pending_bytes,
            "objects_fetching": len(self._tier.fetches()),
            "objects_problem": problem,
            "objects_mended": self.mended + self._tier.mended,
        }

    def pending(self) -> Sequence[Manifest]:
        """Contexts that are not in the bucket as they are now, parents first."""
        held = self._tier.held()
        return sorted(
            (each for each in self._store.list() if held.get(each.id) != _current(each)),
            key=lambda each: (each.parent is not None, each.created_at),
        )

    def upload(self, id_: str) -> None:
        """Has the bucket hold a context now. Raises StoreError where it does not: it is uploaded later."""
        self.look(wait=True)
        if any(each.id == id_ for each in self.pending()):
            raise StoreError(
                f"context {id_} is stored here, and not in {self._tier.url}: "
                f"{self._problems.get('') or self._problems.get(id_) or 'another process uses it'}; "
                "`index-store sync` tries again, and so does a server or a worker of this store",
                context=id_,
            )

    def look(self, check: Callable[[], None] = lambda: None, *, wait: bool = False) -> bool:
        """Does what is to be done now; whether all of it was. What fails is tried again after a pause.

        check: called now and then; what it raises ends it. wait: where another process does it now.
        """
        lock = self._store.folders.names_lock_path().with_name("job-objects")
        with locked_file(lock, wait=wait) as held:
            if not held:  # another process does it
                return False
            if self._paused(""):
                return False
            try:
                bucket, there = self._tier.bucket, look(self._tier.bucket)
                marks = self._tier.marks.all()
            except SparseKVError as error:
                self._note_failure("", error)
                return False
            self._note_success("")
            for id_ in self._store.notes.forlorn():
                self._store.notes.note_here(id_)
            local = {each.id: _current(each) for each in self._store.list()}
            ids = sorted(
                {*local, *there, *marks},
                key=lambda id_: (id_ in local and local[id_].parent is not None, id_),
            )
            done = [
                _alike(local.get(id_), there.get(id_), marks.get(id_))
                or self._settle_safely(bucket, id_, there.get(id_), marks.get(id_), check)
                for id_ in ids
            ]
            return all(done)

    def _run(self) -> None:
        def check() -> None:
            if self._stopping.is_set():
                raise StoreError("uploading was ended; it goes on with the next start")

        pause_s = 0.0
        while not self._stopping.is_set():
            try:
                self._stopping.wait(pause_s)
                pause_s = self._every_s
                self.look(check)
            except SparseKVError as error:
                if not self._stopping.is_set():
                    logger.warning("the object store is not looked into now: %s", error.message)
            except Exception:
                logger.exception("keeping the object store alike failed")

    def _settle_safely(
        self, bucket: Bucket, id_: str, held: Held | None, mark: Mark | None, check: Callable[[], None]
    ) -> bool:
        check()
        if self._paused(id_):
            return False
        try:
            for _ in range(_TRIES):
                try:
                    done = self._settle(bucket, id_, held or Held(), mark, check)
                    self._note_success(id_)
                    return done
                except _ConflictError:
                    held, mark = look(bucket, id_).get(id_), self._tier.marks.all().get(id_)
            return False
        except ContextNotFoundError:  # it was deleted meanwhile: the next look tells
            return False
        except SparseKVError as error:
            check()
            self._note_failure(id_, error)
            return False
        except Exception:  # of this context alone: the others go on
            logger.exception("keeping context %s alike failed", id_[:12])
            self._note_failure(
                id_, StoreError(f"keeping context {id_} alike failed; the log has the details", context=id_)
            )
            return False

    def _settle(
        self, bucket: Bucket, id_: str, held: Held, mark: Mark | None, check: Callable[[], None]
    ) -> bool:
        """Has one context be alike; False where that has to wait."""
        sides = _Sides(bucket, id_, held, mark, self._local(id_, mark), check)
        if not held.number:
            return self._settle_unrecorded(sides)
        if held.deleted:
            return self._settle_deleted(sides)
        base = sides.base
        remote = base if mark is not None and mark.number == held.number else None
        try:
            remote = remote or read_record(bucket, id_, held)
        except ContextCorruptError as error:
            self._tier.report(id_, error)
            raise
        if sides.local is None:
            # What others renewed meanwhile was removed here because it had expired.
            renewed = base is not None and self._store.expired(base) and not self._store.expired(remote)
            if self._store.notes.deleted(id_) and not renewed:
                self._bury(bucket, id_, held)
                self._store.notes.forget_deleted(id_)
                return True
            return self._appear(bucket, remote, held)
        return self._join(sides, sides.local, remote)

    def _restored(self, id_: str, mark: Mark | None, error: ContextCorruptError) -> Manifest:
        """The manifest that both sides had last, in place of one that is damaged here for good.

        Raises the error where none is known, or where it may be that the next reading is a better one.
        """
        if mark is None or mark.manifest is None or self._pauses.get(id_, (0, 0.0))[0] < _CERTAIN:
            raise error
        folders = self._store.folders
        with self._store.lock(id_):
            path = folders.context(id_) / MANIFEST_NAME
            replace_in_context(path, MANIFESTS.render(mark.manifest), folders.contexts, folders.locks)
        logger.warning(
            "context %s has the manifest again that %s had; what was changed here since, and is not there, is lost: %s",
            id_[:12],
            self._tier.url,
            error.message,
        )
        self.mended += 1
        return _current(mark.manifest)

    def _local(self, id_: str, mark: Mark | None) -> Manifest | None:
        """Raises what `Store.manifest` raises of one that cannot be used: it is left alone."""
        try:
            local = _current(self._store.manifest(id_))
        except ContextNotFoundError:
            return None
        except ContextCorruptError as error:
            return self._restored(id_, mark, error)
        if self._store.notes.deleted(id_):  # it was made again, or whoever deletes it is not done yet
            with self._store.family_lock(id_):
                if not self._store.folders.context(id_).is_dir():
                    return None
                self._store.notes.forget_deleted(id_)
        return local

    def _settle_unrecorded(self, sides: _Sides) -> bool:
        if sides.local is not None:
            return self._upload(sides, sides.local)
        self._store.notes.forget_deleted(sides.id)
        if sides.mark is not None:
            self._tier.marks.remove(sides.id)
        sides.bucket.delete(self._orphans(sides.held))
        return True

    def _settle_deleted(self, sides: _Sides) -> bool:
        bucket, id_, held, local, base = sides.bucket, sides.id, sides.held, sides.local, sides.base
        if local is not None:
            again = base is None or base.created_at != local.created_at
            if again and not self._store.elsewhere(id_):  # it was made since
                return self._upload(sides, local)
            if not remove_if(self._store, id_, self._store.expired):
                self._store.delete(id_)
            logger.info("context %s was deleted in %s, and is here, too", id_[:12], bucket.url)
        self._store.notes.forget_deleted(id_)
        if sides.mark is None or base is not None:
            self._tier.marks.write(id_, Mark(held.number, None))
        if held.old or held.contents:
            bucket.delete([*held.old, *held.contents])
        if held.changed_at is not None and self._store.now() - held.changed_at > FORGOTTEN:
            bucket.delete([held.key])
            self._tier.marks.remove(id_)
        return True

    def _join(self, sides: _Sides, local: Manifest, remote: Manifest) -> bool:
        """One that is here and there."""
        bucket, held, base = sides.bucket, sides.held, sides.base
        # Without a base it was forgotten, or who noted it was killed before: what was changed later counts.
        last = base or (remote if self._changed_later(local, held) else local)
        wanted = merged(last, local, remote)
        same, richer = neutral(local) == neutral(remote), _richer(local, remote)
        if (same or richer) and local != wanted:
            self._store.update(local.id, lambda present: _changed(present, local, wanted), _UPDATE_S)
        spoilt = content_key(remote) not in held.contents or (
            held.damaged and not self._store.elsewhere(local.id)
        )
        if richer or (same and spoilt):
            return self._upload(sides, wanted)
        wanted = replace(remote, **{name: getattr(wanted, name) for name in CHANGEABLE})
        if not same and not self._adopt(bucket, local, wanted):
            return False
        if wanted != remote:
            self._record(bucket, wanted, held)
        elif base != remote:
            self._tier.marks.write(local.id, Mark(held.number, remote))
        bucket.delete([*held.old, *self._orphans(held, content_key(remote))])
        return True

    def _changed_later(self, local: Manifest, held: Held) -> bool:
        changed_s = os.stat(self._store.folders.context(local.id) / MANIFEST_NAME).st_mtime
        return held.changed_at is None or changed_s > held.changed_at.timestamp()

    def _orphans(self, held: Held, kept: str = "") -> Sequence[str]:
        """Files of a context that nobody has recorded, and nobody will: they are older than any upload takes."""
        latest = self._store.now() - _ORPHANED
        return [key for key, each in held.contents.items() if key != kept and each.changed_at < latest]

    def _upload(self, sides: _Sides, local: Manifest) -> bool:
        """Has the bucket hold a context as it is to be, all of it read back, and says so."""
        bucket, held = sides.bucket, sides.held
        url = self._store.notes.url(local.id)
        if url is not None:
            raise StoreError(
                f"context {local.id} was in {url} alone, which has it no more; delete it, and make it again"
                if url == self._tier.url
                else f"context {local.id} is in {url} alone; bring it here (`index-store fetch --objects {url}`), or "
                "delete it",
                context=local.id,
            )
        known = self._tier.held().get(local.id)
        if known is not None and content_key(known) not in held.contents:
            # The bucket lost it: until it has it again, it stays on the disk.
            self._tier.marks.remove(local.id)
        parent = None if local.parent is None else local.parent.id
        if parent is not None and parent not in self._tier.held():
            return False  # which comes first
        key, said = content_key(local), neutral(local)
        nbytes = file_bytes(said)
        present = held.contents.get(key)
        if present is None or present.size != nbytes:
            began = time.monotonic()
            bucket.put(key, packed(self._store, local, said), nbytes)
            sides.check()
            logger.info(
                "uploaded context %s, %s, in %.1f s", local.id[:12], local.name, time.monotonic() - began
            )
        try:
            source, contents = open_object(bucket, local)
            receive(source, contents.parts, nowhere, check=sides.check)
        except ContextCorruptError:
            if not self._store.verify(local.id):
                bucket.delete([key])  # and once more
            raise
        self._record(bucket, local, held)
        return True

    def _record(self, bucket: Bucket, manifest: Manifest, held: Held) -> None:
        """Says what a context is now. Raises _ConflictError where another one was faster."""
        number = held.number + 1
        if not bucket.put_new(record_key(manifest.id, number), MANIFESTS.render(manifest)):
            raise _ConflictError
        # Numbers before the last are removed: who made one of these again was not the first.
        fresh = look(bucket, manifest.id).get(manifest.id)
        if fresh is None or fresh.number != number:
            raise _ConflictError
        self._tier.marks.write(manifest.id, Mark(number, manifest))
        bucket.delete([*fresh.old, *(key for key in fresh.contents if key != content_key(manifest))])
        if held.damaged:
            bucket.delete([damage_key(manifest.id)])
            self.mended += 1
            logger.info("context %s is whole again in %s", manifest.id[:12], bucket.url)

    def _bury(self, bucket: Bucket, id_: str, held: Held) -> None:
        """Says that a context was deleted, and removes it."""
        number = held.number + 1
        if not bucket.put_new(record_key(id_, number, deleted=True), b"deleted\n"):
            raise _ConflictError
        fresh = look(bucket, id_).get(id_)
        if fresh is None or fresh.number != number or not fresh.deleted:
            raise _ConflictError
        self._tier.marks.write(id_, Mark(number, None))
        bucket.delete([*fresh.old, *fresh.contents, *([damage_key(id_)] if fresh.damaged else [])])
        logger.info("context %s is deleted in %s", id_[:12], bucket.url)

    def _appear(self, bucket: Bucket, remote: Manifest, held: Held) -> bool:
        """Has a context of the bucket be here, with its manifest and tokens alone; False where that has to wait."""
        parent = remote.parent
        if parent is not None and not self._store.folders.context(parent.id).is_dir():
            return False  # which comes first
        contexts, locks = self._store.folders.contexts, self._store.folders.locks
        folder = unused_name(contexts, f"{TEMPORARY_PREFIX}{remote.id}")
        permissions = permissions_in(contexts)
        lock = self._store.folders.lock_path(remote.id)
        with locked_file(lock, wait=False) as alone, locked_file(locks / folder.name):
            if not alone:  # a job makes it here, and may take long
                return False
            try:
                with storing("writing", folder):
                    folder.mkdir(permissions)
                _bring_kept(bucket, remote, folder, permissions)
                with storing("publishing", folder):
                    with new_file(folder / MANIFEST_NAME, permissions) as file:
                        file.write(MANIFESTS.render(remote))
                    sync_tree(folder)
                    if not self._store.folders.context(remote.id).exists():
                        self._store.notes.note_elsewhere(remote.id, bucket.url)
                        move_into_place(folder, self._store.folders.context(remote.id), lambda: True)
            finally:
                remove_tree(folder)
        self._tier.marks.write(remote.id, Mark(held.number, remote))
        return True

    def _adopt(self, bucket: Bucket, local: Manifest, wanted: Manifest) -> bool:
        """Has the bucket's edition of a context be the one here; False while the one here is in use."""
        folders = self._store.folders
        folder = folders.context(local.id)
        if time.time() - os.stat(folder).st_mtime < BEYOND_MARGIN.total_seconds():
            return False
        lock, fetching = folders.lock_path(local.id), folders.fetch_lock_path(local.id)
        with locked_file(lock, wait=False) as held, locked_file(fetching, wait=False) as alone:
            if not (held and alone):
                return False
            self._store.notes.note_elsewhere(local.id, bucket.url)
            _bring_kept(bucket, wanted, folder, permissions_in(folders.contexts))
            data = MANIFESTS.render(wanted)
            replace_in_context(folder / MANIFEST_NAME, data, folders.contexts, folders.locks)
        return True

    def _paused(self, id_: str) -> bool:
        return self._pauses.get(id_, (0, 0.0))[1] > time.monotonic()

    def _note_success(self, id_: str) -> None:
        self._pauses.pop(id_, None)
        self._problems.pop(id_, None)

    def _note_failure(self, id_: str, error: SparseKVError) -> None:
        failed = self._pauses.get(id_, (0, 0.0))[0] + 1
        pause = min(_LONGEST_PAUSE_S, 2.0 ** min(failed, 10)) * random.uniform(0.5, 1.0)
        self._pauses[id_] = failed, time.monotonic() + pause
        self._problems[id_] = error.message
        what = f"context {id_[:12]}" if id_ else "the object store"
        logger.warning("%s: tried again in %.0f s: %s", what, pause, error.message)


def _alike(local: Manifest | None, held: Held | None, mark: Mark | None) -> bool:
    """Whether nothing is to be done of a context, as most of the time."""
    if held is None or mark is None or held.number != mark.number or local != mark.manifest:
        return False
    if held.old or held.damaged:
        return False
    return local is not None and not held.deleted and len(held.contents) == 1


def _bring_kept(bucket: Bucket, manifest: Manifest, folder: Path, permissions: int) -> None:
    """Fetches into a folder what is here of a context in any case, as far as it is not there, or not whole."""
    entries = [
        entry
        for entry in kept_entries(manifest)
        if any(chain(check_metadata(folder, [entry]), check_chunks(folder, [entry])))
    ]
    if not entries:
        return
    source, contents = open_object(bucket, manifest)
    files = write_metadata(folder, entries, permissions)
    try:
        receive(source, contents.some(entries), writing(files, folder, entries), threads=1)
    finally:
        files.seal()
    with storing("writing", folder):
        sync_tree(folder)


def _current(manifest: Manifest) -> Manifest:
    """As it would be written now."""
    return replace(manifest, format_version=manifest.written_version)


def merged(base: Manifest, local: Manifest, remote: Manifest) -> Manifest:
    """The local manifest with what others changed since `base`, which both had last."""
    theirs = {
        name: getattr(remote, name) for name in CHANGEABLE if getattr(local, name) == getattr(base, name)
    }
    return replace(local, **theirs)


def _changed(present: Manifest, seen: Manifest, wanted: Manifest) -> Manifest:
    """What is to be changed of a context that may have been changed since it was seen: the latter stays."""
    news = {
        name: getattr(wanted, name) for name in CHANGEABLE if getattr(present, name) == getattr(seen, name)
    }
    return replace(present, **news)


def _richer(one: Manifest, other: Manifest) -> bool:
    """Whether a context has all that the other has, and more: indexes, methods, or what it once continued."""
    if neutral(one) == neutral(other):
        return False
    if one.parent is None and other.parent is not None:
        return True
    ours = {*one.stored_indexes}, {*one.methods}
    theirs = {*other.stored_indexes}, {*other.methods}
    return (
        one.parent == other.parent
        and ours != theirs
        and all(a >= b for a, b in zip(ours, theirs, strict=True))
    )
