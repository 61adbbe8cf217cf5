"""Tools over the wire: calls forced, free or refused; conversations without a context; children of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from decode_engine.rpc.client import Client, calls_of
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError
from index_store.models.conversation.messages import Conversation, Message, Role, Tool
from tests.decode_engine.conftest import TEXT, Library

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
def client(tool_server: DecodeServer) -> Iterator[Client]:
    with Client(tool_server.address) as connected:
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


def test_a_named_tool_is_called(client: Client, talk: str) -> None:
    text, (call,), reason = answered(client, talk, tool_name="look")
    assert (text, call.name, len(call.id), reason) == ("", "look", 9, "tool_calls")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


def test_some_tool_is_called(client: Client, talk: str) -> None:
    options = {"tool_choice": "required", "temperature": 1.5, "seed": 3, "n": 2, "single_call": True}
    with client.generate(talk, messages=ASKED, tools=TOOLS, max_tokens=120, **options) as generation:
        pieces = list(generation)
    assert {summary.finish_reason for summary in generation.summaries} == {"tool_calls"}
    for answer in range(2):
        (call,) = calls_of(piece for piece in pieces if piece.index == answer)
        assert call.name in {"look", "wait"}
        assert call.name == "look" or json.loads(call.arguments) == {}


def test_the_model_is_free_to_call(client: Client, talk: str) -> None:
    """Alone it says text; a bias has it say what calls begin with."""
    text, calls, reason = answered(client, talk, tool_choice="auto", max_tokens=8)
    assert (bool(text), calls, reason) == (True, (), "length")
    (mark,) = client.tokenize("~").ids
    text, (call,), reason = answered(client, talk, tools=TOOLS, logit_bias={mark: 100.0}, single_call=True)
    assert (text, call.name, reason) == ("", "look", "tool_calls") or call.name == "wait"
    if call.name == "look":
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    plain, none, _ = answered(
        client, talk, tools=TOOLS, logit_bias={mark: 100.0}, tool_choice="none", max_tokens=4
    )
    assert (plain, none) == ("~~~~", ())


def test_a_context_of_text_has_no_tools(client: Client, tool_library: Library) -> None:
    plain = "contexts/" + tool_library.prefill("plain")
    with pytest.raises(InvalidArgumentError, match="the model is told of them at the beginning"):
        answered(client, plain, tools=TOOLS)
    with pytest.raises(InvalidArgumentError, match="expected tools in the request"):
        answered(client, plain, tool_choice="required")


def test_a_model_without_words_for_tools_calls_them_when_it_has_to(
    client: Client, server: DecodeServer, lamp: str
) -> None:
    with Client(server.address) as plain:
        _, (call,), reason = answered(plain, lamp, tools=TOOLS, tool_name="look")
        assert (call.name, reason) == ("look", "tool_calls")
        with pytest.raises(InvalidArgumentError, match="knows no tools"):
            answered(plain, lamp, tools=TOOLS)
        assert answered(plain, lamp, tools=TOOLS, tool_choice="none", max_tokens=2)[2] == "length"


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


def test_what_cannot_continue_is_refused(client: Client, talk: str) -> None:
    with pytest.raises(InvalidArgumentError, match="whose indexes the context has"):
        client.create_context(" more", parent=talk, methods=["full"])
    with pytest.raises(InvalidArgumentError, match="have its tools"):
        client.create_context(messages=Conversation(ASKED, TOOLS), parent=talk)
    with pytest.raises(InvalidArgumentError, match="labels key"):
        client.create_context("text", labels={"Team": "x"})
    text = client.create_context(" And so it went on.", parent=talk).result()
    assert (text.parent, text.is_conversation) == (talk, False)
    with pytest.raises(InvalidArgumentError, match="was made of messages"):
        client.create_context(messages=ASKED, parent=text.name)
