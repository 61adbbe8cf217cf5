"""Every parameter of every endpoint, and every member inside of one: honoured, refused with a sentence, or taken.

What can change an answer is honoured or refused. What cannot is taken: it does nothing, docs/api.md lists it, and a
header of the response names it. Null and empty members count nowhere. The tables are what is read by and documented.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta

from decode_engine.orders.fields import ANY, Kind, Range, shown
from decode_engine.settings.request_bounds import MAX_PROMPTS
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import MAX_MESSAGES, MAX_TOOLS

_MOST_LABELS = 1000
"""That are looked at; how many a context may have is the server's to say."""
_MOST_PARTS = 4096

_OBJECTS = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]
MESSAGES = Kind(f"a list of messages, at most {MAX_MESSAGES:,}", _OBJECTS)
OBJECTS = Kind("a list of objects", _OBJECTS)
INPUT = Kind(f"a text, or a list of items, at most {MAX_MESSAGES:,}", str | _OBJECTS)
TOOLS = Kind(
    f"a list of tools, at most {MAX_TOOLS}", Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
)
CONTENT = Kind(
    f"a text, or a list of at most {_MOST_PARTS:,} parts",
    str | Annotated[list[str | dict[str, Any] | None], Meta(max_length=_MOST_PARTS)],
)
LABELS = Kind("texts or null by name", Annotated[dict[str, str | None], Meta(max_length=_MOST_LABELS)])
LABELS_ONLY = Kind("texts by name", Annotated[dict[str, str], Meta(max_length=_MOST_LABELS)])


def _is_prompt(value: str | list[Any]) -> bool:
    """Besides its type: token ids alone, or prompts alone, none of these empty."""
    if isinstance(value, str) or all(isinstance(one, int) for one in value):
        return True
    return len(value) <= MAX_PROMPTS and all(one and not isinstance(one, int) for one in value)


PROMPT = Kind(
    f"a text, a list of token ids, or a list of these, at most {MAX_PROMPTS}",
    str | list[int | str | list[int]],
    _is_prompt,
)
JSON_TEXT = Kind("an object, or JSON as text", dict | str | list)
TTL, RENEW = Range(1, 36_500 * 86_400).kind, Range(0, 36_500 * 86_400).kind


