"""Items of /v1/responses: read as messages, and functions written back as it spells them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from decode_engine.gateway.wire.messages_shape import MESSAGE, PART, called
from decode_engine.gateway.wire.parameters import CONTENT, JSON_TEXT, Members, Parameter, Variants
from decode_engine.orders.kinds import TEXT
from index_store.models.conversation.messages import Tool

_CALL_ID = Parameter("call_id", TEXT, "By which what it gave names it.", required=True)
_CALL = Members(
    "an item that calls",
    (
        _CALL_ID,
        Parameter("name", TEXT, "The function's name.", required=True),
        Parameter(
            "arguments", JSON_TEXT, "What it was called with; of a call that was cut, as far as it came."
        ),
        Parameter("input", TEXT, "The same of a tool without a schema."),
    ),
    others_taken=True,
)
_OUTPUT = Members(
    "an item that a call gave",
    (_CALL_ID, Parameter("output", CONTENT, "What it gave.", inside=PART)),
    others_taken=True,
)
_LEFT_OUT = "taken: what was thought or found before an earlier answer is not repeated"
ITEM = Variants(
    "type",
    {
        "message": MESSAGE,
        **dict.fromkeys(("function_call", "custom_tool_call"), _CALL),
        **dict.fromkeys(("function_call_output", "custom_tool_call_output"), _OUTPUT),
        **dict.fromkeys(
            ("reasoning", "web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools"),
            _LEFT_OUT,
        ),
        "item_reference": "nothing about requests is kept here; send the item itself",
    },
    usual="message",
)


def messages_of(items: list[dict[str, Any] | None]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Items that the tables have read as messages, and by the names of their parts what the client calls these.

    Calls become part of the message of the assistant before them.
    """
    messages: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for number, item in enumerate(items):
        where, here = f"input[{number}]", f"messages[{len(messages)}]"
        if item is None:
            continue
        if item["type"].endswith("_call"):
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant"})
                places[here] = where
            calls = messages[-1].setdefault("tool_calls", [])
            places[f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"] = where
            calls.append({**called(item), "id": item["call_id"]})
            continue
        places[here] = where
        if item["type"].endswith("_output"):
            places |= {f"{here}.content": f"{where}.output", f"{here}.tool_call_id": f"{where}.call_id"}
            said = {"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output", "")}
        else:
            said = item
        messages.append(said)
    return messages, places


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
