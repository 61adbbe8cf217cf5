"""Tools, and calls of them as OpenAI's endpoints spell them: in a member `function`, or flat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode_engine.gateway.wire.parameters import (
    FLAG,
    JSON_TEXT,
    OBJECT,
    TEXT,
    Kind,
    Members,
    Parameter,
    Variants,
    refused,
)
from decode_engine.rpc.client import GenerateOptions, ToolCallPart
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Tool, ToolCall, check_tools, read_tools

_WORDS = ("none", "auto", "required")
_FUNCTION = (
    Parameter("name", TEXT, "Its name."),
    Parameter("description", TEXT, "What it does, for the model."),
    Parameter(
        "parameters", JSON_TEXT, "JSON schema of its arguments; without one it has none.", empty_counts=True
    ),
    Parameter(
        "strict", FLAG, "Whether arguments satisfy the schema also where the model is free to call or not."
    ),
    refused("defer_loading", "the model is told of all tools at the beginning"),
)
FUNCTION = Members("a function", _FUNCTION)
TOOL = Variants(
    "type",
    {
        "function": Members(
            "a tool",
            (
                Parameter("function", OBJECT, "The function; or its members stand here.", inside=FUNCTION),
                *_FUNCTION,
            ),
        )
    },
    usual="function",
)


TOOL_CHOICE = Kind(
    "`none`, `auto`, `required`, or a function by its name",
    lambda value: value in _WORDS if isinstance(value, str) else isinstance(value, dict),
)
_CHOSEN = Parameter("name", TEXT, "The function's name.")
CHOICE = Variants(
    "type",
    {
        "function": Members(
            "a choice",
            (
                Parameter(
                    "function", OBJECT, "Which.", inside=Members("a function that is chosen", (_CHOSEN,))
                ),
                _CHOSEN,
            ),
        )
    },
    usual="function",
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
        name = choice.get("function", choice).get("name")
        if name is None:
            raise InvalidArgumentError(
                f"tool_choice names no function, expected {TOOL_CHOICE.shown}", field="tool_choice"
            )
        options["tool_name"] = name
    if given.get("parallel_tool_calls") is False and (options or choice):
        options["single_call"] = True
        options.setdefault("tool_choice", "auto" if "tool_name" not in options else "required")
    return options


def tools_of(tools: list[dict[str, Any]]) -> tuple[Tool, ...]:
    """The functions that the tables have read. Raises InvalidArgumentError, which names what cannot be used."""
    read = read_tools(
        [{name: one for name, one in tool.get("function", tool).items() if name != "type"} for tool in tools]
    )
    check_tools(read)
    return read


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
