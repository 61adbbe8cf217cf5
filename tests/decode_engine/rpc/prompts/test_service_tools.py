"""Tools over the wire: calls forced, free or refused; conversations without a context; children of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.server import DecodeServer
from index_store.models.conversation.messages import Conversation, Message, Role, Tool
from tests.decode_engine.conftest import TEXT
from tests.support.serving.front import grpc_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"deep": {"type": "boolean"}, "at": {"enum": ["ship", "lamp"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS = (Tool("look", "Looks.", json.dumps(SCHEMA), strict=True), Tool("wait"))
ASKED = (Message(Role.USER, "Who lit it?"),)
BEGUN = (
    Message(Role.SYSTEM, "Be kind."),
    Message(Role.USER, TEXT),
    Message(Role.ASSISTANT, "I have read it."),
)


@pytest.fixture(scope="module")
def client(tool_server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[Client]:
    with grpc_of(tool_server, pytestconfig) as address, Client(address) as connected:
        yield connected


@pytest.fixture(scope="module")
def talk(client: Client) -> str:
    """A context of messages and tools."""
    made = client.create_context(messages=Conversation(BEGUN, TOOLS), display_name="talk")
    return made.result().name


def answered(client: Client, context: str, **options: Any) -> tuple[str, Any, str]:
    """What the model says, its calls, and why it ended."""
    with client.generate(context, **{"messages": ASKED, "max_tokens": 120, **options}) as generation:
        text = generation.read()
    return text, generation.tool_calls, generation.summary.finish_reason


def test_messages_without_a_context_continue_the_longest_that_they_begin_with(
    client: Client, talk: str
) -> None:
    stored = client.get_context(talk).token_count
    whole, options = (*BEGUN, *ASKED), {"method": "full", "max_tokens": 6}
    with client.generate("", messages=whole, tools=TOOLS, tool_choice="none", **options) as generation:
        found = generation.read()
    assert generation.summary.cached_tokens == generation.summary.context_tokens == stored
    assert found == answered(client, talk, **options)[0]
    for other in ((Message(Role.USER, "Who?"), *whole[1:]), ASKED):
        with client.generate(messages=other, tools=TOOLS, tool_choice="none", **options) as generation:
            generation.read()
        assert generation.summary.context_tokens < stored


def test_a_child_of_messages_is_a_conversation(client: Client, talk: str) -> None:
    """It answers as a context of all messages, and a child of the child has both."""
    first = (Message(Role.USER, "Who?"), Message(Role.ASSISTANT, "A keeper."))
    second = (Message(Role.USER, "Why?"), Message(Role.ASSISTANT, "So."))
    child = client.create_context(messages=first, parent=talk, labels={"turn": "1"}).result()
    again = client.create_context(messages=first, parent=talk, display_name="again", labels={"more": "x"})
    assert again.context_name == child.name
    assert again.result().labels == {"turn": "1", "more": "x"}
    last = client.create_context(messages=second, parent=child.name).result()
    assert (child.parent, last.parent, last.is_conversation) == (talk, talk, True)
    whole = client.create_context(messages=Conversation((*BEGUN, *first, *second), TOOLS)).result()
    assert last.token_count == whole.token_count
    assert last.kv_bytes < whole.kv_bytes
    answers = {answered(client, name, method="full", max_tokens=8)[0] for name in (last.name, whole.name)}
    assert len(answers) == 1
