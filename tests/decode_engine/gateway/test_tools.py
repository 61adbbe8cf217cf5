"""Tools, contexts of messages, kept sessions and requests without a context, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.gateway.test_replies import valid

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["ship", "lamp"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "wait"}},
]
BEGUN: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The lamp of the red harbour was lit by a keeper who counted ships. " * 8},
    {"role": "assistant", "content": "I have read it."},
]
QUESTION: Any = {"role": "user", "content": "Who lit the lamp?"}
ASK: Any = {
    "model": "model",
    "messages": [QUESTION],
    "temperature": 0,
    "max_tokens": 120,
    "tools": TOOLS,
    "extra_body": {"context": "spoken"},
}
NAMED: Any = {"type": "function", "function": {"name": "look"}}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.fixture(scope="module")
def gateway(tool_server: DecodeServer) -> Iterator[Gateway]:
    """In front of a server that makes contexts itself, of a model with tools."""
    with Gateway("127.0.0.1:0", tool_server.grpc) as served:
        yield served


def made(web: httpx.Client, **body: Any) -> dict[str, Any]:
    """The context that an order comes to."""
    operation = web.post("/v1/contexts", json=body).json()
    while not operation["done"]:
        operation = web.get(f"/v1/operations/{operation['id']}").json()
    assert operation["error"] is None
    context: dict[str, Any] = operation["context"]
    return context


@pytest.fixture
def spoken(web: httpx.Client) -> dict[str, Any]:
    return made(web, messages=BEGUN, tools=TOOLS, display_name="spoken", labels={"team": "sea"})


def test_a_context_is_made_of_messages(web: httpx.Client, spoken: dict[str, Any]) -> None:
    assert (spoken["is_conversation"], spoken["labels"], spoken["owner"]) == (True, {"team": "sea"}, "")
    turns = [QUESTION, {"role": "assistant", "content": "A keeper."}]
    child = made(web, messages=turns, parent="spoken", display_name="longer")
    assert (child["parent"], child["parent_token_count"]) == (spoken["name"], spoken["token_count"])
    refused = web.post("/v1/contexts", json={"text": "a", "tools": TOOLS}).json()["error"]
    assert refused["param"] == "tools"


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["any", "named", "allowed"])
def test_calls_come_whole_and_in_pieces(official: openai.OpenAI, spoken: dict[str, Any], choice: Any) -> None:
    options = {**ASK, "tool_choice": choice, "parallel_tool_calls": False}
    reply = valid(ChatCompletion, official.chat.completions.create(**options))
    (choice_made,) = reply.choices
    (call,) = choice_made.message.tool_calls
    assert (choice_made.finish_reason, choice_made.message.content) == ("tool_calls", None)
    assert call.function.name == "look" or choice == "required"
    chunks = [
        valid(ChatCompletionChunk, chunk)
        for chunk in official.chat.completions.create(**options, stream=True)
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    assert {part.index for part in parts} == {0}
    assert [part.function.name for part in parts if part.id] == [call.function.name]
    arguments = "".join(part.function.arguments for part in parts)
    assert arguments == call.function.arguments
    assert "at" in json.loads(arguments) or call.function.name == "wait"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_an_agent_goes_on_with_what_its_tools_say(official: openai.OpenAI, spoken: dict[str, Any]) -> None:
    """Its history names no context: the stored one is found, as far as it goes."""
    history = [*BEGUN, QUESTION]
    options = {**ASK, "extra_body": {}}
    reply = official.chat.completions.create(**{**options, "messages": history, "tool_choice": NAMED})
    message = reply.choices[0].message
    assert reply.usage.prompt_tokens_details.cached_tokens == spoken["token_count"]
    history.append(message.model_dump(exclude_none=True))
    history += [
        {"role": "tool", "tool_call_id": call.id, "content": "The keeper."} for call in message.tool_calls
    ]
    last = {**options, "messages": history, "max_tokens": 4}
    reply = official.chat.completions.create(**last)
    assert (reply.choices[0].finish_reason, reply.choices[0].message.tool_calls) == ("length", None)
    assert reply.usage.prompt_tokens_details.cached_tokens == spoken["token_count"]
