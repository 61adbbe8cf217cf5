"""Tools, and calls of them as OpenAI's chat completions spell them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode_engine.gateway.wire.parameters import Kind, shown
from decode_engine.gateway.wire.response_items import flat_name_of
from decode_engine.rpc.client import GenerateOptions, ToolCallPart
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Tool, ToolCall, check_tools, read_tools

_WORDS = ("none", "auto", "required")


def _name_of(choice: Any) -> str | None:
    """The function that has to be called; None where the choice names none."""
    function = choice.get("function") if isinstance(choice, dict) else None
    named = isinstance(function, dict) and set(function) == {"name"} and set(choice) == {"type", "function"}
    name = function["name"] if named and isinstance(function, dict) else None
    return name if isinstance(name, str) and name and choice["type"] == "function" else None


TOOL_CHOICE = Kind(
    "`none`, `auto`, `required`, or a function by its name",
    lambda value: value in _WORDS if isinstance(value, str) else _name_of(value) is not None,
)


def call_options(given: dict[str, Any]) -> GenerateOptions:
    """What a request says of tools. Raises InvalidArgumentError."""
    options: GenerateOptions = {}
    if given.get("tools"):
        options["tools"] = tools_of(given["tools"])
    choice = given.get("tool_choice")
    if isinstance(choice, str):
        options["tool_choice"] = choice  # type: ignore[typeddict-item]
    elif choice is not None:
        options["tool_name"] = _name_of(choice) or flat_name_of(choice)
    if given.get("parallel_tool_calls") is False and (options or choice):
        options["single_call"] = True
        options.setdefault("tool_choice", "auto" if "tool_name" not in options else "required")
    return options


def tools_of(tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """The functions, spelt as chat completions or flat, as responses have them.

    Raises InvalidArgumentError, which names the part that cannot be used.
    """
    flat = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            raise InvalidArgumentError(
                f"tools[{number}].type is {shown(tool.get('type'))}, expected function: other tools are not known",
                field=f"tools[{number}].type",
            )
        flat.append(tool if "function" in tool else _flat(tool))
    read = read_tools(flat)
    check_tools(read)
    return read


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A function of responses without its type, and without what asks for nothing."""
    return {name: value for name, value in tool.items() if name != "type" and value is not None}


def whole_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """The calls of a message."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def call_deltas(parts: Sequence[ToolCallPart]) -> list[dict[str, Any]]:
    """Parts of calls, as they stream."""
    deltas = []
    for part in parts:
        delta: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments_json}}
        if part.id:
            delta |= {"id": part.id, "type": "function"}
            delta["function"]["name"] = part.name
        deltas.append(delta)
    return deltas
