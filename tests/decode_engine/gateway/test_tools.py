"""Contexts that are made over HTTP of texts, tokens and files; tools, kept sessions and requests without a context."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import FileObject
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from decode_engine.gateway.serving import HttpPort
from decode_engine.gateway.wire.bodies import response_order
from decode_engine.gateway.wire.shapes import ResponseShape
from decode_engine.orders.events import Begins, Ends, Times
from decode_engine.rpc.answers.answering import Said, Summary
from decode_engine.rpc.server import DecodeServer
from index_store.models.conversation.call_syntax import CallPart
from sparsekv.v1.values import Usage
from tests.decode_engine.gateway.test_replies import valid
from tests.support.serving.front import both_of

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


@pytest.fixture(scope="module")
def gateway(tool_server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[HttpPort]:
    """In front of a server that makes contexts itself, of a model with tools."""
    with both_of(tool_server, pytestconfig) as (_, served):
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


FLAT_TOOLS: Any = [
    {"type": "function", "name": "look", "description": "Looks.", "parameters": PARAMETERS, "strict": None},
    {"type": "function", "name": "wait", "parameters": None, "strict": False},
]
FLAT_NAMED: Any = {"type": "function", "name": "look"}
RESPOND: Any = {
    "model": "model",
    "input": QUESTION["content"],
    "temperature": 0,
    "max_output_tokens": 120,
    "tools": FLAT_TOOLS,
    "extra_body": {"context": "spoken"},
}


def test_an_agent_goes_on_with_what_its_functions_say(
    official: openai.OpenAI, web: httpx.Client, spoken: dict[str, Any]
) -> None:
    """The items of one response are input of the next, which says what the same turns of chat completions say."""
    history: list[Any] = [*BEGUN, QUESTION]
    options = {**RESPOND, "extra_body": {}}
    reply = official.responses.create(**{**options, "input": history, "tool_choice": FLAT_NAMED})
    assert reply.usage.input_tokens_details.cached_tokens == spoken["token_count"]
    history += [item.model_dump() for item in reply.output]
    told = {"type": "function_call_output", "call_id": reply.output[0].call_id}
    parts = [{"type": "input_text", "text": "The "}, {"type": "input_text", "text": "keeper."}]
    history.append({**told, "output": parts})
    last = {**options, "input": history, "max_output_tokens": 4, "tool_choice": "none"}
    answer = official.responses.create(**last)
    assert answer.usage.input_tokens_details.cached_tokens == spoken["token_count"]
    assert official.responses.create(**last, stream=False).output_text == answer.output_text
    call = reply.output[0]
    called = {"id": call.call_id, "function": {"name": call.name, "arguments": call.arguments}}
    chat: Any = [
        *BEGUN,
        QUESTION,
        {"role": "assistant", "tool_calls": [{**called, "type": "function"}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "The keeper."},
    ]
    same = official.chat.completions.create(
        model="model",
        messages=chat,
        tools=TOOLS,
        tool_choice="none",
        temperature=0,
        max_tokens=4,
    )
    assert same.choices[0].message.content == answer.output_text
    assert same.usage.prompt_tokens == answer.usage.input_tokens


CALL = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
TOLD = {"type": "function_call_output", "call_id": "a", "output": "x"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "colour"}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}, {"type": "mcp", "server_url": "x"}]}, "tools[1]"),
        ({"tools": [{"type": "function", "name": "x", "colour": 1}]}, "tools[0].colour"),
        ({"tools": [{"type": "function", "name": "x", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": "look"}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "run"}}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": {"a": 1}}]}, "input[0].type"),
        ({"input": [{"role": "assistant", "content": "x", "tool_calls": "y"}, CALL]}, "input[0].tool_calls"),
        ({"input": [{**CALL, "arguments": 5}]}, "input[0].arguments"),
        ({"input": [QUESTION, {**CALL, "name": "x" * 300}, TOLD]}, "input[1].name"),
        ({"input": [QUESTION, CALL, {**TOLD, "output": [{"type": "input_image"}]}]}, "input[2].output[0]"),
        ({"input": [QUESTION, CALL, {**TOLD, "call_id": 5}]}, "input[2].call_id"),
    ],
)
def test_wrong_values_are_named(web: httpx.Client, spoken: dict[str, Any], changes: Any, param: str) -> None:
    body = {name: value for name, value in RESPOND.items() if name != "extra_body"}
    reply = web.post("/v1/responses", json={**body, "context": "spoken", **changes})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


CUT = Summary(
    "length",
    Usage(prompt_tokens=1, cached_tokens=5, max_tokens=9),
    Begins("", "full", 5, 1, 9),
    Ends(0, "length", 0, 0, Times(0, 0, 0, 0, 0, 0, 0), {}),
    before_ns=0,
)


def test_text_and_calls_are_items_of_their_own() -> None:
    """Text, two calls, and text again: what no test's model says by itself."""
    order = response_order({"model": "model", "input": "x", "tools": FLAT_TOOLS, "stream": True})
    shape = ResponseShape(order, lambda token: b"")
    parts = [CallPart(0, "a", "look", ""), CallPart(0, "", "", '{"at"'), CallPart(0, "", "", ":1}")]
    pieces = [
        *(Said(text="I "), Said(text="look.")),
        *(Said(calls=(part,)) for part in parts),
        Said(calls=(CallPart(1, "b", "wait", "{}"),)),
        Said(text="Done"),
    ]
    stream = shape.begin() + b"".join(map(shape.piece, pieces)) + shape.end([CUT])
    events = [json.loads(text.partition("data: ")[2]) for text in stream.decode().split("\n\n") if text]
    for number, event in enumerate(events):
        assert TypeAdapter(ResponseStreamEvent).validate_python(event).sequence_number == number
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in done] == [0, 1, 2, 3]
    reply = events[-1]["response"]
    assert (events[-1]["type"], reply["status"]) == ("response.incomplete", "incomplete")
    assert reply["output"] == [event["item"] for event in done]
    assert [item["status"] for item in reply["output"]] == ["completed"] * 3 + ["incomplete"]
    assert [item.get("arguments") for item in reply["output"]] == [None, '{"at":1}', "{}", None]
    assert [reply["output"][place]["content"][0]["text"] for place in (0, 3)] == ["I look.", "Done"]
    assert len({item["id"] for item in reply["output"]}) == 4


