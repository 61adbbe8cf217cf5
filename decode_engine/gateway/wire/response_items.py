"""Items and tools of /v1/responses, which spell them flat: read as messages and functions, and written back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from decode_engine.gateway.wire.messages_shape import text_of
from decode_engine.gateway.wire.parameters import Kind, shown
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Tool

_WORDS = ("none", "auto", "required")
_CALL, _OUTPUT = "function_call", "function_call_output"
_MEMBERS = {
    _CALL: frozenset({"type", "id", "status", "call_id", "name", "arguments"}),
    _OUTPUT: frozenset({"type", "id", "status", "call_id", "output"}),
}

FLAT_TOOL_CHOICE = Kind(
    "`none`, `auto`, `required`, or a function by its name",
    lambda value: value in _WORDS if isinstance(value, str) else flat_name_of(value) is not None,
)


def flat_name_of(choice: Any) -> str | None:
    """The function that has to be called, by `{"type": "function", "name": NAME}`; None for anything else."""
    flat = isinstance(choice, dict) and set(choice) == {"type", "name"} and choice["type"] == "function"
    return choice["name"] if flat and isinstance(choice["name"], str) and choice["name"] else None


def messages_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as messages of chat completions: calls become part of the message of the assistant before them.

    Raises InvalidArgumentError, which names the item that cannot be used.
    """
    messages: list[dict[str, Any]] = []
    for number, given in enumerate(items):
        where = f"input[{number}]"
        item = {name: value for name, value in given.items() if value is not None}
        kind = item.get("type", "message")
        if kind == _CALL:
            if not (messages and messages[-1].get("role") == "assistant"):
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(_read_call(where, item))
        elif kind == _OUTPUT:
            messages.append(_read_output(where, item))
        elif kind == "message" and "tool_calls" not in item:
            messages.append(item)
        else:
            raise InvalidArgumentError(
                f"{where}.type is {shown(kind)}, expected a message without calls, {_CALL} or {_OUTPUT}",
                field=f"{where}.type",
            )
    return messages


def _read_call(where: str, item: dict[str, Any]) -> dict[str, Any]:
    _check(where, item, "call_id", "name", "arguments")
    return {"id": item["call_id"], "name": item["name"], "arguments": item["arguments"]}


def _read_output(where: str, item: dict[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if isinstance(output, list):
        item = {**item, "output": text_of(f"{where}.output", output)}
    _check(where, item, "call_id", "output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]}


def _check(where: str, item: dict[str, Any], *texts: str) -> None:
    for name in sorted(item):
        if name not in _MEMBERS[item["type"]]:
            raise InvalidArgumentError(f"{where}.{name[:60]} is not known here; leave it out", field=where)
    for name in texts:
        if not isinstance(item.get(name), str):
            raise InvalidArgumentError(
                f"{where}.{name} is {shown(item.get(name))}, expected a text", field=f"{where}.{name}"
            )


def tool_objects(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Functions as a response repeats them."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description or None,
            "parameters": json.loads(tool.parameters) if tool.parameters else None,
            "strict": tool.strict,
        }
        for tool in tools
    ]