class Fate(Enum):
    """What becomes of a value that is given."""

    HONOURED = "honoured"
    REFUSED = "refused"
    TAKEN = "taken"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, or one member of an object.

    kind: of one that is honoured. says: what it does, or why it is refused or does nothing. neutral: values that ask
    for nothing, beside null and what is empty. inside: what the object has, or each of the list. empty_counts: whether
    "", [] and {} say something. read_by: of one that is taken, what templates call it; where the model's template reads
    that, it is refused.
    """

    name: str
    kind: Kind
    says: str
    fate: Fate = Fate.HONOURED
    neutral: tuple[object, ...] = ()
    required: bool = False
    inside: Members | Variants | None = None
    empty_counts: bool = False
    read_by: tuple[str, ...] = ()

    @property
    def asks_nothing(self) -> tuple[object, ...]:
        """Values which ask for nothing; of one that is refused false does, too, where true is not done anyway."""
        if self.fate is not Fate.REFUSED or any(one is True for one in self.neutral):
            return self.neutral
        return (*self.neutral, False)


@dataclass(frozen=True, slots=True)
class Members:
    """What an object may have. others_taken: whether names that are not listed are taken, whatever they are."""

    title: str
    parameters: tuple[Parameter, ...]
    others_taken: bool = False


@dataclass(frozen=True, slots=True)
class Variants:
    """Objects of several kinds. by: the member that says which; usual: where it is missing.

    kinds: what is in them, or why they are refused, or behind the word `taken:` why they are left out.
    """

    by: str
    kinds: Mapping[str, Members | Variants | str]
    usual: str = ""


def refused(name: str, why: str, *neutral: object) -> Parameter:
    """One that is refused; values that ask for nothing are not."""
    return Parameter(name, ANY, why, Fate.REFUSED, neutral)


def taken(names: str, why: str, *read_by: str) -> tuple[Parameter, ...]:
    """Some that do nothing. names: with blanks between them."""
    return tuple(Parameter(name, ANY, why, Fate.TAKEN, read_by=read_by) for name in names.split())


FAMILIES: Mapping[str, str] = {
    "labels": r"(meta_?data|.*_metadata|labels?|tags?|title|description|opts|notes?)",
    "who asks": r"(user|end_user|customer|client|organi[sz]ation|org|project|tenant|account|device|app|application)"
    r"(_?(id|name|info|version))?",
    "which request it is": r"(id|uuid|(parent_|client_)?(session|chat|conversation|request|message|run|event|parent"
    r"|turn|correlation)_?(id|uuid|key|name|number)|created(_?(at|time))?|updated(_?(at|time))?|time_?stamp)",
    "tracing": r"(.*(trace|tracing|span|telemetry|langfuse|langsmith|observab|litellm).*|_.*|x[-_].*)",
    "caching": r".*cache.*",
    "storage": r"(store|storage|retention|keep_alive|.*_retention)",
    "what clients do themselves": r"((request_)?timeout|(max|num)_retries|api_(key|base|version|type)|base_url|"
    r"extra_(headers|query)|custom_llm_provider|drop_params)",
    "tiers": r"((service_)?tier|provider(_?options)?|route|routing|models|fallbacks?|usage)",
}
"""Names that change no answer, wherever they stand: what they are about, and how they are recognised."""
_FAMILY = re.compile("|".join(FAMILIES.values()))
_LEFT_OUT = "taken:"
_SMALL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def in_family(name: str) -> bool:
    """Whether a name that no table has is one of those that change no answer, in camelCase, too."""
    return _FAMILY.fullmatch(_SMALL.sub("_", name[:100]).lower()) is not None


@dataclass(slots=True)
class Reading:
    """Goes through what was sent. taken: places of what does nothing, without numbers of items, in order. hints: the
    same of what a template may read, by what templates call it."""

    advice: str = "docs/api.md lists them"
    taken: dict[str, None] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)

    def members(self, where: str, inside: Members, given: Mapping[str, Any]) -> dict[str, Any]:
        """The members that count. where: the object's place, "" for the body. Raises InvalidArgumentError."""
        known = {parameter.name: parameter for parameter in inside.parameters}
        for name, value in given.items():
            if name not in known and not _empty(value):
                place = _join(where, str(name))
                if not (inside.others_taken or in_family(str(name))):
                    raise InvalidArgumentError(
                        f"{shown(place)} is not known here, where it might change the answer; leave it out "
                        f"({self.advice})",
                        field=place[:200],
                    )
                self._note(place)
        read = ((name, self._one(_join(where, name), one, given.get(name))) for name, one in known.items())
        return {name: value for name, value in read if value is not None}

    def value(self, where: str, inside: Members | Variants | None, value: Any) -> Any:
        """A value, or a list of them, with what counts of its members; None for objects of a kind that is left out."""
        if inside is None or isinstance(value, str):
            return value
        if isinstance(value, list):
            return [self.value(f"{where}[{place}]", inside, item) for place, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        if isinstance(inside, Members):
            return self.members(where, inside, value)
        kind = value.get(inside.by) or inside.usual
        found = inside.kinds.get(kind) if isinstance(kind, str) else None
        if isinstance(found, Members | Variants):
            others = {name: one for name, one in value.items() if name != inside.by}
            return {inside.by: kind, **self.value(where, found, others)}
        if isinstance(found, str) and found.startswith(_LEFT_OUT):
            self._note(f"{where}.{kind}")
            return None
        at = where if found else f"{where}.{inside.by}"
        names = ", ".join(name for name, one in inside.kinds.items() if not isinstance(one, str))
        raise InvalidArgumentError(
            f"{at} is {shown(kind or None)}: {found or f'expected one of {names}'}", field=at
        )

    def _one(self, where: str, parameter: Parameter, value: Any) -> Any:
        if value is None or (_empty(value) and not parameter.empty_counts):
            if parameter.required:
                found = "missing" if value is None else f"{shown(value)}, which is empty"
                raise InvalidArgumentError(
                    f"{where} is {found}, expected {parameter.kind.shown}", field=where
                )
            return None
        if isinstance(value, float) and value.is_integer() and parameter.kind.schema.get("type") == "integer":
            value = int(value)
        if any(type(value) is type(one) and value == one for one in parameter.asks_nothing):
            return None
        if parameter.fate is Fate.REFUSED:
            raise InvalidArgumentError(f"{where} is not supported: {parameter.says}", field=where)
        if not parameter.kind.fits(value):
            raise InvalidArgumentError(
                f"{where} is {shown(value)}, expected {parameter.kind.shown}", field=where
            )
        if parameter.fate is Fate.TAKEN:
            self._note(where)
            for name in parameter.read_by:
                self.hints[name] = where
            return None
        return self.value(where, parameter.inside, value)

    def _note(self, where: str) -> None:
        self.taken[_NUMBERS.sub("", where)[:100]] = None


_NUMBERS = re.compile(r"\[\d+\]")


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What may be sent to a path."""

    path: str
    parameters: tuple[Parameter, ...]

    def read(self, body: Any, reading: Reading | None = None) -> dict[str, Any]:
        """The values that were given and count. reading: is told what does nothing.

        Raises InvalidArgumentError, whose `field` names the parameter.
        """
        if not isinstance(body, dict):
            raise InvalidArgumentError("the body is no JSON object, expected one")
        return (reading or Reading()).members("", Members(self.path, self.parameters), body)


def pick(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the values that have these names."""
    return {name: given[name] for name in names if name in given}
