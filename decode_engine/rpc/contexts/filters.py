"""Filters of lists, in a part of AIP-160's language.

    filter     := part { AND part }            part := term { OR term }
    term       := [NOT | -] ( "(" filter ")" | comparison )
    comparison := FIELD OPERATOR VALUE         OPERATOR := = | != | < | <= | > | >= | :

OR binds more tightly than AND, as AIP-160 has it. A context without the field fits no comparison but `!=`. Values are
words or texts in double quotes. Errors say at which character what was found and what was expected.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from decode_engine.rpc.contexts.context_fields import FIELDS, Row, Value, ValueType
from index_store.errors import InvalidArgumentError
from index_store.store.listing import STATES

MAX_FILTER_CHARACTERS = 2000
_MAX_DEPTH = 32

Test = Callable[[Row], bool]

_ORDERS: Mapping[str, Callable[[Value, Value], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_OPERATORS: Mapping[ValueType, tuple[str, ...]] = {
    ValueType.TEXT: ("=", "!=", ":"),
    ValueType.NUMBER: tuple(_ORDERS),
    ValueType.TIME: tuple(_ORDERS),
    ValueType.FLAG: ("=", "!="),
    ValueType.STATE: ("=", "!="),
}
_TOKEN = re.compile(
    r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<sign><=|>=|!=|[<>=:()])|(?P<word>[^\s"<>=!:()]+))'
)
_KEYWORDS = frozenset({"AND", "OR", "NOT"})


@dataclass(frozen=True, slots=True)
class _Token:
    """kind: "text", "sign", "word" or "end". place: of its first character, from 1."""

    kind: str
    text: str
    place: int

    @property
    def shown(self) -> str:
        return "the end" if self.kind == "end" else repr(self.text[:60])


def parse_filter(text: str) -> Test:
    """What tells whether a context fits the filter; every one fits an empty filter. Raises InvalidArgumentError."""
    if len(text) > MAX_FILTER_CHARACTERS:
        raise InvalidArgumentError(
            f"filter has {len(text)} characters, expected at most {MAX_FILTER_CHARACTERS}", field="filter"
        )
    if not text.strip():
        return lambda row: True
    parser = _Parser(text)
    test = parser.filter(0)
    parser.expect_end()
    return test


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0

    def filter(self, depth: int) -> Test:
        """Parts that must all hold."""
        parts = [self._part(depth)]
        while self._takes("AND"):
            parts.append(self._part(depth))
        return parts[0] if len(parts) == 1 else lambda row: all(part(row) for part in parts)

    def expect_end(self) -> None:
        if self._ahead.kind != "end":
            raise _expected(self._ahead, "AND, OR or the end")

    def _part(self, depth: int) -> Test:
        terms = [self._term(depth)]
        while self._takes("OR"):
            terms.append(self._term(depth))
        return terms[0] if len(terms) == 1 else lambda row: any(term(row) for term in terms)

    def _term(self, depth: int) -> Test:
        if depth > _MAX_DEPTH:
            raise _expected(self._ahead, f"at most {_MAX_DEPTH} terms inside each other")
        if self._takes("NOT") or self._takes("-"):
            negated = self._term(depth + 1)
            return lambda row: not negated(row)
        if not self._takes("("):
            return self._comparison()
        inner = self.filter(depth + 1)
        if not self._takes(")"):
            raise _expected(self._ahead, "AND, OR or )")
        return inner

    def _comparison(self) -> Test:
        name = self._take()
        if name.kind == "word" and name.text.startswith("-") and len(name.text) > 1:
            positive = self._compared(_Token("word", name.text[1:], name.place + 1))
            return lambda row: not positive(row)
        return self._compared(name)

    def _compared(self, name: _Token) -> Test:
        if name.kind != "word" or name.text in _KEYWORDS:
            raise _expected(name, "a field")
        if name.text == "labels":
            return self._label_there()
        label = name.text.removeprefix("labels.") if name.text.startswith("labels.") else None
        kind = ValueType.TEXT if label is not None else FIELDS.get(name.text)
        if kind is None or label == "":
            raise _expected(name, f"one of {', '.join(FIELDS)}, labels.KEY")
        sign = self._take()
        if sign.kind != "sign" or sign.text not in _OPERATORS[kind]:
            raise _expected(sign, f"one of {', '.join(_OPERATORS[kind])}")
        value = self._take()
        if value.kind not in ("word", "text"):
            raise _expected(value, kind.value)
        wanted = _value(kind, value)
        if label is not None:
            key = label
            if sign.text == ":" and value.kind == "word" and value.text == "*":
                return lambda row: key in row.labels
            return _comparison(lambda row: row.labels.get(key), sign.text, wanted)
        field = name.text
        return _comparison(lambda row: row.values.get(field), sign.text, wanted)

    def _label_there(self) -> Test:
        sign = self._take()
        if sign.text != ":":
            raise _expected(sign, ": and a label's key, or labels.KEY before the sign")
        key = self._take()
        if key.kind not in ("word", "text"):
            raise _expected(key, "a label's key")
        text = _unquoted(key)
        return lambda row: text in row.labels

    @property
    def _ahead(self) -> _Token:
        return self._tokens[self._next]

    def _take(self) -> _Token:
        token = self._ahead
        self._next += token.kind != "end"
        return token

    def _takes(self, text: str) -> bool:
        found = self._ahead.kind != "text" and self._ahead.text == text
        self._next += found
        return found


def _comparison(value_of: Callable[[Row], Value | None], sign: str, wanted: Value) -> Test:
    if sign == ":":
        part = str(wanted).casefold()
        return lambda row: part in str(value_of(row) or "").casefold()
    holds = _ORDERS[sign]

    def test(row: Row) -> bool:
        found = value_of(row)
        return sign == "!=" if found is None else holds(found, wanted)

    return test


def _value(kind: ValueType, token: _Token) -> Value:
    """The value that a token stands for. Raises InvalidArgumentError where it is none of that kind."""
    text = _unquoted(token)
    if kind is ValueType.TEXT:
        return text
    if kind is ValueType.FLAG and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind is ValueType.STATE and text in STATES:
        return text
    if kind is ValueType.NUMBER and re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    if kind is ValueType.TIME:
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise _expected(token, kind.value) from None
        return time.replace(tzinfo=UTC) if time.tzinfo is None else time
    raise _expected(token, kind.value)


def _unquoted(token: _Token) -> str:
    return re.sub(r"\\(.)", r"\1", token.text[1:-1], flags=re.DOTALL) if token.kind == "text" else token.text


def _tokens(text: str) -> list[_Token]:
    """The words, texts and signs of a filter, and its end. A word may hold the colons of a time."""
    tokens: list[_Token] = []
    position = 0
    while text[position:].strip():
        match = _TIME.match(text, position) if tokens and tokens[-1].text in _ORDERS else None
        match = match or _TOKEN.match(text, position)
        if match is None:
            rest = text[position:]
            place = position + len(rest) - len(rest.lstrip()) + 1
            found = _Token("sign", rest.strip()[:20], place)
            raise _expected(found, 'a field, a sign, a word, or a text that ends with "')
        kind = match.lastgroup or "word"
        tokens.append(_Token(kind, match[kind], match.start(kind) + 1))
        position = match.end()
    return [*tokens, _Token("end", "", len(text) + 1)]


_TIME = re.compile(r"\s*(?P<word>[0-9]{4}-[0-9]{2}-[0-9]{2}[^\s\"()]*)")


def _expected(found: _Token, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"filter: at character {found.place} found {found.shown}, expected {expected}",
        field="filter",
        position=found.place,
    )
