"""Command lines from configurations: a frozen dataclass says what a program is told, each field with its flag.

    @dataclass(frozen=True)
    class Config:
        store: StoreOption
        memory: Annotated[int | None, Option(metavar="SIZE", help="..."), SIZE, AtLeast(1)] = None

    @app.command()
    @configured(Config)
    def serve(config: Config, output: FormatOption = OutputFormat.TEXT) -> None: ...

Flag, help, default and bounds of an option stand in its field and nowhere else: every number has its range, every
file says whether it is read or written (`index_store.cli.checks`). A command checks them all before it does anything.
An option of type `tuple[X, ...]` may be repeated; one that is not given has the field's default.
"""

from __future__ import annotations

import re
import sys
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

from index_store.cli.checks import AtLeast, Check, FileCheck, OneOf
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.memory.memory_sizes import parse_size
from index_store.store.store_folders import require_local

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
    Option(
        "--store",
        envvar="SPARSEKV_STORE",
        metavar="DIR",
        help="The store's folder.",
        parser=LOCAL_STORE,
    ),
]
FormatOption = Annotated[
    OutputFormat, Option("--format", help="Text, or one JSON object on standard output.")
]

QuietOption = Annotated[
    bool, Option("--quiet", "-q", help="Say nothing on standard error unless something is wrong.")
]


MoveNameOption = Annotated[
    bool,
    Option("--move-name", help="Take the name from the context that has it, which keeps its id."),
]

TtlOption = Annotated[
    str | None, Option("--ttl", help="Time to live, for example 30m, 1.5h, 7d; default: for ever.")
]
"""To be read by `parse_ttl`."""

_TTL = re.compile(r"0+|([0-9]+(?:\.[0-9]+)?)([smhd])")
_TTL_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_TTL = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Spelled:
    """Of an option that people write in another way than programs hold it.

    default: as it is written, which says the type of the flag too; `read` makes the field's default of it, as of any
    other value. It raises InvalidArgumentError for what it cannot read.
    """

    default: str | int
    read: Callable[[Any], object]


NO_BOUND = "none"

SIZE = Spelled(AUTO, lambda text: None if text == AUTO else parse_size(text))
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
    (info,) = (mark for mark in marks if isinstance(mark, ParameterInfo))
    told = (
        info.default,
        *(info.param_decls or ()),
    )  # typer has the first one there until it makes the command
    if isinstance(info, ArgumentInfo):
        return (info.metavar or field.name).upper()
    flags = [flag for flag in told if isinstance(flag, str) and flag.startswith("--")]
    return flags[0].partition("/")[0] if flags else "--" + field.name.replace("_", "-")


def check_bounds(config: Any) -> None:
    """Raises InvalidArgumentError for the first field of a configuration that is out of its range.

    What depends on files is not looked at: who makes a configuration in a program may make them later.
    """
    for field, _, marks in options_of(type(config)):
        _check(getattr(config, field.name), flag_of(field, marks), marks, files=False)


def configured(
    config: type[Any], groups: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes a configuration, and after it perhaps options of its own.

    config: a frozen dataclass whose fields are `Annotated` with a typer Option or Argument each. groups: headings of
    its help, each with the fields below it, with blanks between them; others stand before. For `GroupedCommand`.
    """
    heading = {name: title for title, names in (groups or {}).items() for name in names.split()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = options_of(config)
        own = list(signature(command, eval_str=True).parameters.values())[1:]
        parameters = [
            *(_parameter(*option, heading.get(option[0].name)) for option in options),
            *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own),
        ]

        @wraps(command)
        def run(**given: Any) -> None:
            told = {field.name: _read(given.pop(field.name), field, marks) for field, _, marks in options}
            values = {name: value for name, value in told.items() if value is not None}
            for field, _, marks in options:
                _check(values.get(field.name), flag_of(field, marks), marks, files=True)
            command(_make(config, values), **given)

        run.config = config  # type: ignore[attr-defined]  # for whoever looks through all options
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


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
    (info,) = (copy(mark) for mark in marks if isinstance(mark, ParameterInfo))
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
