"""Calls of tools as a constraint: names of tools that there are, and arguments that their schemas describe."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from decode_engine.engine.sampling.constraints import BETWEEN, obeyed_schema
from decode_engine.orders.order import Constraint
from index_store.models.conversation.call_syntax import CallSyntax, trigger_of
from index_store.models.conversation.messages import Tool, parse_object, refused

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_COMPOSING = frozenset(
    {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "unevaluatedProperties"}
)
"""Words of schemas beside which properties may be listed elsewhere."""


def call_constraint(
    syntax: CallSyntax,
    tools: Sequence[Tool],
    *,
    forced: bool,
    several: bool,
    hidden: Mapping[str, int],
    ends: Collection[int] = (),
    answer: Constraint | None = None,
) -> Constraint:
    """An answer of calls.

    forced: it is nothing else; otherwise text may stand before them, or there is only text, and arguments of tools that
    are not strict are any objects. several: whether there may be more calls than one. hidden: special tokens by their
    texts, which may stand in text, too, but for those that end an answer (ends). answer: a JSON schema of text without
    calls; there is none before calls then.

    Raises InvalidArgumentError for a schema of something else than an object, and for calls that begin as JSON does
    beside an answer.
    """
    words = _Words(hidden)
    one = " | ".join(
        f"{words.of(tool.name)} {words.of(syntax.middle)} %json {json.dumps(_schema(number, tool, forced))}"
        for number, tool in enumerate(tools)
    )
    more = ""
    if several and syntax.between is not None:
        more = f"({words.of(syntax.between)} call)* "
    calls = f"call {more}{words.of(syntax.close)}"
    lines = ["%llguidance {}", f"call: {one}"]
    if forced:
        lines.append(f"start: {words.of(syntax.open)} {calls}")
    elif answer is not None:
        if syntax.open.lstrip()[:1] in ("", *'{["'):
            raise refused(
                "constraint", "it beside tools", "one of them: this model's calls begin as JSON does"
            )
        schema = {**obeyed_schema(parse_object("constraint", answer.text)), "x-guidance": BETWEEN}
        lines += [f"start: {words.of(syntax.open)} {calls} | %json {json.dumps(schema)}"]
    else:
        token = next((text for text in hidden if syntax.open.startswith(text)), "")
        trigger = token or trigger_of(syntax)
        rest = words.of(syntax.open[syntax.open.index(trigger) + len(trigger) :])
        free = sorted(set(hidden.values()).difference(ends, [hidden[token]] if token else ()))
        pieces = f"(TEXT <[{','.join(map(str, free))}]>)* " if free else ""
        lines += [
            f"start: {pieces}(begun {rest} {calls} | TEXT)",
            f"begun{'' if token else '[lazy]'}: TEXT {words.of(trigger)}",
            r"TEXT: /(.|\n)*/",
        ]
    return Constraint("calls", "\n".join(lines) + "\n")


class _Words:
    """Texts of a grammar, in which special tokens are tokens."""

    def __init__(self, hidden: Mapping[str, int]) -> None:
        self._hidden = hidden
        texts = sorted(hidden, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, texts))})" if texts else "(?!)()")

    def of(self, text: str) -> str:
        """The terms for a text, one after the other."""
        parts = [part for part in self._special.split(text) if part]
        return " ".join(
            f"<[{self._hidden[part]}]>" if part in self._hidden else json.dumps(part) for part in parts
        )


def _schema(number: int, tool: Tool, forced: bool) -> dict[str, Any]:
    field = f"tools[{number}].parameters"
    schema: dict[str, Any] = dict(_ANY_OBJECT)
    if not tool.parameters:
        schema |= {"properties": {}, "additionalProperties": False}
    elif forced or tool.strict:
        given = parse_object(field, tool.parameters)
        if given.get("type", "object") != "object":
            raise refused(f"{field}.type", json.dumps(given["type"])[:60], "object, which arguments are")
        schema = {**_closed(obeyed_schema(given)), "type": "object"}
    return {**schema, "x-guidance": BETWEEN}


def _closed(schema: Any) -> Any:
    """A schema whose objects have the properties that it lists alone, where it says nothing of others.

    Small models make up one after the other otherwise, and never come to an end.
    """
    if not isinstance(schema, dict) or not _COMPOSING.isdisjoint(schema):
        return schema
    closed = dict(schema)
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _closed(part) for name, part in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    return closed
