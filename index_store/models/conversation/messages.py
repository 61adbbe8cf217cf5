"""Messages and tools: what a conversation is made of, checked, and as JSON.

The JSON is that of chat services: a list of messages, or an object of `messages` and `tools`. Errors are
InvalidArgumentError and name the part (`messages[3].content`), what was found and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from index_store.errors import InvalidArgumentError

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128
MAX_NAME = 200
"""Characters of a name."""
MAX_ID = 65_536
"""Characters of an id by which a call is answered: some services put signatures there."""
MAX_JSON_DEPTH = 64
"""Objects and lists inside each other, in a tool's arguments and their schema."""


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool that the model asked for. arguments: a JSON object, or "" for one without members; of a call
    that was cut, as far as they came."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. name: of the speaker, or of the tool that answers; tool_call_id: of the call it answers."""

    role: Role
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. parameters: JSON schema of its arguments, an object, or "" for no arguments.

    strict: whether a call has to keep to it even where the model is free to call or not. It is no part of what the
    model is told, and of what is stored.
    """

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order, and the tools that the model may call. One that exists has been checked."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            raise refused("messages", f"{len(self.messages)} messages", f"1 to {MAX_MESSAGES}")
        for number, message in enumerate(self.messages):
            _check_message(f"messages[{number}]", message)
        check_tools(self.tools)

    def followed_by(self, new: Sequence[Message]) -> Conversation:
        """The conversation with further messages. Raises InvalidArgumentError for what no message is.

        Errors number the new messages from 0, as whoever sends them does.
        """
        if not new:
            raise refused("messages", "no messages", "at least one")
        for number, message in enumerate(new):
            _check_message(f"messages[{number}]", message)
        return Conversation((*self.messages, *new), self.tools)


def refused(field: str, found: str, expected: str) -> InvalidArgumentError:
    """The error of a part that is not what it must be."""
    return InvalidArgumentError(f"{field}: found {found}, expected {expected}", field=field)


def parse_object(field: str, text: str) -> dict[str, Any]:
    """A JSON object; one without members for no text. Raises InvalidArgumentError for anything else."""
    if not text:
        return {}
    _check_text(field, text)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise refused(field, f"no JSON ({str(error)[:200]})", "a JSON object") from None
    if not isinstance(value, dict):
        raise refused(field, f"JSON of type {type(value).__name__}", "a JSON object")
    if _depth(value) > MAX_JSON_DEPTH:
        raise refused(
            field, f"more than {MAX_JSON_DEPTH} objects or lists inside each other", "a flatter JSON object"
        )
    _check_text(field, json.dumps(value, ensure_ascii=False))  # an escape may stand for half a character
    return value


def read_conversation(document: object) -> Conversation:
    """A conversation from parsed JSON: a list of messages, or an object of `messages` and perhaps `tools`."""
    if isinstance(document, list):
        document = {"messages": document}
    if not isinstance(document, Mapping):
        raise refused(
            "the conversation", _kind(document), "a list of messages, or an object of messages and tools"
        )
    _check_members("the conversation", document, {"messages", "tools"})
    return Conversation(read_turns(document.get("messages")), read_tools(document.get("tools") or []))


def read_tools(items: object) -> tuple[Tool, ...]:
    """Tools from parsed JSON. Whether they can be called is checked with `check_tools`."""
    return tuple(_read_tool(f"tools[{number}]", item) for number, item in enumerate(_list("tools", items)))


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidArgumentError for tools that no model can be told of."""
    if len(tools) > MAX_TOOLS:
        raise refused("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    for number, tool in enumerate(tools):
        _check_name(f"tools[{number}].name", tool.name, least=1)
        _check_text(f"tools[{number}].description", tool.description)
        parse_object(f"tools[{number}].parameters", tool.parameters)
    names = [tool.name for tool in tools]
    if len(set(names)) != len(names):
        raise refused("tools", f"the names {', '.join(names)[:200]}", "different ones")


def read_turns(items: object) -> tuple[Message, ...]:
    """Messages from parsed JSON. Whether they can be said is checked with what they follow."""
    return tuple(
        _read_message(f"messages[{number}]", item) for number, item in enumerate(_list("messages", items))
    )


def conversation_object(conversation: Conversation) -> dict[str, Any]:
    """The JSON object that `read_conversation` makes the same conversation of."""
    return {
        "messages": [_message_object(message) for message in conversation.messages],
        "tools": [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in conversation.tools
        ],
    }


def _message_object(message: Message) -> dict[str, Any]:
    calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    members = {
        "content": message.content,
        "name": message.name,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role.value, **{name: value for name, value in members.items() if value}}


def _check_message(where: str, message: Message) -> None:
    _check_text(f"{where}.content", message.content)
    _check_name(f"{where}.name", message.name)
    _check_name(f"{where}.tool_call_id", message.tool_call_id, most=MAX_ID)
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        raise refused(f"{where}.tool_calls", f"{len(message.tool_calls)} calls", f"at most {MAX_TOOL_CALLS}")
    for number, call in enumerate(message.tool_calls):
        _check_name(f"{where}.tool_calls[{number}].name", call.name, least=1)
        _check_name(f"{where}.tool_calls[{number}].id", call.id, most=MAX_ID)
        _check_text(f"{where}.tool_calls[{number}].arguments", call.arguments)
    if message.tool_calls and message.role is not Role.ASSISTANT:
        raise refused(f"{where}.tool_calls", f"a message of role {message.role}", "one of role assistant")
    if message.tool_call_id and message.role is not Role.TOOL:
        raise refused(f"{where}.tool_call_id", f"a message of role {message.role}", "one of role tool")


def _check_name(field: str, text: str, least: int = 0, most: int = MAX_NAME) -> None:
    if not least <= len(text) <= most or not text.isprintable():
        raise refused(field, ascii(text[:60]), f"{least} to {most} printable characters")


def _check_text(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise refused(
            field, f"half a character at {error.start}", "text that can be written as UTF-8"
        ) from None


def _depth(value: object, limit: int = MAX_JSON_DEPTH + 1) -> int:
    """How many objects and lists lie inside each other, as far as the limit."""
    if limit == 0 or not isinstance(value, dict | list):
        return 0
    items = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, limit - 1) for item in items), default=0)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_message(where: str, item: object) -> Message:
    members = _object(where, item)
    _check_members(where, members, {"role", "content", "name", "tool_calls", "tool_call_id"})
    role = _text(f"{where}.role", members.get("role"))
    if role not in set(Role):
        raise refused(f"{where}.role", ascii(role[:60]), f"one of {', '.join(Role)}")
    calls = _list(f"{where}.tool_calls", members.get("tool_calls") or [])
    return Message(
        Role(role),
        _text(f"{where}.content", members.get("content") or ""),
        _text(f"{where}.name", members.get("name") or ""),
        tuple(_read_call(f"{where}.tool_calls[{number}]", call) for number, call in enumerate(calls)),
        _text(f"{where}.tool_call_id", members.get("tool_call_id") or ""),
    )


