"""Options that say how answers are made: method, budget, sampling, ends, and what they have to be."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from typer import Option

from decode_engine.orders.fields import BUDGETS, BY_NAME, CONSTRAINTS, FIELDS, FLAG, Field
from decode_engine.rpc.client import GenerateOptions
from decode_engine.rpc.door.options import ServerConfig
from decode_engine.settings import request_bounds as bounds
from index_store.cli.options import AtLeast, Characters, Check, Filled, InputFile, MoreThan, check_bounds
from index_store.errors import InvalidArgumentError, SparseKVError

ClassT = TypeVar("ClassT", bound=type[Any])

_FLAGS = {"json_schema": "--json-schema"} | {
    said: said.replace(field.name, field.flag)
    for field in FIELDS
    if field.flag
    for said in ([field.name] if "_" in field.name or field.name in CONSTRAINTS else [f"{field.name} is"])
}
"""What people write for fields that the server's errors name; a name that is a word, too, where it is one."""
_NAMED = re.compile("|".join(rf"(?<!-)\b{field}\b" for field in _FLAGS))
_BIAS = re.compile(r"(\d{1,10})=([+-]?\d{1,3}(?:\.\d+)?)")
_CHECKS: dict[str, Check | None] = {
    "stop": Characters(1, bounds.MAX_STOP_LENGTH),
    "stop_token_ids": AtLeast(0, 2**32 - 1),
    "logit_bias": None,
    "choices": None,
}
"""Where the table has no range, and what is given is no flag."""
_MOST = {
    "stop": bounds.MAX_STOP_STRINGS,
    "stop_token_ids": bounds.MAX_STOP_TOKENS,
    "logit_bias": bounds.MAX_BIASED_TOKENS,
    "choices": bounds.MAX_CHOICES,
}


def asking(*names: str) -> Callable[[ClassT], ClassT]:
    """Adds flags of the table of fields to a class that becomes a configuration, as members of the fields' names.

    What is not given is None, and left to the server.
    """

    def add(config: ClassT) -> ClassT:
        for name in names:
            config.__annotations__[name] = _option(BY_NAME[name])
            setattr(config, name, None)
        return config

    return add


def _option(field: Field) -> Any:
    kind: Any = str if field.range is None else int if field.range.whole else float
    if field.kind is FLAG:
        kind = bool
    if field.each is not None:
        kind = tuple.__class_getitem__((field.each, ...))
    says = field.says.replace("`", "'") + ("" if field.each is None else " Repeatable.")
    option = Option(field.flag, metavar=field.metavar, help=says)
    if field.range is None:
        check = None if field.kind is FLAG else _CHECKS.get(field.name, Filled())
    else:
        check = (MoreThan if field.range.above else AtLeast)(field.range.least, field.range.most)
    return Annotated.__class_getitem__((kind | None, option, *([check] if check else [])))  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
@asking(*(name for name, field in BY_NAME.items() if field.flag))
class AnswerConfig(ServerConfig):
    """How answers are made: a member for every field of the table, None where it is left to the server, and these. At
    most one of the budgets is given, and at most one of json_schema, regex and choices.
    """

    timeout: Annotated[
        float | None, "Seconds to wait for the whole answer.", MoreThan(0, bounds.LONGEST_WAIT_S)
    ] = None
    json_schema: Annotated[
        Path | None, "The answer has to be JSON that the schema in this file describes.", InputFile()
    ] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        for group in (BUDGETS, CONSTRAINTS):
            flags = {name: BY_NAME[name].flag if name in BY_NAME else "--json-schema" for name in group}
            given = [flag for name, flag in flags.items() if getattr(self, name)]
            if len(given) > 1:
                raise InvalidArgumentError(
                    f"{' and '.join(given)} are given, expected at most one of {', '.join(flags.values())}"
                )
        for name, most in _MOST.items():
            count = len(getattr(self, name) or ())
            if count > most:
                raise InvalidArgumentError(
                    f"{BY_NAME[name].flag} is given {count} times, expected at most {most}"
                )
        self.biases()

    @property
    def given(self) -> dict[str, Any]:
        """Fields of the table that say something, by their names."""
        return {name: value for name in BY_NAME if (value := getattr(self, name, None)) not in (None, ())}

    @property
    def answers(self) -> int:
        return int(self.given.get("n", 1))

    @property
    def constrained(self) -> bool:
        return self.json_schema is not None or not self.given.keys().isdisjoint(CONSTRAINTS)

    def biases(self) -> dict[int, float]:
        """By token. Raises InvalidArgumentError for what is none."""
        found: dict[int, float] = {}
        for text in self.given.get("logit_bias", ()):
            match = _BIAS.fullmatch(text)
            if match is None or abs(float(match[2])) > bounds.MAX_LOGIT_BIAS:
                raise InvalidArgumentError(
                    f"--logit-bias is {text[:100]!r}, expected TOKEN=BIAS with a token's id and a bias of "
                    f"-{bounds.MAX_LOGIT_BIAS:g} to {bounds.MAX_LOGIT_BIAS:g}, for example 42=-100"
                )
            found[int(match[1])] = float(match[2])
        return found

    def generate_options(self, text: str, *, raw: bool) -> GenerateOptions:
        """The request of a question, or with `raw` of a text that continues the context word for word.

        A question ends at a line break, unless it says where, or what its answer has to be.
        """
        schema = None if self.json_schema is None else read_utf8(self.json_schema)
        made = {
            "stop": () if raw or self.constrained else ("\n",),
            **self.given,
            "logit_bias": self.biases(),
            "json_schema": schema,
            "text" if raw else "question": text,
        }
        return cast("GenerateOptions", made)


def read_utf8(path: Path) -> str:
    """A file's text. Raises InvalidArgumentError where it is none."""
    return decoded(path.read_bytes(), str(path))


def decoded(data: bytes, name: str) -> str:
    """Bytes as text. Raises InvalidArgumentError, with the name of where they come from, where they are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"{name} is not UTF-8 text: byte {error.start} cannot be decoded"
        ) from error


@contextmanager
def in_flags() -> Iterator[None]:
    """Lets errors of the server speak of flags where they name fields."""
    try:
        yield
    except SparseKVError as error:
        error.message = as_flags(error.message)
        raise


def as_flags(message: str) -> str:
    """A message of the server with flags for the fields that it names."""
    return _NAMED.sub(lambda field: _FLAGS[field[0]], message)
