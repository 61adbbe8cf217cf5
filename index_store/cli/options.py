"""Command lines from configurations: a frozen dataclass says what a program is told, each field with its flag.

    @dataclass(frozen=True)
    class Config:
        store: StoreOption
        memory: Annotated[int | None, "Of the host, for contexts.", SIZE, AtLeast(1)] = None

    @app.command()
    @configured(Config)
    def serve(config: Config, output: FormatOption = OutputFormat.TEXT) -> None: ...

Flag, help, default and bounds of an option stand in its field and nowhere else: every number has its range, every
file says whether it is read or written. A text is the help of a flag of the field's name. A command checks them all
before it does anything. An option of type `tuple[X, ...]` may be repeated; one that is not given has the field's
default.
"""

from __future__ import annotations

import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, fields
from datetime import timedelta
from enum import StrEnum
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Option
from typer.models import ArgumentInfo, ParameterInfo

from index_store.cli.settings_file import by_source, tell, with_sources
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.memory.memory_sizes import parse_size
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

    metavar = "HOST:PORT"

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


AUTO = "auto"
"""What leaves a choice to the program."""


MODELS = "'reader', 'smollm2' once it is fetched, a Hugging Face folder or a GGUF file"
"""What may stand behind `--model`."""


class OutputFormat(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


LOCAL_STORE = partial(require_local, what="--store")
"""Reads a store's folder."""

StoreOption = Annotated[
    Path,
    Option("--store", envvar="SPARSEKV_STORE", metavar="DIR", help="The store's folder.", parser=LOCAL_STORE),
]
ObjectsOption = Annotated[
    str | None,
    Option(
        "--objects",
        envvar="SPARSEKV_OBJECTS",
        metavar="URL",
        help="An object store that several servers and workers share: s3://BUCKET/PREFIX, gs://, az:// or "
        "file:///FOLDER. Contexts are uploaded there, and fetched from there on demand; the store is a cache then.",
    ),
]
FormatOption = Annotated[
    OutputFormat, Option("--format", help="Text, or one JSON object on standard output.")
]

QuietOption = Annotated[
    bool, Option("--quiet", "-q", help="Say nothing on standard error unless something is wrong.")
]


MoveNameOption = Annotated[
    bool, Option("--move-name", help="Take the name from the context that has it, which keeps its id.")
]

TtlOption = Annotated[
    str | None, Option("--ttl", help="Time to live, for example 30m, 1.5h, 7d; default: for ever.")
]
"""To be read by `parse_ttl`."""

RenewOption = Annotated[
    str | None,
    Option("--renew", help="Time to live that every use begins anew, likewise; the first one without --ttl."),
]

_TTL = re.compile(r"0+|([0-9]+(?:\.[0-9]+)?)([smhd])")
_TTL_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_TTL = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Spelled:
    """Of an option that people write in another way than programs hold it.

    default: as it is written, which says the type of the flag too; `read` makes the field's default of it, as of any
    other value. It raises InvalidArgumentError for what it cannot read. metavar: in the help.
    """

    default: str | int
    read: Callable[[Any], object]
    metavar: str | None = None


NO_BOUND = "none"

SIZE = Spelled(AUTO, lambda text: None if text == AUTO else parse_size(text), "SIZE")
"""Of an option in bytes, None for auto."""


StoreBytesOption = Annotated[
    int | None,
    Option(
        metavar="SIZE",
        help="What all contexts of the store may take, for example 200GiB. For new ones the least recently used go of "
        "those that have a time to live, or that the server kept of its own accord; where that does not suffice, new "
        "ones are refused. none: what the disk holds.",
    ),
    Spelled(NO_BOUND, lambda text: None if text == NO_BOUND else parse_size(text)),
    AtLeast(1),
]


def comma_separated(default: str, read: Callable[[str], object] = str) -> Spelled:
    """Of an option that is a tuple, written as one text."""
    return Spelled(
        default, lambda text: tuple(read(part.strip()) for part in text.split(",") if part.strip())
    )


def options_of(config: type[Any]) -> tuple[tuple[Field[Any], Any, tuple[Any, ...]], ...]:
    """Every field of a configuration with its type and what it is annotated with."""
    names: dict[str, Any] = {}
    for base in reversed(config.__mro__):  # a field's type is named where the field stands
        names |= vars(sys.modules[base.__module__])
    hints = get_type_hints(config, names, {}, include_extras=True)
    typed = [(field, get_args(hints[field.name])) for field in fields(config)]
    return tuple((field, kind, tuple(marks)) for field, (kind, *marks) in typed)


def flag_of(field: Field[Any], marks: tuple[Any, ...]) -> str:
    """What people write for a field: its flag, or an argument's name."""
    info = _info(field, marks)
    told = (
        info.default,
        *(info.param_decls or ()),
    )  # typer has the first one there until it makes the command
    if isinstance(info, ArgumentInfo):
        return (info.metavar or field.name).upper()
    flags = [flag for flag in told if isinstance(flag, str) and flag.startswith("--")]
    return flags[0].partition("/")[0] if flags else "--" + field.name.replace("_", "-")


def _info(field: Field[Any], marks: tuple[Any, ...]) -> ParameterInfo:
    """What typer is told of a field: its own mark, or a flag of the field's name with a text as its help."""
    told = [mark for mark in marks if isinstance(mark, ParameterInfo)]
    flag = "--" + field.name.replace("_", "-")
    metavar = next(filter(None, (getattr(mark, "metavar", None) for mark in marks)), None)
    told += [Option(..., flag, help=mark, metavar=metavar) for mark in marks if isinstance(mark, str)]
    (info,) = told
    return info


def check_bounds(config: Any) -> None:
    """Raises InvalidArgumentError for the first field of a configuration that is out of its range.

    What depends on files is not looked at: who makes a configuration in a program may make them later.
    """
    for field, _, marks in options_of(type(config)):
        _check(getattr(config, field.name), flag_of(field, marks), marks, files=False)


def configured(
    config: type[Any], groups: Mapping[str, str] | None = None, *, by_file: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes a configuration, and after it perhaps options of its own.

    config: a frozen dataclass whose fields are `Annotated` with a typer Option or Argument each. groups: headings of
    its help, each with the fields below it, with blanks between them; others stand before. For `GroupedCommand`.
    by_file: options also come from a file and from variables (`settings_file`). The configuration then has `checks`,
    which yields what else can be looked at before the command runs.
    """
    heading = {name: title for title, names in (groups or {}).items() for name in names.split()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = options_of(config)
        own = list(signature(command, eval_str=True).parameters.values())[1:]
        parameters = [
            *(_parameter(*option, heading.get(option[0].name)) for option in options),
            *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own),
        ]

        if by_file:
            parameters = with_sources(parameters)

        @wraps(command)
        def run(**given: Any) -> None:
            if by_file:
                context, _ = given.pop("context"), given.pop("config")
                if given.pop("check_config"):
                    problems = [by_source(context, each) for each in _problems(config, options, given)]
                    tell(context, given, problems)
            try:
                values = {name: value for name, value in _told(options, given).items() if value is not None}
                for field, _, marks in options:
                    given.pop(field.name)
                    _check(values.get(field.name), flag_of(field, marks), marks, files=True)
                made = _make(config, values)
            except InvalidArgumentError as error:
                if not by_file:
                    raise
                raise InvalidArgumentError(by_source(context, error.message), **error.metadata) from error
            command(made, **given)

        run.config = config  # type: ignore[attr-defined]  # for whoever looks through all options
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


Options = tuple[tuple[Field[Any], Any, tuple[Any, ...]], ...]


def _told(options: Options, given: Mapping[str, Any]) -> dict[str, object]:
    return {field.name: _read(given[field.name], field, marks) for field, _, marks in options}


def _problems(config: type[Any], options: Options, given: Mapping[str, Any]) -> list[str]:
    """All that is wrong with what a command is told, as far as it can be looked at."""
    found: list[str] = []
    values: dict[str, Any] = {}

    def look(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except SparseKVError as error:
            found.append(error.message)
            return None

    for option in options:
        field, _, marks = option
        values |= look(partial(_told, (option,), given)) or {}
        look(partial(_check, values.get(field.name), flag_of(field, marks), marks, files=True))
    made: Any = None
    if not found:
        made = look(partial(_make, config, {name: each for name, each in values.items() if each is not None}))
    for check in () if made is None else made.checks():
        look(check)
    return found


def _make(config: type[Any], values: dict[str, Any]) -> Any:
    """The configuration; whatever it refuses is wrong usage."""
    try:
        return config(**values)
    except SparseKVError as error:
        raise InvalidArgumentError(error.message, **error.metadata) from error


def _parameter(field: Field[Any], kind: Any, marks: tuple[Any, ...], heading: str | None = None) -> Parameter:
    """The parameter of a command that typer makes a field's flag of. heading: of its group in the help."""
    default = Parameter.empty if field.default is MISSING else field.default
    repeated = [get_args(part)[0] for part in (kind, *get_args(kind)) if get_origin(part) is tuple]
    info = copy(_info(field, marks))
    info.rich_help_panel = heading
    for mark in marks:
        if isinstance(mark, Spelled):
            kind, default, repeated = type(mark.default), mark.default, []
        elif isinstance(mark, OneOf):
            info.metavar = info.metavar or "|".join(mark.texts)
            # Where a metavar is given, some versions of typer would call the flag as that is written.
            info.param_decls = info.param_decls or (flag_of(field, marks),)
    if repeated:
        kind = list.__class_getitem__(repeated[0])
        if default is not Parameter.empty:
            kind, default = kind | None, None
    annotation = Annotated.__class_getitem__((kind, info))  # type: ignore[attr-defined]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(value: Any, field: Field[Any], marks: tuple[Any, ...]) -> object:
    """The value of a field for that of its flag. Raises InvalidArgumentError, which names the flag."""
    for mark in marks:
        if isinstance(mark, Spelled):
            try:
                return mark.read(value)
            except InvalidArgumentError as error:
                raise InvalidArgumentError(f"{flag_of(field, marks)}: {error.message}") from error
    return tuple(value) if isinstance(value, list) else value


def _check(value: Any, flag: str, marks: tuple[Any, ...], *, files: bool) -> None:
    """Lets every check of an option look at its value, or at each of its values.

    Of an option that is written in another way, what stands for its default is accepted, too, and errors say so.
    """
    spelled = [mark.default for mark in marks if isinstance(mark, Spelled) and not isinstance(value, tuple)]
    for mark in marks:
        if isinstance(mark, Check) and (files or not isinstance(mark, FileCheck)):
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None:
                    try:
                        mark.check(flag, one)
                    except InvalidArgumentError as error:
                        raise InvalidArgumentError(
                            ", or ".join(map(str, (error.message, *spelled)))
                        ) from None


def parse_ttl(text: str | None) -> timedelta | None:
    """A time to live such as 30m, 1.5h or 7d. Raises InvalidArgumentError for anything else, and out of range."""
    if text is None:
        return None
    match = _TTL.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(
            f"--ttl is {text[:80]!r}, expected a number and a unit, for example 30m, 1.5h or 7d"
        )
    seconds = float(match[1] or 0) * _TTL_SECONDS[match[2] or "s"]
    if not 1 <= seconds <= _LONGEST_TTL.total_seconds():
        raise InvalidArgumentError(
            f"--ttl is {text[:80]!r}, out of range: expected 1s to {_LONGEST_TTL.days}d; "
            "leave it out to keep the context for ever"
        )
    return timedelta(seconds=seconds)


def seconds_of(ttl: str | None) -> float | None:
    """The same in seconds."""
    found = parse_ttl(ttl)
    return None if found is None else found.total_seconds()
