"""A store of contexts in a local folder: list, find, open, delete, verify, clean up.

Layout: `contexts/<id>/` holds one published context (`manifest.json` and its zarr arrays); names that begin with a
dot are contexts being written (`.tmp-`) or removed (`.trash-`), which no reader sees. `locks/` holds the locks of
running jobs, `defaults/<id>.json` what a context was tuned to.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from index_store.errors import (
    ContextAmbiguousError,
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    ManifestError,
    SparseKVError,
    StoreError,
    UnexpectedFileError,
)
from index_store.store.folders import (
    clear_free_lock,
    lock_folder,
    locked_file,
    remove_tree,
    storing,
    tree_bytes,
)
from index_store.store.manifest import Manifest, is_context_id
from index_store.store.manifest_json import parse_manifest
from index_store.store.stored_context import Context
from index_store.store.tuned_defaults import DefaultsFolder, TunedDefault
from index_store.store.writer import MANIFEST_NAME, TEMPORARY_PREFIX, TRASH_PREFIX, ContextWriter, discard
from index_store.store.zarr_io import check_chunks, chunk_path, verify_chunks
from index_store.store.zarr_metadata import check_metadata

_MIN_PREFIX = 6
_RESOURCE = "contexts/"
_METADATA_NAME = "zarr.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokenContext:
    """A context whose manifest cannot be read, and why."""

    id: str
    error: SparseKVError


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that a clean-up removed (or would remove): kind is "temporary", "trash", "expired", "default" (a tuned
    default without a context) or "lock"."""

    kind: str
    path: Path
    nbytes: int


def utc_now() -> datetime:
    """The present time, timezone-aware."""
    return datetime.now(UTC)