def _read_call(where: str, item: object) -> ToolCall:
    members = _function(where, item, {"id"})
    _check_members(where, members, {"id", "name", "arguments"})
    return ToolCall(
        _text(f"{where}.name", members.get("name")),
        _said(members.get("arguments")),
        _text(f"{where}.id", members.get("id") or ""),
    )


def _read_tool(where: str, item: object) -> Tool:
    members = _function(where, item, set())
    _check_members(where, members, {"name", "description", "parameters", "strict"})
    strict = members.get("strict") or False
    if not isinstance(strict, bool):
        raise refused(f"{where}.strict", _kind(strict), "true or false")
    return Tool(
        _text(f"{where}.name", members.get("name")),
        _text(f"{where}.description", members.get("description") or ""),
        _json_text(f"{where}.parameters", members.get("parameters")),
        strict,
    )


def _function(where: str, item: object, outside: set[str]) -> Mapping[str, Any]:
    """The members of a tool or call, also where they lie in a member `function` beside a type."""
    members = _object(where, item)
    if "function" not in members:
        return members
    _check_members(where, members, {"type", "function", *outside})
    if members.get("type", "function") != "function":
        raise refused(f"{where}.type", ascii(members["type"])[:60], "function")
    kept = {name: members[name] for name in outside if name in members}
    return {**_object(f"{where}.function", members["function"]), **kept}


def _json_text(field: str, value: object) -> str:
    """JSON as text: what is an object already is written as one."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(_object(field, value), ensure_ascii=False)


def _said(arguments: object) -> str:
    """What a tool was called with, as text."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _object(field: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refused(field, _kind(value), "an object")
    return value


def _list(field: str, value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise refused(field, _kind(value), "a list")
    return value


def _text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise refused(field, _kind(value), "a text")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"


def _check_members(where: str, members: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(members) - known)
    if unknown:
        raise refused(where, f"a member {ascii(unknown[0])[:60]}", f"only {', '.join(sorted(known))}")
