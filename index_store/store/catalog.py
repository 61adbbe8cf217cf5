"""A store of contexts in a local folder (`store_folders`): list, find, open, change, delete, verify.

What reads and writes arrays takes seconds to import: it is imported where it is needed, so that listing takes none.
"""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from index_store.errors import (
    ContextAmbiguousError,
    ContextBusyError,
    ContextCorruptError,
    ContextElsewhereError,
    ContextExpiredError,
    ContextHasChildrenError,
    ContextNotFoundError,
    FormatVersionError,
    InvalidArgumentError,
    NameTakenError,
    PermissionDeniedError,
    SparseKVError,
    StoreError,
    StoreUnavailableError,
)
from index_store.store.description.callers import OPERATOR, Caller
from index_store.store.description.context_id import is_context_id
from index_store.store.description.json_fields import (
    MOST,
    Number,
    Sealed,
    Whole,
    check_name,
    check_utc,
    field_error,
)
from index_store.store.description.manifest import MANIFEST_NAME, MANIFESTS, Manifest
from index_store.store.elsewhere import Beyond, Notes, bytes_here, kept_entries, remove_arrays
from index_store.store.ended import Ended
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    discard,
    locked_file,
    locked_within,
    make_folder,
    permissions_in,
    replace_file,
    replace_in_context,
    storing,
)
from index_store.store.files.leftovers import dead_folders, log_failure, removed
from index_store.store.files.reading import READ_LIMIT_S, WrongFileError, read_bounded, read_file, unavailable
from index_store.store.listing import BrokenContext, Entry, Listing
from index_store.store.store_folders import StoreFolders, require_local

if TYPE_CHECKING:
    from index_store.store.stored_context import Context
    from index_store.store.writer import ContextWriter
    from index_store.store.zarr_io import ContextFiles, Problem

TARGETS = ("mass", "kl")
_SUFFIX = ".json"
_LARGEST = 1 << 20
_REPAIR = "tune the context again (`decode-engine tune`), remove the file, or name a method in every request"


class TunedDefaultError(ContextCorruptError, reason="TUNED_DEFAULT_INVALID"):
    """A tuned default is not what was written, or of another format; its context is not affected."""


@dataclass(frozen=True, slots=True)
class TunedDefault:
    """What a request gets that names no method, and how that was found.

    method: an expression for `get_method`. keep, mass, tokens: its budget, at most one. target, wanted: what was
    asked for, `mass` captured on average or `kl` at most. reached: what was measured, by name. created_at: UTC.
    """

    context: str
    method: str
    keep: Number | None
    mass: Number | None
    tokens: Whole | None
    target: str
    wanted: Number
    reached: Mapping[str, Number]
    created_at: datetime

    def __post_init__(self) -> None:
        if not is_context_id(self.context):
            raise field_error("context", self.context, "64 lower-case hex digits")
        check_name("method", self.method)
        for name, value in (("keep", self.keep), ("mass", self.mass), ("tokens", self.tokens)):
            most = MOST if name == "tokens" else 1
            if value is not None and not 0 < value <= most:
                raise field_error(name, value, f"a number above 0 and at most {most}, or null")
        if sum(value is not None for value in (self.keep, self.mass, self.tokens)) > 1:
            raise field_error("keep", self.keep, "at most one of keep, mass and tokens")
        if self.target not in TARGETS:
            raise field_error("target", self.target, f"one of {', '.join(TARGETS)}")
        check_utc("created_at", self.created_at)


DEFAULTS = Sealed(
    TunedDefault,
    "the tuned default",
    _REPAIR,
    wrong=TunedDefaultError,
    damaged=TunedDefaultError,
    foreign=TunedDefaultError,
)
"""Files of `defaults/`."""


