"""Command lines from configurations: a frozen dataclass says what a program is told, each field with its flag.

    @dataclass(frozen=True)
    class Config:
        store: StoreOption
        memory: Annotated[int | None, Option(metavar="SIZE", help="..."), SIZE] = None

    @app.command()
    @configured(Config)
    def serve(config: Config, output: FormatOption = OutputFormat.TEXT) -> None: ...

Flag, help, default and bounds of an option stand in its field and nowhere else. An option of type `tuple[X, ...]` may
be repeated; one that is not given has the field's default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typer import Option
from typer.models import ParameterInfo

from index_store.errors import InvalidArgumentError
from index_store.memory.memory_sizes import parse_size

AUTO = "auto"
"""What leaves a choice to the program."""


class OutputFormat(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


StoreOption = Annotated[
    Path, Option("--store", envvar="SPARSEKV_STORE", metavar="DIR", help="The store's folder.")
]
FormatOption = Annotated[
    OutputFormat, Option("--format", help="Text, or one JSON object on standard output.")
]


@dataclass(frozen=True, slots=True)
class Spelled:
    """Of an option that people write in another way than programs hold it.

    default: as it is written, which says the type of the flag too; `read` makes the field's default of it, as of any
    other value. It raises InvalidArgumentError for what it cannot read.
    """

    default: str | int
    read: Callable[[Any], object]


SIZE = Spelled(AUTO, lambda text: None if text == AUTO else parse_size(text))
"""Of an option in bytes, None for auto."""


def comma_separated(default: str, read: Callable[[str], object] = str) -> Spelled:
    """Of an option that is a tuple, written as one text."""
    return Spelled(
        default, lambda text: tuple(read(part.strip()) for part in text.split(",") if part.strip())
    )


class OneOf:
    """Of an option that is one of a few texts."""

    def __init__(self, *texts: str) -> None:
        self.kind = StrEnum("OneOf", {text.upper(): text for text in texts})  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Of an option that is a number, or None; `check_bounds` checks it."""

    least: int


def options_of(config: type[Any]) -> tuple[tuple[Field[Any], Any, tuple[Any, ...]], ...]:
    """Every field of a configuration with its type and what it is annotated with."""
    hints = get_type_hints(config, vars(sys.modules[config.__module__]), {}, include_extras=True)
    typed = [(field, get_args(hints[field.name])) for field in fields(config)]
    return tuple((field, kind, tuple(marks)) for field, (kind, *marks) in typed)


def check_bounds(config: Any) -> None:
    """Raises InvalidArgumentError for the first field of a configuration that is less than its `AtLeast`."""
    for field, _, marks in options_of(type(config)):
        value = getattr(config, field.name)
        for mark in marks:
            if isinstance(mark, AtLeast) and value is not None and value < mark.least:
                flag = "--" + field.name.replace("_", "-")
                raise InvalidArgumentError(f"{flag} is {value}, expected at least {mark.least}")


def configured(config: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function that takes a configuration, and after it perhaps options of its own.

    config: a frozen dataclass whose fields are `Annotated` with a typer Option or Argument each.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        options = options_of(config)
        own = list(signature(command, eval_str=True).parameters.values())[1:]
        parameters = [
            *(_parameter(*option) for option in options),
            *(parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in own),
        ]

        @wraps(command)
        def run(**given: Any) -> None:
            told = [(field.name, given.pop(field.name), marks) for field, _, marks in options]
            values = {name: _value(value, marks) for name, value, marks in told if value is not None}
            command(config(**values), **given)

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameter(field: Field[Any], kind: Any, marks: tuple[Any, ...]) -> Parameter:
    """The parameter of a command that typer makes a field's flag of."""
    default = Parameter.empty if field.default is MISSING else field.default
    repeated = [get_args(part)[0] for part in (kind, *get_args(kind)) if get_origin(part) is tuple]
    for mark in marks:
        if isinstance(mark, Spelled):
            kind, default, repeated = type(mark.default), mark.default, []
        elif isinstance(mark, OneOf):
            kind = mark.kind | None if default is None else mark.kind
    if repeated:
        kind = list.__class_getitem__(repeated[0])
        if default is not Parameter.empty:
            kind, default = kind | None, None
    (info,) = (mark for mark in marks if isinstance(mark, ParameterInfo))
    annotation = Annotated.__class_getitem__((kind, info))  # type: ignore[attr-defined]
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(value: Any, marks: tuple[Any, ...]) -> object:
    """The value of a field for that of its flag."""
    for mark in marks:
        if isinstance(mark, Spelled):
            return mark.read(value)
        if isinstance(mark, OneOf):
            return str(value)
    return tuple(value) if isinstance(value, list) else value