class Store:
    """The contexts in one folder. Safe to use from several threads and processes at once."""

    def __init__(
        self, path: str | Path, create: bool = False, clock: Callable[[], datetime] = utc_now
    ) -> None:
        """Opens a store; with `create` makes it where it does not exist. Raises StoreError when it cannot be used."""
        self.path = Path(path)
        self._contexts = self.path / "contexts"
        self._locks = self.path / "locks"
        self._defaults = DefaultsFolder(self.path / "defaults")
        self._clock = clock
        if create:
            with storing("creating the store", self.path):
                self._contexts.mkdir(parents=True, exist_ok=True)
                self._locks.mkdir(exist_ok=True)
        if not self._contexts.is_dir():
            raise StoreError(
                f"{self.path}: no store here (no folder 'contexts'); `prefill-worker run --store` makes one",
                path=self.path,
            )

    def entries(self) -> list[Manifest | BrokenContext]:
        """Every published context, newest first; those whose manifest cannot be read come last."""
        manifests: list[Manifest] = []
        broken: list[BrokenContext] = []
        for id_ in self._ids():
            try:
                manifests.append(self.manifest(id_))
            except ContextNotFoundError:
                continue  # deleted meanwhile
            except SparseKVError as error:
                broken.append(BrokenContext(id_, error))
        manifests.sort(key=lambda manifest: (-manifest.created_at.timestamp(), manifest.id))
        return [*manifests, *broken]

    def list(self) -> list[Manifest]:
        """Manifests of the published contexts, newest first, expired ones included, unreadable ones not."""
        return [entry for entry in self.entries() if isinstance(entry, Manifest)]

    def manifest(self, id_: str) -> Manifest:
        """The manifest of a context, checked. Raises ContextNotFoundError, a ContextCorruptError or
        FormatVersionError."""
        folder = self._folder(id_)
        path = folder / MANIFEST_NAME
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if folder.is_dir():
                raise ManifestError(
                    f"{path}: the manifest is missing; delete the context", path=path
                ) from None
            raise ContextNotFoundError(f"{self.path}: no context {id_}", context=id_) from None
        except OSError as error:
            raise ManifestError(
                f"{path}: the manifest cannot be read: {error.strerror}", path=path
            ) from error
        manifest = parse_manifest(data, str(path))
        if manifest.id != id_:
            raise ManifestError(
                f"{path}: field 'id' is {manifest.id!r}, expected {id_!r}, its folder's name; delete the context",
                path=path,
                field="id",
            )
        return manifest

    def resolve(self, ref: str) -> str:
        """The id that a reference means: a full id, `contexts/<id>`, an id's first 6 or more digits, or a name.

        Raises ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
        """
        wanted = ref.removeprefix(_RESOURCE)
        if is_context_id(wanted):
            if not self._folder(wanted).is_dir():
                raise ContextNotFoundError(f"{self.path}: no context {wanted}", context=wanted)
            return wanted
        found = {manifest.id for manifest in self.list() if manifest.name == ref}
        if len(wanted) >= _MIN_PREFIX:
            found |= {id_ for id_ in self._ids() if id_.startswith(wanted)}
        if not found:
            raise ContextNotFoundError(
                f"{self.path}: no context {ref!r}; give an id, its first {_MIN_PREFIX} or more digits, or a name "
                "as `index-store ls` shows them",
                context=ref,
            )
        if len(found) > 1:
            fits = ", ".join(id_[:16] for id_ in sorted(found))
            raise ContextAmbiguousError(
                f"{self.path}: {ref!r} fits {len(found)} contexts ({fits}); give an id"
            )
        return found.pop()

    def open(self, id_: str) -> Context:
        """Opens a context for reading, after checking manifest, expiry, and of every chunk its presence, size and the
        checksum at its end. The chunks' contents are verified when they are loaded.

        Raises ContextNotFoundError, ContextExpiredError, FormatVersionError or the matching ContextCorruptError.
        """
        manifest = self.manifest(id_)
        self.check_expiry(manifest)
        folder = self._folder(id_)
        for problem in chain(check_metadata(folder, manifest.arrays), check_chunks(folder, manifest.arrays)):
            if not folder.is_dir():
                raise ContextNotFoundError(f"{self.path}: no context {id_}", context=id_)
            raise problem
        return Context(folder, manifest)

    def check_expiry(self, manifest: Manifest) -> None:
        """Raises ContextExpiredError once the context's time to live has passed."""
        if manifest.expired(self._clock()):
            raise ContextExpiredError(
                f"context {manifest.id} expired at {manifest.expires_at}; prefill the document again",
                context=manifest.id,
                expired_at=manifest.expires_at,
            )

    def expired(self, manifest: Manifest) -> bool:
        """Whether the context's time to live has passed."""
        return manifest.expired(self._clock())

    def delete(self, id_: str) -> None:
        """Removes a context, whatever its state. Who has it open or mapped keeps what they have.

        Raises ContextNotFoundError when it is not there.
        """
        with storing("deleting", self._folder(id_)):
            removed = discard(self._folder(id_))
        self._defaults.remove(id_)
        if not removed:
            raise ContextNotFoundError(f"{self.path}: no context {id_}", context=id_)

    def default_method(self, id_: str) -> TunedDefault | None:
        """What the context was tuned to; None when it was not. Raises TunedDefaultError for a damaged record."""
        return self._defaults.read(self._folder(id_).name)

    def set_default_method(self, id_: str, default: TunedDefault) -> None:
        """Replaces what the context was tuned to; the context itself stays as it is.

        Raises ContextNotFoundError, InvalidArgumentError for a record of another context, StoreFullError or StoreError.
        """
        folder = self._folder(id_)
        if default.context != id_:
            raise InvalidArgumentError(f"the tuned default is of context {default.context}, expected {id_}")
        with self.lock(id_):
            if folder.is_dir():
                self._defaults.write(default)
        # Who deletes the context meanwhile removes its default before this or leaves it to this.
        if not folder.is_dir():
            self._defaults.remove(id_)
            raise ContextNotFoundError(f"{self.path}: no context {id_}", context=id_)

    def verify(
        self, id_: str, on_bytes: Callable[[int], None] = lambda _: None
    ) -> Sequence[ContextCorruptError]:
        """Reads every byte of a context and returns one error per bad file; none when it is as it was written.

        A file that is not part of the context is an UnexpectedFileError; the context can be used nevertheless.
        `on_bytes` is called with the number of bytes read, for progress. Raises ContextNotFoundError or
        FormatVersionError.
        """
        try:
            manifest = self.manifest(id_)
        except ContextCorruptError as error:
            return [error]
        folder = self._folder(id_)
        problems = [
            *check_metadata(folder, manifest.arrays),
            *verify_chunks(folder, manifest.arrays, on_bytes),
            *_unexpected_files(folder, manifest),
        ]
        if problems and not folder.is_dir():
            raise ContextNotFoundError(f"{self.path}: context {id_} was deleted meanwhile", context=id_)
        return problems

    def gc(self, dry_run: bool = False) -> Sequence[Removed]:
        """Removes what nobody can use: what dead writers left, half-deleted and expired contexts, locks of dead jobs.

        Returns what was removed, or with `dry_run` what would be.
        """
        removed = [*self._clear_temporary(dry_run)]
        for path in sorted(self._contexts.glob(f"{TRASH_PREFIX}*")):
            removed.append(Removed("trash", path, tree_bytes(path)))
            if not dry_run:
                with storing("removing", path):
                    remove_tree(path)
        for manifest in self.list():
            if not self.expired(manifest):
                continue
            folder = self._folder(manifest.id)
            size = tree_bytes(folder)
            if dry_run or self._remove_expired(manifest.id):
                removed.append(Removed("expired", folder, size))
        return [*removed, *self._clear_defaults(dry_run), *self._clear_locks(dry_run)]

    def longest_prefix(
        self, model_fingerprint: str, token_ids: Sequence[int] | Tensor | NDArray[np.integer]
    ) -> tuple[Manifest, int] | None:
        """The longest context of that model whose tokens all begin `token_ids`, and its length in tokens.

        None when there is none. Of equally long ones the newest; expired and unreadable ones do not count.
        """
        wanted = np.asarray(token_ids)
        candidates = [
            manifest
            for manifest in self.list()
            if manifest.model.fingerprint == model_fingerprint
            and manifest.token_count <= len(wanted)
            and not self.expired(manifest)
        ]
        for manifest in sorted(candidates, key=lambda manifest: -manifest.token_count):
            try:
                tokens = Context(self._folder(manifest.id), manifest).tokens().numpy()
            except (ContextCorruptError, ContextNotFoundError) as error:
                logger.warning("context %s is left out of the search: %s", manifest.id[:12], error)
                continue
            if np.array_equal(tokens, wanted[: len(tokens)]):
                return manifest, manifest.token_count
        return None

    @contextmanager
    def lock(self, id_: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Holds the right to write the context; who comes second waits. Ends with the process at the latest.

        `on_wait` is called once when another job holds it. After waiting, look whether the context is there.
        """
        with locked_file(self._lock_path(id_), on_wait):
            yield

    def writer(self, id_: str) -> ContextWriter:
        """Starts writing a context, after removing what dead writers left."""
        self._clear_temporary(dry_run=False)
        return ContextWriter(self._contexts, self._folder(id_).name, lambda: self._ready(id_))

    def _ready(self, id_: str) -> bool:
        """Whether the published context can be opened."""
        try:
            self.open(id_).close()
        except SparseKVError:
            return False
        return True

    def _clear_temporary(self, dry_run: bool) -> Sequence[Removed]:
        removed = []
        for path in sorted(self._contexts.glob(f"{TEMPORARY_PREFIX}*")):
            descriptor = lock_folder(path)
            if descriptor is None:
                continue
            try:
                removed.append(Removed("temporary", path, tree_bytes(path)))
                if not dry_run:
                    with storing("removing", path):
                        remove_tree(path)
            finally:
                os.close(descriptor)
        return removed

    def _clear_defaults(self, dry_run: bool) -> Sequence[Removed]:
        """Removes tuned defaults of contexts that are gone, and what killed writers left of one."""
        removed = []
        for id_, path in self._defaults.files():
            if path == self._defaults.path(id_) and self._folder(id_).is_dir():
                continue
            with locked_file(self._lock_path(id_), wait=False) as held, storing("removing", path):
                if held and path.exists():
                    removed.append(Removed("default", path, path.stat().st_size))
                    if not dry_run:
                        path.unlink()
        return removed

    def _clear_locks(self, dry_run: bool) -> Sequence[Removed]:
        removed = []
        for path in sorted(self._locks.glob("*")):
            if not is_context_id(path.name) or not path.is_file():
                continue
            with storing("removing", path):
                if clear_free_lock(path, dry_run):
                    removed.append(Removed("lock", path, 0))
        return removed

    def _remove_expired(self, id_: str) -> bool:
        # A job may be replacing it: then it is not ours to remove.
        with locked_file(self._lock_path(id_), wait=False) as held:
            return held and self.expired(self.manifest(id_)) and discard(self._folder(id_))

    def _lock_path(self, id_: str) -> Path:
        with storing("creating the locks' folder", self._locks):
            self._locks.mkdir(exist_ok=True)
        return self._locks / self._folder(id_).name

    def _folder(self, id_: str) -> Path:
        # Only well-formed ids become paths, so that no reference leads outside the store.
        if not is_context_id(id_):
            raise InvalidArgumentError(f"context id {id_[:80]!r} is not 64 lower-case hex digits")
        return self._contexts / id_

    def _ids(self) -> Iterator[str]:
        try:
            names = sorted(os.listdir(self._contexts))
        except OSError as error:
            raise StoreError(
                f"{self._contexts}: cannot be listed: {error.strerror}", path=self._contexts
            ) from error
        return (name for name in names if is_context_id(name))


def _unexpected_files(folder: Path, manifest: Manifest) -> Iterator[ContextCorruptError]:
    """Yields one error per file, or link to a folder, that is not part of the context."""
    expected = {folder / MANIFEST_NAME}
    for entry in manifest.arrays:
        nodes = (Path(entry.path), *Path(entry.path).parents)
        expected.update(folder / node / _METADATA_NAME for node in nodes)
        expected.update(chunk_path(folder, entry, indices) for indices in entry.chunk_indices())
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for path in sorted(Path(parent, name) for name in (*files, *links)):
            if path not in expected:
                yield UnexpectedFileError(
                    f"{path}: not part of the context, expected only what its manifest lists; nothing reads it: "
                    "remove the file, or delete the context (`index-store rm`) and prefill it again",
                    path=path,
                )
