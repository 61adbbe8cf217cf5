"""Messages, items and tools as OpenAI's endpoints spell them, and as their clients send back what they were told.

What was said before is history: it is worded as it is or left out, and nobody checks whether it could be done again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from decode_engine.gateway.wire.parameters import (
    CONTENT,
    JSON_TEXT,
    OBJECTS,
    TOOLS,
    Members,
    Parameter,
    Variants,
    refused,
    taken,
)
from decode_engine.orders.fields import ANY, FLAG, OBJECT, TEXT, Kind
from decode_engine.orders.order import ToolChoice
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Message, Tool, check_tools, read_tools, read_turns

_ONLY_TEXT = "models here read and write text"
_THOUGHTS = "what was thought before an earlier answer is not repeated"
_MEDIA = (
    *(
        "image",
        "images",
        "image_url",
        "audio",
        "input_audio",
        "video",
        "videos",
        "file",
        "files",
        "documents",
    ),
    *("attachments", "experimental_attachments", "parts"),
)
"""Members that carry what is said elsewhere than in the content."""

TEXT_PART = Members(
    "a part of text",
    (
        Parameter("text", TEXT, "The text; parts follow each other without anything between them."),
        *(refused(name, _ONLY_TEXT) for name in _MEDIA),
    ),
    others_taken=True,
)
_REFUSAL_PART = Members(
    "a part that refuses", (Parameter("refusal", TEXT, "What was said."),), others_taken=True
)
_LEFT_OUT = f"taken: {_THOUGHTS}"
PART = Variants(
    "type",
    {
        **dict.fromkeys(("text", "input_text", "output_text", "summary_text"), TEXT_PART),
        "refusal": _REFUSAL_PART,
        **dict.fromkeys(("thinking", "redacted_thinking", "reasoning", "reasoning_text"), _LEFT_OUT),
        **dict.fromkeys(
            (
                *("image_url", "input_image", "image", "input_audio", "audio"),
                *("file", "input_file", "video_url"),
            ),
            f"{_ONLY_TEXT}; expected text",
        ),
    },
    usual="text",
)

_CALLED = (
    Parameter("name", TEXT, "The tool's name."),
    Parameter("arguments", JSON_TEXT, "What it was called with; of a call that was cut, as far as it came."),
    Parameter("input", TEXT, "The same of a tool without a schema."),
)
CALL = Members(
    "a call in a message",
    (
        Parameter("type", TEXT, "`function` or `custom`."),
        Parameter("id", TEXT, "By which the tool's answer names it."),
        Parameter("function", OBJECT, "What was called.", inside=Members("what was called", _CALLED, True)),
        Parameter(
            "custom",
            OBJECT,
            "The same of a tool without a schema.",
            inside=Members("what was called", _CALLED, True),
        ),
        *_CALLED[:2],
    ),
    others_taken=True,
)
_CONTENT = Parameter("content", CONTENT, "What is said.", inside=PART)
_NAME = Parameter("name", TEXT, "Of the speaker; taken where the model's template does not say it.")
_SAID = Members(
    "a message of a system, a developer or a user",
    (
        _CONTENT,
        _NAME,
        *(refused(name, _ONLY_TEXT) for name in _MEDIA),
        refused("tool_calls", "a message of an assistant has it"),
        refused("tool_call_id", "a message of a tool has it"),
    ),
    others_taken=True,
)
_ANSWERED = Members(
    "a message of an assistant",
    (
        _CONTENT,
        _NAME,
        Parameter("refusal", TEXT, "What was said instead of a content."),
        Parameter("tool_calls", OBJECTS, "Calls of tools that it made.", inside=CALL),
        Parameter(
            "function_call",
            OBJECT,
            "The older way to say a call.",
            inside=Members("what was called", _CALLED, True),
        ),
        *taken("reasoning_content reasoning reasoning_details thinking_blocks", _THOUGHTS),
    ),
    others_taken=True,
)
_GIVEN = Members(
    "a message of a tool",
    (
        _CONTENT,
        Parameter("tool_call_id", TEXT, "Which call it answers."),
        Parameter("name", TEXT, "Of the tool; templates name it, the call, or neither."),
    ),
    others_taken=True,
)
MESSAGE = Variants(
    "role",
    {
        **dict.fromkeys(("system", "developer", "user"), _SAID),
        "assistant": _ANSWERED,
        **dict.fromkeys(("tool", "function"), _GIVEN),
    },
)


def turns_of(messages: list[dict[str, Any]]) -> tuple[Message, ...]:
    """Messages that the tables have read. Raises InvalidArgumentError, which names the part that cannot be used."""
    return read_turns([_plain(message) for message in messages])


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its content as one text, and its calls in one spelling."""
    kept: dict[str, Any] = {name: message[name] for name in ("name", "tool_call_id") if name in message}
    role, calls = message["role"], list(message.get("tool_calls", ()))
    if "function_call" in message:
        calls.append(message["function_call"])
    if calls:
        kept["tool_calls"] = [called(call) for call in calls]
    said = message.get("content", message.get("refusal", ""))
    return {**kept, "role": "tool" if role == "function" else role, "content": text_of(said)}


