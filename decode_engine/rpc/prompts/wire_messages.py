"""Messages of conversations, as the API has them and as values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from index_store.models.conversation.messages import Conversation, Message, Role, Tool, ToolCall, refused
from sparsekv.v1 import conversation_pb2


def parse_conversation(message: conversation_pb2.Conversation) -> Conversation:
    """A conversation of the API. Raises InvalidArgumentError, which names the part that cannot be used."""
    return Conversation(*parse_messages(message))


def parse_messages(
    message: conversation_pb2.Conversation,
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Its messages and tools. Whether they can be said is checked with what they follow."""
    return (
        tuple(_parse_message(number, item) for number, item in enumerate(message.messages)),
        tuple(Tool(tool.name, tool.description, tool.parameters_json, tool.strict) for tool in message.tools),
    )


def write_conversation(said: Sequence[Message] | Conversation) -> conversation_pb2.Conversation:
    """Messages, and tools where there are some, as the API has them. Raises as `write_messages` does."""
    if not isinstance(said, Conversation):
        return write_messages(said)
    return write_messages(said.messages, said.tools)


def write_messages(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> conversation_pb2.Conversation:
    """Messages and tools as the API has them.

    Raises InvalidArgumentError, which names the part that no request can carry.
    """
    written = conversation_pb2.Conversation()
    for number, tool in enumerate(tools):
        with _carried(f"tools[{number}]"):
            written.tools.add(
                name=tool.name,
                description=tool.description,
                parameters_json=tool.parameters,
                strict=tool.strict,
            )
    for number, message in enumerate(messages):
        with _carried(f"messages[{number}]"):
            calls = [
                conversation_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
                for call in message.tool_calls
            ]
            written.messages.add(
                role=message.role.name,
                content=message.content,
                name=message.name,
                tool_calls=calls,
                tool_call_id=message.tool_call_id,
            )
    return written


@contextmanager
def _carried(where: str) -> Iterator[None]:
    try:
        yield
    except UnicodeEncodeError as error:
        raise refused(
            where, f"half a character at {error.start} of a text", "text that can be written as UTF-8"
        ) from None


def _parse_message(number: int, message: conversation_pb2.Message) -> Message:
    roles = conversation_pb2.Message.Role
    if message.role == conversation_pb2.Message.ROLE_UNSPECIFIED or message.role not in roles.values():
        raise refused(f"messages[{number}].role", str(message.role), "one of SYSTEM, USER, ASSISTANT, TOOL")
    return Message(
        Role(roles.Name(message.role).lower()),
        message.content,
        message.name,
        tuple(ToolCall(call.name, call.arguments_json, call.id) for call in message.tool_calls),
        message.tool_call_id,
    )
