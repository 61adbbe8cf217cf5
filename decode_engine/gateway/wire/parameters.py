"""Every parameter of every endpoint: read, or refused with a sentence. None is ignored, and unknown ones are refused.

The tables are what docs/api.md shows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from decode_engine.settings.request_bounds import MAX_BIASED_TOKENS, MAX_CHOICES, MAX_STOP_STRINGS
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import MAX_MESSAGES, MAX_TOOLS


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value has to be. shown: in words. fits: whether one is."""

    shown: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_object(value: Any, most: int) -> bool:
    return isinstance(value, dict) and len(value) <= most


_MOST_LABELS = 1000
"""That are looked at; how many a context may have is the server's to say."""

TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def _list_of(one: Kind, most: int) -> Callable[[Any], bool]:
    """Whether a value is a list of at most so many. Looked at first: the rest takes time for each."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(one.fits, value))


MESSAGES = Kind(f"a list of messages, at most {MAX_MESSAGES:,}", _list_of(OBJECT, MAX_MESSAGES))
TOOLS = Kind(f"a list of tools, at most {MAX_TOOLS}", _list_of(OBJECT, MAX_TOOLS))
TEXTS = Kind(
    f"a text, or a list of at most {MAX_STOP_STRINGS} texts",
    lambda value: isinstance(value, str) or _list_of(TEXT, MAX_STOP_STRINGS)(value),
)
TEXTS_ONLY = Kind(f"a list of at most {MAX_CHOICES:,} texts", _list_of(TEXT, MAX_CHOICES))
TOKENS = Kind(
    "a list of token ids",
    lambda value: isinstance(value, list) and all(_is_integer(id_) and id_ >= 0 for id_ in value),
)
LABELS = Kind(
    "texts or null by name",
    lambda value: (
        _is_object(value, _MOST_LABELS) and all(label is None or TEXT.fits(label) for label in value.values())
    ),
)
LABELS_ONLY = Kind(
    "texts by name", lambda value: _is_object(value, _MOST_LABELS) and all(map(TEXT.fits, value.values()))
)
BIAS = Kind(
    f"numbers by token id, at most {MAX_BIASED_TOKENS}",
    lambda value: _is_object(value, MAX_BIASED_TOKENS) and all(map(_is_number, value.values())),
)
PROMPT = Kind(
    "a text, or a list of token ids",
    lambda value: isinstance(value, str) or (isinstance(value, list) and all(map(_is_integer, value))),
)
INPUT = Kind(
    f"a text, or a list of items, at most {MAX_MESSAGES:,}",
    lambda value: isinstance(value, str) or MESSAGES.fits(value),
)


def number(least: float, most: float, *, above: bool = False) -> Kind:
    """A number of least to most; with `above`, not least itself."""
    shown = (
        f"a number above {least:g}, at most {most:g}" if above else f"a number of {least:g} to {most:.12g}"
    )
    return Kind(
        shown,
        lambda value: _is_number(value) and (least < value if above else least <= value) and value <= most,
    )


def integer(least: int, most: int) -> Kind:
    """An integer of least to most."""
    return Kind(
        f"an integer of {least} to {most}", lambda value: _is_integer(value) and least <= value <= most
    )


_LONGEST_S = 36_500 * 86_400
TTL = number(1, _LONGEST_S)


def _is_keep(value: Any) -> bool:
    members = {"display_name": TEXT, "ttl_seconds": TTL}
    return isinstance(value, dict) and all(
        name in members and members[name].fits(given) for name, given in value.items()
    )


KEEP = Kind(f"an object, in it perhaps display_name ({TEXT.shown}) and ttl_seconds ({TTL.shown})", _is_keep)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. kind: None for one that is refused. says: what it does, or why it is refused.

    neutral: values of one that is refused that ask for nothing; null always is.
    """

    name: str
    kind: Kind | None
    says: str
    neutral: tuple[object, ...] = ()
    required: bool = False


def refused(name: str, why: str, *neutral: object) -> Parameter:
    """A parameter that is refused; values that ask for nothing are not."""
    return Parameter(name, None, why, neutral)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What may be sent to a path."""

    path: str
    parameters: tuple[Parameter, ...]

    def read(self, body: Any) -> dict[str, Any]:
        """The values that were given and count. Raises InvalidArgumentError, whose `field` names the parameter."""
        if not isinstance(body, dict):
            raise InvalidArgumentError("the body is no JSON object, expected one")
        known = {parameter.name: parameter for parameter in self.parameters}
        for name in body:
            if name not in known:
                raise InvalidArgumentError(
                    f"{shown(name)} is no parameter of {self.path}; docs/api.md lists them",
                    field=str(name)[:100],
                )
        return {
            name: body[name] for name, parameter in known.items() if self._counts(parameter, body.get(name))
        }

    def _counts(self, parameter: Parameter, value: Any) -> bool:
        name = parameter.name
        if value is None:
            if parameter.required:
                raise InvalidArgumentError(f"{name} is missing, expected {_expected(parameter)}", field=name)
            return False
        if parameter.kind is None:
            if not any(type(value) is type(neutral) and value == neutral for neutral in parameter.neutral):
                raise InvalidArgumentError(f"{name} is not supported: {parameter.says}", field=name)
            return False
        if not parameter.kind.fits(value):
            raise InvalidArgumentError(
                f"{name} is {shown(value)}, expected {parameter.kind.shown}", field=name
            )
        return True


def describe(endpoint: Endpoint) -> str:
    """The endpoint's table, as docs/api.md has it."""
    rows = ["| parameter | takes | what it does |", "|---|---|---|"]
    for parameter in endpoint.parameters:
        takes = "refused" if parameter.kind is None else parameter.kind.shown
        if parameter.neutral:
            takes += f" (but {', '.join(f'`{json.dumps(value)}`' for value in parameter.neutral)})"
        if parameter.required:
            takes += ", required"
        rows.append(f"| `{parameter.name}` | {takes} | {parameter.says} |")
    return "\n".join(rows) + "\n"


def pick(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the values that have these names."""
    return {name: given[name] for name in names if name in given}


def _expected(parameter: Parameter) -> str:
    return "another value" if parameter.kind is None else parameter.kind.shown


_MOST_SHOWN = 40


def shown(value: object) -> str:
    """A value as a sentence quotes it, cut where it is long."""
    if isinstance(value, list | dict) and len(value) > _MOST_SHOWN:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = json.dumps(_cut(value, 4))
    return text if len(text) <= 80 else f"{text[:77]}..."


def _cut(value: object, depth: int) -> object:
    """The beginning of a value: to write all of a large one only to quote it would take others' time."""
    if isinstance(value, str):
        return value[:80]
    if depth == 0 and isinstance(value, list | dict):
        return "..."
    if isinstance(value, list):
        return [_cut(item, depth - 1) for item in value[:_MOST_SHOWN]]
    if isinstance(value, dict):
        return {str(name)[:80]: _cut(item, depth - 1) for name, item in islice(value.items(), _MOST_SHOWN)}
    return value