class DefaultsFolder:
    """The tuned defaults of a store's contexts. Writers of one context exclude each other by its lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def path(self, id_: str) -> Path:
        """Where the default of a context is kept."""
        return self._path / f"{id_}{_SUFFIX}"

    def read(self, id_: str) -> TunedDefault | None:
        """The default of a context, None without one.

        Raises TunedDefaultError for a file that cannot be used, StoreUnavailableError for one that cannot be read now.
        """
        path = self.path(id_)
        try:
            data, _ = read_file(path, _LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except WrongFileError as error:
            raise TunedDefaultError(
                f"{path}: the tuned default is {error.strerror}; {_REPAIR}", path=path
            ) from error
        except OSError as error:
            raise unavailable(path, error) from error
        default = DEFAULTS.parse(data, str(path))
        if default.context != id_:
            raise TunedDefaultError(
                f"{path}: the tuned default is of context {default.context}, expected {id_}, the file's name; "
                f"{_REPAIR}",
                path=path,
            )
        return default

    def write(self, default: TunedDefault) -> None:
        """Replaces the default of a context, all at once and durably. Raises StoreFullError or StoreError."""
        path = self.path(default.context)
        with storing("writing the tuned default", path):
            permissions = permissions_in(self._path.parent / "contexts")
            make_folder(self._path, permissions)
            replace_file(path, DEFAULTS.render(default), permissions)

    def remove(self, id_: str) -> None:
        """Removes the default of a context, where there is one."""
        path = self.path(id_)
        with storing("removing the tuned default", path):
            path.unlink(missing_ok=True)

    def files(self) -> Iterator[tuple[str, Path]]:
        """Context id and path of every default, and of what killed writers left of one."""
        for path in sorted(self._path.glob("*")):
            id_ = path.name.removeprefix(TEMPORARY_PREFIX).removesuffix(_SUFFIX)
            written = (f"{TEMPORARY_PREFIX}{id_}{_SUFFIX}", f"{TEMPORARY_PREFIX}{id_}")
            if is_context_id(id_) and path.name in (f"{id_}{_SUFFIX}", *written):
                yield id_, path


CHANGEABLE = ("name", "expires_at", "labels", "pinned", "readers", "renew")
"""What may change of a context at any time."""


def neutral(manifest: Manifest) -> Manifest:
    """What of a context never changes: as if it had never been named or labelled."""
    unset = {each.name: each for each in fields(Manifest)}
    blank: dict[str, object] = {"name": manifest.id, "expires_at": None}
    for name in CHANGEABLE:
        each = unset[name]
        if each.default_factory is not MISSING:
            blank[name] = each.default_factory()
        elif each.default is not MISSING:
            blank[name] = each.default
    return replace(manifest, **blank, format_version=manifest.written_version)  # type: ignore[arg-type]


logger = logging.getLogger(__name__)

_MIN_PREFIX = 6
_RESOURCE = "contexts/"

Result = TypeVar("Result")


def utc_now() -> datetime:
    return datetime.now(UTC)


class Store:
    """The contexts in one folder. Safe to use from several threads and processes at once.

    Whatever reads raises StoreUnavailableError when the store cannot be read now, or does not answer for longer than
    the limit. Nothing is then known about the context, least of all that it is damaged.
    """

    def __init__(
        self,
        path: str | Path,
        create: bool = False,
        clock: Callable[[], datetime] = utc_now,
        read_limit_s: float = READ_LIMIT_S,
    ) -> None:
        """Opens a store; with `create` makes it where it does not exist. Raises StoreError when it cannot be used, and
        InvalidArgumentError for a URL.

        read_limit_s: how long one step of reading may take (see `store/files/reading.py`).
        """
        self.path = require_local(path, "store")
        self.folders = StoreFolders(self.path)
        self._defaults = DefaultsFolder(self.folders.defaults)
        self._listing = Listing(self.folders.contexts)
        self.notes, self.ended = Notes(self.path), Ended(self.path)
        self.beyond: Beyond | None = None
        self.cleaned_s = -math.inf
        """When it was cleaned up last from here, on `time.monotonic`."""
        self._clock = clock
        self._limit_s = read_limit_s
        self._caller = OPERATOR
        if create:
            self.folders.make()
        if not self.bounded(self.folders.contexts.is_dir):
            raise StoreError(
                f"{self.path}: no store here (no folder 'contexts'); `prefill-worker run --store` makes one",
                path=self.path,
            )

    def seen_by(self, caller: Caller) -> Store:
        """The same store as a caller sees it: contexts of others that it may not read are not there, whichever way they
        are looked for, and finding that takes as long. Those that it may only read are neither changed nor deleted."""
        seen = copy.copy(self)
        seen._caller = caller
        return seen

    def _sees(self, entry: Entry | None) -> bool:
        """Whether what there is, None for nothing, is there for the caller. What cannot be read belongs to whom it
        did when it could."""
        known = entry.last if isinstance(entry, BrokenContext) else entry
        if known is None:
            return entry is not None and self._caller.admin
        return self._caller.sees(known.tenant, known.readers)

    def owns(self, manifest: Manifest) -> bool:
        """Whether a context is the caller's own."""
        return self._caller.owns(manifest.tenant)

    def _require_seen(self, id_: str) -> None:
        """Raises ContextNotFoundError where there is no context for the caller, the same for whatever reason."""
        if not self._caller.admin and not self._sees(self._listing.known(id_)):
            raise self._missing(id_)

    def lists(self, id_: str) -> bool:
        """Whether the list of contexts has one, whoever may see it; no other file is looked at."""
        return self.bounded(partial(self._listing.known, self.folders.context(id_).name)) is not None

    def require_own(self, id_: str) -> None:
        """Raises PermissionDeniedError for a context that the caller may only read, ContextNotFoundError for one that
        it does not see; nothing where the store has none at all and the caller is an admin."""
        if self._caller.admin:
            return
        entry = self.bounded(partial(self._listing.known, self.folders.context(id_).name))
        entry = entry or self.ended.known(id_)
        if entry is None or not self._sees(entry):
            raise self._missing(id_)
        known = entry.last if isinstance(entry, BrokenContext) else entry
        if known is None or not self._caller.owns(known.tenant):
            raise PermissionDeniedError(
                f"context {id_[:12]} is another tenant's, which lets this one read it and no more",
                context=id_,
            )

    def _missing(self, id_: str) -> ContextNotFoundError:
        return ContextNotFoundError(f"{self.path}: no context {id_}", context=id_)

    def entries(self) -> Sequence[Entry]:
        """Every published context, newest first; those whose manifest cannot be used come last.

        Contexts that were in an earlier list are not looked at again (`entry` does).
        """
        found = self.bounded(self._listing.entries)
        return found if self._caller.admin else [entry for entry in found if self._sees(entry)]

    def entries_for(self, id_: str) -> Sequence[Entry]:
        """The same for an admin who asks whether a context is continued: others may be as they were before."""
        return self.bounded(partial(self._listing.entries_for, id_))

    def list(self) -> Sequence[Manifest]:
        """Manifests of the published contexts, newest first, expired ones included, unusable ones not."""
        return [entry for entry in self.entries() if isinstance(entry, Manifest)]

    def entry(self, id_: str) -> Entry:
        """One published context, as it is now. Raises ContextNotFoundError."""
        try:
            return self.manifest(id_)
        except (ContextCorruptError, FormatVersionError, StoreUnavailableError) as error:
            return BrokenContext(id_, error)

    def manifest(self, id_: str) -> Manifest:
        """The manifest of a context, checked. Raises ContextNotFoundError, a ContextCorruptError or
        FormatVersionError."""
        return self.bounded(partial(self._manifest, self.folders.context(id_).name))

    def usable(self, id_: str) -> Manifest | None:
        """The same; None of a context that is not there, or cannot be used for good."""
        try:
            return self.manifest(id_)
        except (ContextNotFoundError, ContextCorruptError, FormatVersionError):
            return None

    def _manifest(self, id_: str) -> Manifest:
        self._require_seen(id_)
        found = self._listing.manifest(id_)
        if not self._sees(found):  # it has changed
            raise self._missing(id_)
        return found

    def resolve(self, ref: str, model: str = "") -> str:
        """The id that a reference means: a full id, `contexts/<id>`, an id's first 6 or more digits, or a name.

        Digits may be upper-case. The id of a context means that context, whatever others are called. Of several that
        fit, those that have expired do not count unless all have, and those of other models, or tenants, unless all
        are. A name that moves, or whose move a killed process left half done, is that of the newest that has it: it
        belongs to one or the other at any time. model: a fingerprint, "" where all are alike.

        Raises ContextNotFoundError, or ContextAmbiguousError when several contexts fit.
        """
        digits = ref.removeprefix(_RESOURCE).lower()
        if is_context_id(digits) and self.bounded(partial(self._is_there, digits)):
            return digits
        fits = [
            entry
            for entry in self.entries()
            if (isinstance(entry, Manifest) and entry.name == ref)
            or (len(digits) >= _MIN_PREFIX and entry.id.startswith(digits))
        ]
        if not fits:
            raise ContextNotFoundError(
                f"{self.path}: no context {ref[:600]!r}; give an id, its first {_MIN_PREFIX} or more digits, or a name "
                "as lists of the contexts (`ls`) show them",
                context=ref[:600],
            )
        live = [entry for entry in fits if not (isinstance(entry, Manifest) and self.expired(entry))]
        found = live or fits
        mine = [each for each in found if isinstance(each, Manifest) and each.tenant == self._caller.tenant]
        own = [
            entry
            for entry in mine or found
            if isinstance(entry, Manifest) and entry.model.fingerprint == model
        ]
        candidates = own or mine or found
        alike = {(each.name, each.model.fingerprint, each.tenant) for each in own}
        if len(own) > 1 and len(alike) == 1 and own[0].name == ref:
            return max(own, key=lambda each: (each.created_at, each.id)).id
        if len(candidates) > 1:
            shown = ", ".join([*sorted(entry.id[:16] for entry in candidates)[:8], "..."][: len(candidates)])
            raise ContextAmbiguousError(
                f"{self.path}: {ref!r} fits {len(candidates)} contexts ({shown}); give an id, or give the name to "
                "one of them (`index-store update ID --name NAME --move-name`, or at a server `contexts update`)"
            )
        return candidates[0].id

    def _is_there(self, id_: str) -> bool:
        if self._caller.admin:
            return self.folders.context(id_).is_dir()
        return self._sees(self._listing.known(id_))

    def open(self, id_: str, manifest: Manifest | None = None, *, expired: bool = False) -> Context:
        """Opens a context for reading, after checking manifest, expiry, and of every chunk its presence, size and the
        checksum at its end. The chunks' contents are verified when they are loaded.

        manifest: one that was read before; the context then has the indexes of that time. expired: also where its time
        to live has passed. Raises ContextNotFoundError, ContextExpiredError, FormatVersionError, ContextCorruptError.
        """
        from index_store.store.stored_context import Context

        checked = self.check(id_, manifest, expired=expired)
        return Context(self.folders.context(id_), checked, self._limit_s)

    def check(self, id_: str, manifest: Manifest | None = None, *, expired: bool = False) -> Manifest:
        """The same checks alone: the context's manifest."""
        self.bring(id_)
        return self.bounded(partial(self._check, id_, manifest, expired))

    def _check(self, id_: str, manifest: Manifest | None, expired: bool) -> Manifest:
        from index_store.store.zarr_io import check_chunks, check_metadata

        manifest = manifest or self.manifest(id_)
        if not expired:
            self.check_expiry(manifest)
        folder = self.folders.context(id_)
        for problem in chain(check_metadata(folder, manifest.arrays), check_chunks(folder, manifest.arrays)):
            if not folder.is_dir():
                raise ContextNotFoundError(f"{self.path}: no context {id_}", context=id_)
            raise problem
        return manifest

    def elsewhere(self, id_: str) -> bool:
        """Whether a context's keys, values and indexes are not here (see `store/elsewhere.py`)."""
        return self.notes.url(id_) is not None

    def bring(self, id_: str, check: Callable[[], None] = lambda: None, limit_s: float | None = None) -> None:
        """Has all of a context here, as `Beyond.bring` says. Raises ContextElsewhereError without one."""
        folder = self.folders.context(id_)
        if self.beyond is not None:
            with suppress(OSError):
                os.utime(folder)  # before the look: who moves it away looks for this behind its note
        url = self.notes.url(id_)
        if url is None or not folder.is_dir():
            return
        self.bounded(partial(self._require_seen, id_))
        if self.beyond is None or self.beyond.url != url:
            raise ContextElsewhereError(
                f"the keys and values of context {id_} are in the object store {url}, and not here; start this with "
                f"--objects {url}, or fetch it first (`index-store fetch`)",
                context=id_,
                objects=url,
            )
        self.beyond.bring(id_, check, limit_s)

    def mend(self, id_: str, error: BaseException | None) -> None:
        """Has a context whose reading ended so made whole, where it is damaged, and is whole elsewhere. What fails is
        logged: the next reading tries again."""
        if self.beyond is None or not isinstance(error, ContextCorruptError):
            return
        try:
            self.beyond.mend(id_, error)
        except SparseKVError as failed:
            logger.warning("context %s is damaged, and not mended now: %s", id_[:12], failed.message)
        except Exception:  # who reads is told of the damage all the same
            logger.exception("mending context %s failed", id_[:12])

    def evict(self, id_: str, unwanted: Callable[[Manifest], bool]) -> bool:
        """Removes the arrays of a context that is held elsewhere, and is unwanted here; whether it did.

        Raises StoreError.
        """
        lock, fetching = self.folders.lock_path(id_), self.folders.fetch_lock_path(id_)
        with locked_file(lock, wait=False) as held, locked_file(fetching, wait=False) as alone:
            if self.beyond is None or not (held and alone):
                return False
            manifest = self.usable(id_)
            if manifest is None or not unwanted(manifest):
                return False
            before = self.notes.url(id_)
            self.notes.note_elsewhere(id_, self.beyond.url)
            if not unwanted(manifest):  # whoever began to use it looks for the note
                if before is None:
                    self.notes.note_here(id_)
                return False
            folder = self.folders.context(id_)
            with storing("removing arrays", folder):
                remove_arrays(folder, manifest)
        return True

    def bytes_here(self, manifest: Manifest) -> int:
        """What a context takes of the disk, about."""
        return bytes_here(self.folders.context(manifest.id), manifest, elsewhere=self.elsewhere(manifest.id))

    def files(self, manifest: Manifest) -> ContextFiles:
        """A context of which a few files are read, without a look at the others."""
        from index_store.store.zarr_io import ContextFiles

        return ContextFiles(self.folders.context(manifest.id), manifest, self._limit_s)

    def check_expiry(self, manifest: Manifest) -> None:
        """Raises ContextExpiredError once the context's time to live has passed."""
        if manifest.expired(self._clock()):
            raise ContextExpiredError(
                f"context {manifest.id} expired at {manifest.expires_at}; make it again",
                context=manifest.id,
                expired_at=manifest.expires_at,
            )

    def now(self) -> datetime:
        """The present time in UTC."""
        return self._clock()

    def expired(self, manifest: Manifest) -> bool:
        return manifest.expired(self._clock())

    def children(self, id_: str) -> Sequence[Manifest]:
        """The contexts that continue this one, newest first, of those whose manifest can be used."""
        return _children_among(self.entries(), id_)

    @contextmanager
    def family_lock(self, id_: str) -> Iterator[None]:
        """Held for moments by whoever publishes a child of the context, and by whoever removes it."""
        with locked_file(self.folders.family_lock_path(id_)):
            yield

    def delete(self, id_: str, *, recursive: bool = False) -> Sequence[str]:
        """Removes a context, whatever its state; returns what was. Who has it open or mapped keeps what they have.

        recursive: its children with it; those that have expired go in any case. Of a link to a context only the link is
        removed. What would make it again goes, too. Raises ContextNotFoundError when it is not there,
        ContextHasChildrenError when it has living children, StoreUnavailableError while a context that may be a child
        cannot be read. One that is damaged keeps none: nobody can use it.
        """
        self.require_own(id_)
        with self.family_lock(id_):
            entries = self.bounded(self._listing.entries)
            self._require_readable(entries, id_)
            children = _children_among(entries, id_)
            living = sum(not self.expired(child) for child in children)
            if living and not recursive:
                raise ContextHasChildrenError.of(id_, living)
            removed = [child.id for child in children if self._delete_child(child.id)]
            if not self._delete(id_):
                raise self._missing(id_)
        return [*removed, id_]

    def _delete_child(self, id_: str) -> bool:
        with self.family_lock(id_):
            return self._delete(id_)

    def _require_readable(self, entries: Sequence[Entry], id_: str) -> None:
        """Raises StoreUnavailableError where another context cannot be read now, which may continue this one."""
        for entry in entries:
            if entry.id == id_ or not isinstance(entry, BrokenContext):
                continue
            if isinstance(entry.error, StoreUnavailableError):
                what, why, metadata = (
                    f"context {entry.id[:12]}",
                    f"; {entry.error.message}",
                    entry.error.metadata,
                )
                if not self._sees(entry):
                    what, why, metadata = "another context", "", {}
                raise StoreUnavailableError(
                    f"context {id_[:12]} is not removed: whether {what} continues it cannot be told now{why}",
                    context=id_,
                    **metadata,
                )

    def _delete(self, id_: str) -> bool:
        forgotten = self.ended.forget(id_)
        removed = self.discard(id_)
        self._defaults.remove(id_)
        return removed or forgotten

    def discard(self, id_: str) -> bool:
        """Removes the context's folder; False when it was not there. Called with its family lock held.

        That is noted before: whoever is killed in between leaves no context that is gone here and comes back from an
        object store, which a second call could not tell from one that never was.
        """
        folder = self.folders.context(id_)
        if not os.path.lexists(folder):
            return False
        self.notes.note_deleted(id_)
        with storing("deleting", folder):
            removed = discard(folder)
        self.notes.note_here(id_)
        return removed

    def default_method(self, id_: str) -> TunedDefault | None:
        """What the context was tuned to; None when it was not. Raises TunedDefaultError for a damaged record."""
        return self.bounded(partial(self._defaults.read, self.folders.context(id_).name))

    def set_default_method(self, id_: str, default: TunedDefault) -> None:
        """Replaces what the context was tuned to; the context itself stays as it is.

        Raises ContextNotFoundError, InvalidArgumentError for a record of another context, StoreFullError or StoreError.
        """
        folder = self.folders.context(id_)
        if default.context != id_:
            raise InvalidArgumentError(f"the tuned default is of context {default.context}, expected {id_}")
        with self.lock(id_):
            if folder.is_dir():
                self._defaults.write(default)
        # Who deletes the context meanwhile removes its default before this or leaves it to this.
        if not folder.is_dir():
            self._defaults.remove(id_)
            raise ContextNotFoundError(f"{self.path}: no context {id_}", context=id_)

    def update(self, id_: str, change: Callable[[Manifest], Manifest], wait_s: float = 10.0) -> Manifest:
        """Has a context become what `change` makes of it as it is: its name, expiry, labels, pin, readers. Returns it.
        Nothing is written where that is what it is.

        Raises ContextBusyError where others write the context for longer than `wait_s`, what `manifest` and `change`
        raise, InvalidArgumentError for any other change, StoreFullError or StoreError.
        """
        self.require_own(id_)
        with locked_within(self.folders.lock_path(id_), wait_s) as held:
            if not held:
                raise ContextBusyError(
                    f"a job changes context {id_[:12]}; try again when it is done", context=id_
                )
            present = self.manifest(id_)
            wanted = change(present)
            if wanted != replace(present, **{name: getattr(wanted, name) for name in CHANGEABLE}):
                raise InvalidArgumentError(f"context {id_[:12]}: only {', '.join(CHANGEABLE)} can be changed")
            if wanted != present:
                path = self.folders.context(id_) / MANIFEST_NAME
                replace_in_context(path, MANIFESTS.render(wanted), self.folders.contexts, self.folders.locks)
            return wanted

    def verify(self, id_: str, on_bytes: Callable[[int], None] = lambda _: None) -> Sequence[Problem]:
        """Reads every byte of a context and returns one error per bad file; none when it is as it was written.

        A file that is not part of the context is an UnexpectedFileError, a damaged record of its tuning a
        TunedDefaultError; the context can be used nevertheless. A file that cannot be read now is a
        StoreUnavailableError. `on_bytes` is called with the number of bytes read, for progress, by one thread. Raises
        ContextNotFoundError, FormatVersionError, or StoreUnavailableError when the store does not answer.
        """
        return self.bounded(partial(self._verify, id_, on_bytes))

    def _verify(self, id_: str, on_bytes: Callable[[int], None]) -> Sequence[Problem]:
        from index_store.store.zarr_io import check_metadata, unexpected_files, verify_chunks

        try:
            manifest = self.manifest(id_)
        except (ContextCorruptError, StoreUnavailableError) as error:
            return [error, *self._default_problems(id_)]
        folder = self.folders.context(id_)
        away = self.elsewhere(id_)
        here = kept_entries(manifest) if away else manifest.arrays
        problems = [
            *check_metadata(folder, here),
            *verify_chunks(folder, here, on_bytes),
            *unexpected_files(folder, manifest),
            *self._default_problems(id_),
        ]
        if problems and not folder.is_dir():
            raise ContextNotFoundError(f"{self.path}: context {id_} was deleted meanwhile", context=id_)
        if problems and self.elsewhere(id_) != away:  # it left the disk, or came back, meanwhile
            return self._verify(id_, on_bytes)
        return problems

    def _default_problems(self, id_: str) -> Iterator[Problem]:
        try:
            self._defaults.read(id_)
        except (TunedDefaultError, StoreUnavailableError) as error:
            yield error

    def bounded(self, work: Callable[[], Result]) -> Result:
        """Returns what `work` returns, under one limit: for work that asks the store many things in a row.

        Raises StoreUnavailableError when the store does not answer.
        """
        return read_bounded(work, self._limit_s)

    @contextmanager
    def lock(self, id_: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Holds the right to write the context; who comes second waits. Ends with the process at the latest.

        `on_wait` is called once when another job holds it. After waiting, look whether the context is there.
        """
        with locked_file(self.folders.lock_path(id_), on_wait):
            yield

    def writer(self, id_: str, folder: Path | None = None) -> ContextWriter:
        """Starts writing a context, after removing what dead writers left.

        folder: where it is written until it is published (`ContextWriter`); by default one that nobody else knows.
        """
        from index_store.store.writer import ContextWriter

        for item in dead_folders("temporary", self.folders.contexts, TEMPORARY_PREFIX, self.folders.locks):
            removed(item, log_failure)
        return ContextWriter(
            self.folders.contexts,
            self.folders.lock_path(id_).parent,
            self.folders.context(id_).name,
            lambda: self._ready(id_),
            folder,
        )

    def _ready(self, id_: str) -> bool:
        """Whether the published context can be opened; False where it may be replaced.

        Raises StoreUnavailableError and FormatVersionError, which say nothing against it.
        """
        try:
            if self.elsewhere(id_):
                self.check_expiry(self.manifest(id_))
            else:
                self.check(id_)
        except (ContextNotFoundError, ContextExpiredError, ContextCorruptError):
            return False
        return True


def _children_among(entries: Sequence[Entry], id_: str) -> Sequence[Manifest]:
    """Those of the entries that continue the context."""
    manifests = (entry for entry in entries if isinstance(entry, Manifest))
    return [entry for entry in manifests if entry.parent is not None and entry.parent.id == id_]


MOST_NAME_CHARACTERS = 500
_DIGITS = 6


def require_free(
    store: Store, name: str, model: str, own: str | Callable[[Manifest], bool], tenant: str = ""
) -> None:
    """Raises NameTakenError where another living context of the model and the tenant has the name.

    own: the id of the context that is to have it, or what tells whether a context may be that one.
    """
    for other in _holders(store, name, model, own if isinstance(own, str) else "", tenant):
        if not isinstance(own, str) and own(other):
            continue
        raise NameTakenError(
            f"the name {name[:100]!r} belongs to context {other.id[:12]}, made at {other.created_at:%F %T} UTC; choose "
            "another one, or say that it moves (--move-name; move_name in requests): that context keeps its id",
            name=name,
            context=other.id,
        )


def free_name(store: Store, name: str, model: str, id_: str, tenant: str = "") -> str:
    """The name, with digits of the context's id where another living context of the model and the tenant has it."""
    return told_apart(name, id_) if _holders(store, name, model, id_, tenant) else name


def take_name(store: Store, id_: str, name: str) -> Manifest:
    """Gives the name to a context, and one with digits of their ids to those of its model and tenant that have it.

    Returns it. Whoever looks for the name meanwhile finds one of them (`Store.resolve`). Raises what `Store.update`
    raises.
    """
    with locked_file(store.folders.names_lock_path()):
        present = store.manifest(id_)
        if present.name != name:
            present = store.update(id_, partial(replace, name=name))
        for other in _holders(store, name, present.model.fingerprint, id_, present.tenant):
            store.update(other.id, partial(replace, name=told_apart(name, other.id)))
    return present


def told_apart(name: str, id_: str) -> str:
    """The name with digits of an id, within the bounds of names."""
    return f"{name[: MOST_NAME_CHARACTERS - _DIGITS - 1]} {id_[:_DIGITS]}"


def _holders(store: Store, name: str, model: str, id_: str, tenant: str) -> Sequence[Manifest]:
    return [
        manifest
        for manifest in store.list()
        if manifest.name == name
        and manifest.id != id_
        and manifest.model.fingerprint == model
        and manifest.tenant == tenant
        and not store.expired(manifest)
    ]