def document(name: str) -> str:
    """A text that no other test has."""
    return f"The keeper of the {name} lighthouse counted ships and wrote them down. " * 6


def events(web: httpx.Client, body: Any) -> list[tuple[str, Any]]:
    """What a stream of server-sent events says, by name."""
    found = []
    with web.stream("POST", "/v1/contexts", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.read()
        name = ""
        for line in reply.iter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                name = value
            elif kind == "data":
                found.append((name, value if value == "[DONE]" else json.loads(value)))
                name = ""
    return found


def test_a_file_becomes_a_context(web: httpx.Client, official: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "blue.txt"
    path.write_text(document("blue"))
    file = valid(FileObject, official.files.create(file=path, purpose="user_data"))
    assert (file.filename, file.bytes) == ("blue.txt", path.stat().st_size)
    told = events(web, {"file_id": file.id, "display_name": "blue", "stream": True})
    assert told[-2][0] == "context", told


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": b"text"}}, "purpose"),
        ({"files": {"file": b"text"}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"other": b"text"}, "data": {"purpose": "user_data"}}, "file"),
        ({"files": {"file": b"text"}, "data": {"purpose": "user_data", "more": "1"}}, "purpose"),
        ({"content": b"no form"}, "file"),
        ({"content": b"no form", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "file"),
    ],
)
def test_wrong_files_are_refused(web: httpx.Client, form: Any, param: str) -> None:
    reply = web.post("/v1/files", **form)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
