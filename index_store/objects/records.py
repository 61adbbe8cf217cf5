"""What an object store says of contexts, and what a store of this machine knows of that.

A bucket has, below `contexts/<id>/`, `<digest>.context`, the file of a context that is named by all of its manifest
that never changes, and `<number>.json`, its `manifest.json` as it is now: name, expiry, labels, pin and all. The
highest number counts. Whoever changes a context makes the next number where there is none, which is compare-and-swap in
every object store; whoever deletes one makes `<number>.deleted`; whoever finds one damaged makes `damaged`, and who has
it whole uploads it again. No object is ever changed, so what was read once need
not be read again.

A store keeps of the last one that it saw a copy under `objects/<bucket>/<id>.<number>.json`: what was changed here or
there since then is told by it. A context without one has not been uploaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from index_store.errors import ContextCorruptError, ManifestError
from index_store.objects.bucket import Bucket, Found
from index_store.store.catalog import neutral
from index_store.store.description.manifest import MANIFESTS, Manifest
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    make_folder,
    permissions_in,
    replace_file,
    storing,
)
from index_store.store.files.reading import WrongFileError, read_file, unavailable

PREFIX = "contexts/"
_LARGEST = 64 << 20
_KEY = re.compile(r"contexts/([0-9a-f]{64})/(?:(\d{10})\.(json|deleted)|([0-9a-f]{32})\.context|(damaged))")
_MARK = re.compile(r"([0-9a-f]{64})\.(\d{10})\.(json|deleted)")


def digest_of(manifest: Manifest) -> str:
    """By which the file of a context is named."""
    return hashlib.sha256(MANIFESTS.render(neutral(manifest))).hexdigest()[:32]


def content_key(manifest: Manifest) -> str:
    """The object that holds a context."""
    return f"{PREFIX}{manifest.id}/{digest_of(manifest)}.context"


def record_key(id_: str, number: int, *, deleted: bool = False) -> str:
    """The object that says what a context is now."""
    return f"{PREFIX}{id_}/{number:010d}.{'deleted' if deleted else 'json'}"


def damage_key(id_: str) -> str:
    """The object that says that others of a context were found damaged."""
    return f"{PREFIX}{id_}/damaged"


@dataclass(slots=True)
class Held:
    """What a list of a bucket says of one context.

    number: the highest, 0 of none. deleted: that is a deletion. old: keys of lower ones. contents: its files by key.
    damaged: somebody found one of them so.
    """

    number: int = 0
    deleted: bool = False
    key: str = ""
    changed_at: datetime | None = None
    old: list[str] = field(default_factory=list)
    contents: dict[str, Found] = field(default_factory=dict)
    damaged: bool = False


def look(bucket: Bucket, id_: str = "") -> dict[str, Held]:
    """What there is of all contexts, or of one, by id. Keys that are not ours are passed over."""
    found: dict[str, Held] = {}
    for each in bucket.list(f"{PREFIX}{id_}/" if id_ else PREFIX):
        match = _KEY.fullmatch(each.key)
        if match is None:
            continue
        held = found.setdefault(match[1], Held())
        if match[5]:
            held.damaged = True
        elif match[4]:
            held.contents[each.key] = each
        elif int(match[2]) > held.number:
            held.old += [held.key] if held.key else []
            held.number, held.deleted, held.key = int(match[2]), match[3] == "deleted", each.key
            held.changed_at = each.changed_at
        else:
            held.old.append(each.key)
    return found


def read_record(bucket: Bucket, id_: str, held: Held) -> Manifest:
    """A context as the bucket has it now. Raises a ContextCorruptError or FormatVersionError for a damaged record."""
    return _parse(bucket.get(held.key), id_, f"{bucket.url}/{held.key}")


def _parse(data: bytes, id_: str, where: str) -> Manifest:
    manifest = MANIFESTS.parse(data, where)
    if manifest.id != id_:
        raise ManifestError(f"{where}: field 'id' is {manifest.id!r}, expected {id_!r}", path=where)
    return manifest


@dataclass(frozen=True, slots=True)
class Mark:
    """The record of a bucket that a store saw last. manifest: None of a deletion."""

    number: int
    manifest: Manifest | None


class Marks:
    """Those of one bucket in one store. Written by one thread at a time."""

    def __init__(self, store: Path, url: str) -> None:
        self._contexts = store / "contexts"
        self._folder = store / "objects" / hashlib.sha256(url.encode()).hexdigest()[:16]
        self._read: dict[str, Mark] = {}

    def all(self) -> Mapping[str, Mark]:
        """By id. One that is damaged is as good as none. Raises StoreUnavailableError where one cannot be read now."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = sorted(os.listdir(self._folder))
        fresh: dict[str, Mark] = {}
        found: dict[str, Mark] = {}
        for name in names:
            match = _MARK.fullmatch(name)
            if match is None:
                continue
            mark = self._read.get(name)
            if mark is None:
                try:
                    manifest = None
                    if match[3] == "json":
                        path = self._folder / name
                        manifest = _parse(read_file(path, _LARGEST)[0], match[1], str(path))
                    mark = Mark(int(match[2]), manifest)
                except (FileNotFoundError, WrongFileError, ContextCorruptError):
                    continue
                except OSError as error:
                    raise unavailable(path, error) from error
            fresh[name] = mark
            if match[1] not in found or found[match[1]].number <= mark.number:
                found[match[1]] = mark
        self._read = fresh
        return found

    def write(self, id_: str, mark: Mark) -> None:
        """Replaces a context's, durably. Raises StoreFullError or StoreError."""
        kind = "deleted" if mark.manifest is None else "json"
        path = self._folder / f"{id_}.{mark.number:010d}.{kind}"
        data = b"" if mark.manifest is None else MANIFESTS.render(mark.manifest)
        with storing("noting what an object store holds", path):
            permissions = permissions_in(self._contexts)
            make_folder(self._folder, permissions)
            replace_file(path, data, permissions)
            self._remove_others(id_, path.name)

    def remove(self, id_: str) -> None:
        """Removes a context's, where there is one."""
        with storing("removing what is known of an object store", self._folder):
            self._remove_others(id_, "")

    def _remove_others(self, id_: str, kept: str) -> None:
        for pattern in (f"{id_}.*", f"{TEMPORARY_PREFIX}{id_}.*"):  # those, too, that a killed process began
            for path in self._folder.glob(pattern):
                if path.name != kept:
                    path.unlink(missing_ok=True)
