"""What values of options are accepted: numbers in a range, a few words, files to read and to write."""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from index_store.errors import InvalidArgumentError
from index_store.store.store_folders import require_local

MOST = 2**63 - 1
"""The largest number that any option takes: what libraries below hold as int64."""

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):(\d{1,5})")


class Check(ABC):
    """One demand on the value of an option."""

    @abstractmethod
    def check(self, flag: str, value: object) -> None:
        """Raises InvalidArgumentError, in a sentence that names the flag, for a value that does not meet it."""


@dataclass(frozen=True, slots=True)
class AtLeast(Check):
    """A finite number of `least` to `most`, both included."""

    least: float
    most: float = MOST

    def check(self, flag: str, value: object) -> None:
        if not (isinstance(value, int | float) and self._holds(value)):
            raise InvalidArgumentError(f"{flag} is {_shown(value)}, expected {self._range()}")

    def _holds(self, number: float) -> bool:
        return self.least <= number <= self.most  # NaN is in no range

    def _range(self) -> str:
        if self.most == MOST:
            return f"at least {self.least:g}"
        return (
            f"{self.least:g} to {self.most:,}"
            if isinstance(self.most, int)
            else f"{self.least:g} to {self.most:,.12g}"
        )


class MoreThan(AtLeast):
    """A finite number above `least`, and at most `most`."""

    def _holds(self, number: float) -> bool:
        return self.least < number <= self.most

    def _range(self) -> str:
        return f"a number above {self.least:g}" + ("" if self.most == MOST else f" and at most {self.most:g}")


@dataclass(frozen=True)
class OneOf(Check):
    """One of a few texts."""

    texts: tuple[str, ...]

    def __init__(self, *texts: str) -> None:
        object.__setattr__(self, "texts", texts)

    def check(self, flag: str, value: object) -> None:
        if value not in self.texts:
            *others, last = self.texts
            raise InvalidArgumentError(
                f"{flag} is {_shown(value)}, expected {', '.join(others)}{' or ' if others else ''}{last}"
            )


class Filled(Check):
    """A text that is more than blanks."""

    def check(self, flag: str, value: object) -> None:
        if not str(value).strip():
            raise InvalidArgumentError(f"{flag} is {_shown(value)}, expected a text that is not empty")


@dataclass(frozen=True, slots=True)
class Characters(Check):
    """A text of `least` to `most` characters."""

    least: int
    most: int

    def check(self, flag: str, value: object) -> None:
        count = len(str(value))
        if not self.least <= count <= self.most:
            raise InvalidArgumentError(
                f"{flag} is {_shown(value)} of {count} characters, expected {self.least} to {self.most}"
            )


class Address(Check):
    """HOST:PORT with a port of 0 to 65535."""

    def check(self, flag: str, value: object) -> None:
        match = _ADDRESS.fullmatch(str(value))
        if match is None or int(match[2]) > 65535:
            raise InvalidArgumentError(f"{flag} is {value!r}, expected HOST:PORT, such as 127.0.0.1:50051")


class FileCheck(Check):
    """A demand on what lies at a path, which is one of this machine."""

    def check(self, flag: str, value: object) -> None:
        self.check_path(flag, require_local(str(value), flag))

    @abstractmethod
    def check_path(self, flag: str, path: Path) -> None:
        """Raises InvalidArgumentError, as `check` does."""


@dataclass(frozen=True, slots=True)
class InputFile(FileCheck):
    """A file that can be read, or a pipe. dash: `-` is standard input."""

    dash: bool = False

    def check_path(self, flag: str, path: Path) -> None:
        if self.dash and str(path) == "-":
            return
        if path.is_dir():
            raise InvalidArgumentError(f"{flag} is {_shown(path)}, a folder; expected a file")
        if not path.exists():
            raise InvalidArgumentError(f"{flag} is {_shown(path)}, which is not there; expected a file")
        if not os.access(path, os.R_OK):
            raise InvalidArgumentError(
                f"{flag} is {_shown(path)}, which may not be read; check its permissions"
            )


class OutputFile(FileCheck):
    """A file that can be written, perhaps over an older one; its folder is there."""

    def check_path(self, flag: str, path: Path) -> None:
        if path.is_dir():
            raise InvalidArgumentError(f"{flag} is {_shown(path)}, a folder; expected the name of a file")
        if not path.parent.is_dir():
            raise InvalidArgumentError(
                f"{flag} is {_shown(path)}, but there is no folder {path.parent}; make it"
            )
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InvalidArgumentError(
                f"{flag} is {_shown(path)}, which may not be written; check the permissions"
            )


class OutputFolder(FileCheck):
    """A folder that can be written into, or made."""

    def check_path(self, flag: str, path: Path) -> None:
        path = path.absolute()
        nearest = next(place for place in (path, *path.parents) if place.exists())
        if not nearest.is_dir():
            raise InvalidArgumentError(
                f"{flag} is {_shown(path)}, but {nearest} is a file; expected a folder"
            )
        if not os.access(nearest, os.W_OK):
            raise InvalidArgumentError(f"{flag} is {_shown(path)}, but nothing may be written to {nearest}")


def _shown(value: object) -> str:
    """A value as a sentence quotes it, cut where it is long."""
    text = repr(str(value)) if isinstance(value, str | Path) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
