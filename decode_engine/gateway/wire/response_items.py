"""Items of /v1/responses: read as messages, and functions written back as it spells them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from decode_engine.gateway.wire.messages_shape import MESSAGE, PART, called
from decode_engine.gateway.wire.parameters import CONTENT, JSON_TEXT, Members, Parameter, Variants
from decode_engine.orders.kinds import ANY, OBJECT, TEXT
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
_OTHERS_CALL = Members(
    "an item that calls a tool of another service",
    (
        _CALL_ID,
        Parameter("action", OBJECT, "What was to be done."),
        Parameter("operation", OBJECT, "The same of a patch."),
    ),
    others_taken=True,
)
_OTHERS_OUTPUT = Members(
    "an item that such a call gave",
    (_CALL_ID, Parameter("output", ANY, "What it gave, said as JSON where it is no text.")),
    others_taken=True,
)
_OTHERS_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
_OTHERS_OUTPUTS = tuple(f"{call}_output" for call in _OTHERS_CALLS)
_ENCRYPTED = "what it stands for cannot be read here; send the items themselves"
_LEFT_OUT = "taken: what was thought or found before an earlier answer is not repeated"
ITEM = Variants(
    "type",
    {
        "message": MESSAGE,
        **dict.fromkeys(("function_call", "custom_tool_call"), _CALL),
        **dict.fromkeys(("function_call_output", "custom_tool_call_output"), _OUTPUT),
        **dict.fromkeys(_OTHERS_CALLS, _OTHERS_CALL),
        **dict.fromkeys(_OTHERS_OUTPUTS, _OTHERS_OUTPUT),
        **dict.fromkeys(("compaction", "compaction_summary"), _ENCRYPTED),
        **dict.fromkeys(
            (
                *(
                    "reasoning",
                    "web_search_call",
                    "file_search_call",
                    "code_interpreter_call",
                    "mcp_list_tools",
                ),
                *("mcp_approval_request", "mcp_approval_response", "tool_search_call", "tool_search_output"),
                "ghost_snapshot",
            ),
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
            call = called(item)
            if item["type"] in _OTHERS_CALLS:
                done = item.get("action", item.get("operation", {}))
                call = {"name": item["type"].removesuffix("_call"), "arguments": done}
            calls.append({**call, "id": item["call_id"]})
            continue
        places[here] = where
        if item["type"].endswith("_output"):
            places |= {f"{here}.content": f"{where}.output", f"{here}.tool_call_id": f"{where}.call_id"}
            gave = item.get("output", "")
            if item["type"] in _OTHERS_OUTPUTS and not isinstance(gave, str):
                gave = json.dumps(gave, ensure_ascii=False)
            said = {"role": "tool", "tool_call_id": item["call_id"], "content": gave}
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
