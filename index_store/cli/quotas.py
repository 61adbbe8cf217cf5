"""What each tenant may use: a file of quotas in TOML, which is read again when it changes.

    [default]                            # of every tenant that has no table, and of what a table leaves out
    sessions = 8
    generated_tokens_per_minute = 60_000

    [tenants.acme]
    weight = 2                           # of its turns, where others want more than there is; 1 by default
    stored_bytes = "200GiB"
    sessions = "none"                    # no limit, whatever the default is

A limit that nobody names is none. `[tenants.""]` is of callers that belong to no tenant.
"""

from __future__ import annotations

import logging
import threading
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from typer import Option

from index_store.cli.options import NO_BOUND, InputFile
from index_store.errors import InvalidArgumentError
from index_store.memory.memory_sizes import parse_size
from index_store.store.description.callers import is_tenant
from index_store.store.files.reading import stamp_of

logger = logging.getLogger(__name__)

LIMITS = {
    "stored_bytes": "bytes of contexts in the store",
    "resident_bytes": "bytes of contexts in memory",
    "sessions": "answers that wait or run",
    "requests_per_minute": "requests a minute",
    "prompt_tokens_per_minute": "tokens of prompts a minute",
    "generated_tokens_per_minute": "generated tokens a minute",
}
"""By name, what each counts."""

_MINUTE = "_per_minute"
_MOST = 2**63 - 1
_LARGEST = 4 << 20
_Said = Annotated[int, Meta(ge=1, le=_MOST)] | str | None


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file; None is not said."""

    weight: Annotated[float, Meta(ge=0.001, le=1000)] | None = None
    stored_bytes: _Said = None
    resident_bytes: _Said = None
    sessions: _Said = None
    requests_per_minute: _Said = None
    prompt_tokens_per_minute: _Said = None
    generated_tokens_per_minute: _Said = None


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    default: dict[str, Any] = {}
    tenants: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use. limits: by names of `LIMITS`, those that there are."""

    weight: float = 1.0
    limits: Mapping[str, int] = field(default_factory=dict)


def per_minute(limit: str) -> bool:
    return limit.endswith(_MINUTE)


@dataclass(frozen=True, slots=True)
class Quotas:
    """A file's. tenants: those with a table, by name."""

    default: Quota = field(default_factory=Quota)
    tenants: Mapping[str, Quota] = field(default_factory=dict)

    def of(self, tenant: str) -> Quota:
        return self.tenants.get(tenant, self.default)


def parse_quotas(text: str, where: str) -> Quotas:
    """The quotas that a file says. where: it lies. Raises InvalidArgumentError, which names what is wrong in it."""
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise _wrong(f"{error} in {where}", "[default] and [tenants.NAME]") from error
    default = _quota(file.default, Quota(), f"[default] in {where}")
    quotas = {}
    for name, table in file.tenants.items():
        if name and not is_tenant(name):
            raise _wrong(f"a table of {name[:100]!r} in {where}", "tenants' names")
        quotas[name] = _quota(table, default, f"[tenants.{name}] in {where}")
    return Quotas(default, quotas)


def _quota(said: Mapping[str, Any], default: Quota, where: str) -> Quota:
    try:
        table = msgspec.convert(said, _Table)
    except msgspec.ValidationError as error:
        raise _wrong(f"{error} of {where}", f"weight, {', '.join(LIMITS)}") from error
    limits = dict(default.limits)
    for name in LIMITS:
        value = getattr(table, name)
        if value == NO_BOUND:
            limits.pop(name, None)
        elif isinstance(value, int):
            limits[name] = value
        elif value is not None:
            limits[name] = _size(name, value, where)
    return Quota(default.weight if table.weight is None else table.weight, limits)


def _size(name: str, text: str, where: str) -> int:
    try:
        if name.endswith("_bytes"):
            return parse_size(text)
    except InvalidArgumentError as error:
        raise _wrong(f"{name} of {where}", f"{NO_BOUND!r}, or bytes: {error.message}") from error
    raise _wrong(f"{name} {text[:40]!r} of {where}", f"a number of at least 1, or {NO_BOUND!r}")


def _wrong(found: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the quotas cannot be used: found {found}, expected {expected}", field="quotas"
    )


QuotasOption = Annotated[
    Path | None,
    Option(
        "--quotas",
        metavar="FILE",
        help="What each tenant may use, as docs/operations.md says it; the file is read again when it changes.",
    ),
    InputFile(),
]


class QuotaFile:
    """The quotas of a file as it is now, of none where there is none. Thread-safe.

    Who asks has it looked at, so that an edit counts at once; one that cannot be used is said in the log, and in
    `problem`, and leaves the quotas as they were.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Raises InvalidArgumentError for a file that cannot be used."""
        self._path = path
        self._lock = threading.Lock()
        self._quotas, self.problem = Quotas(), ""
        self._stamp = self._seen()
        if path is not None:
            self._quotas = self._read(path)

    def limit(self, tenant: str, name: str) -> int | None:
        """One of a tenant's limits now, None where it has none."""
        return self.now.of(tenant).limits.get(name)

    @property
    def known(self) -> Quotas:
        """The quotas as they were when somebody had the file looked at."""
        return self._quotas

    @property
    def now(self) -> Quotas:
        if self._path is not None and self._seen() != self._stamp:
            self._look(self._path)
        return self._quotas

    def _look(self, path: Path) -> None:
        with self._lock:
            stamp = self._seen()
            if stamp == self._stamp:
                return
            try:
                self._quotas, self.problem = self._read(path), ""
                logger.info("the quotas have changed, tables of %d tenants", len(self._quotas.tenants))
            except InvalidArgumentError as error:
                self.problem = error.message
                logger.error("the quotas stay as they were: %s", error.message)
            self._stamp = stamp

    def _seen(self) -> tuple[int, ...] | None:
        return None if self._path is None else stamp_of(self._path)

    def _read(self, path: Path) -> Quotas:
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read(_LARGEST + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong(f"{path}, which cannot be read ({error})", "a file in TOML") from error
        if len(text) > _LARGEST:
            raise _wrong(f"a larger file in {path}", f"at most {_LARGEST} characters")
        return parse_quotas(text, str(path))
