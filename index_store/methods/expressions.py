"""Reads the expressions that name methods: a preset, and what is to be different from it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from index_store.errors import MethodUnsupportedError
from index_store.methods.schedules import Schedule
from index_store.store.description.json_fields import Scalar

EXPRESSION_HELP = "PRESET[+REMAINDER][@period=P|@lag][@correct=COSINE][@OPTION=VALUE]"

_EXPRESSION = re.compile(
    r"(?P<preset>[a-z][a-z0-9-]*)(?:\+(?P<remainder>[a-z]+))?(?P<options>(?:@[a-z_]+(?:=[-a-z_0-9.]+)?)*)"
)
_SWITCHES = frozenset({"lag"})
_WINDOWS = frozenset({"sinks", "recent", "append_block"})


@dataclass(frozen=True, slots=True)
class Expression:
    """What an expression says, before it is known whether the parts go together.

    remainder: None for the preset's own. schedule: None where none is given. windows: `sinks`, `recent` and
    `append_block`, as far as given. search: options of the index's search by name, of whatever kind.
    """

    preset: str
    remainder: str | None
    schedule: Schedule | None
    windows: Mapping[str, int]
    search: Mapping[str, Scalar]


def read_expression(text: str) -> Expression:
    """The parts of `text`; raises MethodUnsupportedError for what cannot be read.

    Raises InvalidArgumentError for a schedule that contradicts itself.
    """
    found = _EXPRESSION.fullmatch(text)
    if found is None:
        raise MethodUnsupportedError(f"method is {text!r}, expected {EXPRESSION_HELP}", method=text)
    schedule: dict[str, float] = {}
    windows: dict[str, int] = {}
    search: dict[str, Scalar] = {}
    for key, value in _options(text, found["options"]):
        if key in _SWITCHES:
            schedule[key] = 1
        elif key == "correct":
            schedule[key] = _number(text, key, value)
        elif key == "period":
            schedule[key] = _whole(text, key, value)
        elif key in _WINDOWS:
            windows[key] = _whole(text, key, value)
        else:
            search[key] = _scalar(value)
    return Expression(
        found["preset"], found["remainder"], _schedule(schedule) if schedule else None, windows, search
    )


def _options(text: str, options: str) -> Iterator[tuple[str, str]]:
    """Keys and values; the value is empty for a switch, and for nothing else."""
    for option in options.split("@")[1:]:
        key, _, value = option.partition("=")
        if bool(value) == (key in _SWITCHES):
            raise _unreadable(text, key, value)
        yield key, value


def _schedule(values: Mapping[str, float]) -> Schedule:
    return Schedule(
        period=int(values.get("period", 1)),
        lag=int("lag" in values),
        correct_below=values.get("correct"),
    )


def _number(text: str, key: str, value: str) -> int | float:
    number = _scalar(value)
    if isinstance(number, str) or (isinstance(number, float) and not math.isfinite(number)):
        raise _unreadable(text, key, value)
    return number


def _whole(text: str, key: str, value: str) -> int:
    number = _number(text, key, value)
    if number != int(number):
        raise _unreadable(text, key, value)
    return int(number)


def _scalar(value: str) -> Scalar:
    """A whole number, a number or a word, whichever it is read as first."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _unreadable(text: str, key: str, value: str) -> MethodUnsupportedError:
    given = f"@{key}={value}" if value else f"@{key}"
    return MethodUnsupportedError(
        f"method is {text!r}: cannot read {given}; expected {EXPRESSION_HELP}", method=text
    )