def called(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function") or call.get("custom") or call
    arguments = inner.get("arguments", inner.get("input", ""))
    return {"id": call.get("id", ""), "name": inner.get("name", ""), "arguments": arguments}


def text_of(content: str | list[Any]) -> str:
    """The text of what the tables have read."""
    if isinstance(content, str):
        return content
    parts = (part for part in content if part is not None)
    return "".join(
        part if isinstance(part, str) else part.get("text", part.get("refusal", "")) for part in parts
    )


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
    refused("input_schema", "`parameters` takes its place"),
    refused("defer_loading", "the model is told of all tools at the beginning"),
)
FUNCTION = Members("a function", _FUNCTION)
_OFFERED = "taken: clients offer it by themselves, and the model, which is not told of it, never uses it"
TOOL = Variants(
    "type",
    {
        "function": Members(
            "a tool",
            (
                Parameter("function", OBJECT, "The function; or its members stand here.", inside=FUNCTION),
                *_FUNCTION,
            ),
        ),
        **dict.fromkeys(
            ("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11"),
            _OFFERED,
        ),
        "image_generation": _OFFERED,
        **dict.fromkeys(
            ("mcp", "file_search", "code_interpreter", "computer_use_preview", "namespace", "tool_search"),
            "the server calls nothing itself; give what can be called as functions",
        ),
        **dict.fromkeys(
            ("custom", "local_shell", "shell", "apply_patch"),
            "the model is told of functions alone; give it as one, with what it takes as an argument",
        ),
    },
    usual="function",
)


TOOL_CHOICE = Kind(
    "`none`, `auto`, `required`, a function by its name, or `allowed_tools`",
    Literal["none", "auto", "required"] | dict,
)
_CHOSEN = Parameter("name", TEXT, "The function's name.")
_FUNCTION_CHOSEN = Members(
    "a choice",
    (
        Parameter("function", OBJECT, "Which.", inside=Members("a function that is chosen", (_CHOSEN,))),
        _CHOSEN,
    ),
)
_ALLOWED = (
    Parameter("mode", Kind("`auto` or `required`", Literal["auto", "required"]), "Whether one is called."),
    Parameter(
        "tools",
        Kind("a list of functions by their names", TOOLS.type),
        "Those of the tools that may be called; the model is told of all.",
        inside=Variants("type", {"function": _FUNCTION_CHOSEN}, usual="function"),
    ),
)
CHOICE = Variants(
    "type",
    {
        "function": _FUNCTION_CHOSEN,
        "allowed_tools": Members(
            "a choice of several",
            (
                Parameter(
                    "allowed_tools", OBJECT, "Which.", inside=Members("tools that are allowed", _ALLOWED)
                ),
                *_ALLOWED,
            ),
        ),
        **dict.fromkeys(_WORDS, Members("a choice by a word", ())),
    },
    usual="function",
)


def choice_of(given: dict[str, Any]) -> ToolChoice:
    """Whether tools are called. Raises InvalidArgumentError."""
    choice, names = given.get("tool_choice"), list[str]()
    mode: Any = "auto" if any(given.get("tools", ())) else "none"
    if isinstance(choice, dict) and choice["type"] in _WORDS:
        choice = choice["type"]
    if isinstance(choice, str):
        mode = choice
    elif choice is not None:
        allowed = choice.get("allowed_tools", choice) if choice["type"] == "allowed_tools" else None
        chosen = [choice] if allowed is None else allowed.get("tools", [])
        mode = "required" if allowed is None else allowed.get("mode", "auto")
        names = [one.get("function", one).get("name", "") for one in chosen]
        if not names or "" in names:
            raise InvalidArgumentError(
                f"tool_choice names no function, expected {TOOL_CHOICE.shown}", field="tool_choice"
            )
        if allowed is None:
            return ToolChoice(mode, tuple(names), single=True)
    single = mode != "none" and given.get("parallel_tool_calls") is False
    return ToolChoice(mode, tuple(names), single)


def tools_of(tools: list[dict[str, Any] | None]) -> tuple[Tool, ...]:
    """The functions that the tables have read; None is a tool that they have left out.

    Raises InvalidArgumentError, which names what cannot be used.
    """
    read = read_tools(
        [
            {name: one for name, one in tool.get("function", tool).items() if name != "type"}
            for tool in tools
            if tool is not None
        ]
    )
    check_tools(read)
    return read


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
_FOUND_BEFORE = "taken: what was thought or found before an earlier answer is not repeated"
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
            _FOUND_BEFORE,
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
