"""The method and budget that a stored context was tuned to: a small sealed file beside it, never part of it.

A context stays as it was written, so what tuning finds later lies in `defaults/<id>.json` of the store: JSON with a
checksum over itself, as a manifest has, replaced all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from index_store.errors import ContextCorruptError
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
from index_store.store.files.durable import (
    TEMPORARY_PREFIX,
    make_folder,
    permissions_in,
    replace_file,
    storing,
)
from index_store.store.files.reading import WrongFileError, read_file, unavailable

TARGETS = ("mass", "kl")
_SUFFIX = ".json"
_LARGEST = 1 << 20
_REPAIR = "tune the context again (`decode-engine tune`), remove the file, or name a method in every request"


class TunedDefaultError(ContextCorruptError):
    """A tuned default is not what was written, or of another format; its context is not affected."""

    reason = "TUNED_DEFAULT_INVALID"


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
