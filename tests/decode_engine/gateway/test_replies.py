"""Replies are what OpenAI's own client takes them for, and what the document of OpenAPI says, which is complete."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import TypeAdapter

from decode_engine.gateway.app import ROUTES
from decode_engine.gateway.serving import Gateway
from decode_engine.gateway.wire.reply_structs import ChatChunk
from decode_engine.orders.fields import FIELDS
from decode_engine.rpc.client import Client
from index_store.models.conversation.messages import Message, Role
from tests.decode_engine.pins.recording import Case, read_cases

ASK: Any = {
    "model": "model",
    "messages": [{"role": "user", "content": "Who lit the lamp?"}],
    "temperature": 0,
    "max_tokens": 6,
    "extra_body": {"context": "lamp"},
}
KINDS: dict[str, tuple[Any, Any]] = {
    "POST /v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "POST /v1/completions": (Completion, Completion),
    "POST /v1/responses": (Response, ResponseStreamEvent),
    "GET /v1/models/model": (Model, None),
}
"""Types of whole replies, and of a stream's events."""
RECORDED = Path(__file__).parents[1] / "pins" / "recorded"
TAKEN = [
    pytest.param(case, id=f"{file.parent.name} {file.stem} {case.name}")
    for file in sorted(RECORDED.glob("*/*.jsonl"))
    for case in read_cases(file)
    if case.request.get("http") in KINDS and case.reply[0]["status"] == 200
]


adapter: Any = cache(TypeAdapter)


def valid(kind: Any, value: Any) -> Any:
    """The value as the official type reads it when it is strict about what it has to be."""
    return adapter(kind).validate_python(value.model_dump(warnings="error"))


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_recorded_is_what_the_official_types_say(case: Case) -> None:
    whole, event = KINDS[case.request["http"]]
    _, *lines = json.loads(json.dumps(case.reply).replace('"<time>"', "1"))
    for number, line in enumerate(lines):
        if "body" in line:
            adapter(whole).validate_python(line["body"], strict=True)
        elif line["data"] != "[DONE]":
            data = line["data"]
            if event is Completion:  # which wants a reason why it ended, though not all chunks have one
                data["choices"] = [{**each, "finish_reason": "stop"} for each in data["choices"]]
            if event is ResponseStreamEvent:
                data["sequence_number"] = number
            adapter(event).validate_python(data, strict=True)


def test_every_endpoint_explains_an_answer_where_that_is_wanted(official: openai.OpenAI, lamp: str) -> None:
    more = {"extra_body": {"context": "lamp", "explain": True}}
    whole = official.chat.completions.create(**(ASK | more))
    *_, last = official.chat.completions.create(**(ASK | more), stream=True)
    text = official.completions.create(model="model", prompt="Who?", max_tokens=2, **more)
    response = official.responses.create(model="model", input="Who?", max_output_tokens=2, **more)
    for reply in (whole, last, text, response):
        why = reply.model_extra["sparsekv"]["explanation"]
        assert (why["lookup"], why["context"]) == ("named", lamp.removeprefix("contexts/"))
        assert why["method_reason"]
        assert 0 < why["decode_ms"] < reply.model_extra["sparsekv"]["total_ms"]
    plain = official.chat.completions.create(**ASK)
    assert "explanation" not in plain.model_extra["sparsekv"]


def test_turns_are_sent_as_they_are(official: openai.OpenAI, client: Client, lamp: str) -> None:
    said = [("user", "Who lit the lamp?"), ("assistant", "The keeper."), ("user", "Why?")]
    turns = [Message(Role(role), text) for role, text in said]
    with client.generate(lamp, messages=turns, max_tokens=6) as generation:
        expected = generation.read()
    messages: Any = [{"role": role, "content": text} for role, text in said]
    reply = valid(ChatCompletion, official.chat.completions.create(**{**ASK, "messages": messages}))
    assert reply.choices[0].message.content == expected
    messages[1] |= {"refusal": None, "tool_calls": None, "annotations": []}  # as a reply has it
    messages[2]["content"] = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]
    assert official.chat.completions.create(**{**ASK, "messages": messages}).choices == reply.choices
    answered = official.responses.create(
        model="model", input=messages, max_output_tokens=6, temperature=0, extra_body={"context": "lamp"}
    )
    assert answered.output_text == expected


def test_it_is_valid_and_has_every_path(web: httpx.Client) -> None:
    found = web.get("/openapi.json").json()
    OpenAPIV31SpecValidator(found).validate()
    told = {(method, path) for path, operations in found["paths"].items() for method in operations}
    assert told == {
        (method.lower(), route.path_format)
        for route in ROUTES
        for method in (route.methods or set()) - {"HEAD"}
    }


@pytest.mark.parametrize(
    ("endpoint", "path"),
    [("chat", "/v1/chat/completions"), ("completions", "/v1/completions"), ("responses", "/v1/responses")],
)
def test_every_field_of_the_table_is_described(web: httpx.Client, endpoint: Any, path: str) -> None:
    body = web.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]
    properties = body["content"]["application/json"]["schema"]["properties"]
    for field in FIELDS:
        for name in field.names(endpoint):
            wanted = properties[name]["anyOf"][0]
            assert wanted == msgspec.json.decode(msgspec.json.encode(field.kind.schema))


def test_replies_and_chunks_are_what_it_says(web: httpx.Client, lamp: str) -> None:
    found = web.get("/openapi.json").json()
    body = {name: value for name, value in ASK.items() if name != "extra_body"} | {"context": "lamp"}
    reply = web.post("/v1/chat/completions", json=body)
    validator = jsonschema.Draft202012Validator({"$ref": "#/components/schemas/ChatReply", **found})
    validator.validate(reply.json())
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**reply.json(), "usage": {}})
    streamed = web.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    chunks = [text.removeprefix("data: ") for text in streamed if text.startswith("data: {")]
    assert len(chunks) > 2
    for chunk in chunks:
        msgspec.json.decode(chunk, type=ChatChunk, strict=True)


def tried(gateway: Gateway, examples: int, *, derandomize: bool) -> int:
    """Sends made-up requests to every path, to the model that is served and for few tokens. Returns how many."""
    import schemathesis
    from schemathesis.checks import not_a_server_error as fails
    from schemathesis.specs.openapi import checks

    asked = [
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    count = 0
    for found in schemathesis.openapi.from_url(f"{gateway.url}/openapi.json").get_all_operations():

        @settings(
            max_examples=examples,
            derandomize=derandomize,
            deadline=None,
            database=None,
            suppress_health_check=[*HealthCheck],
        )
        @given(case=found.ok().as_strategy())
        def ask(case: Any) -> None:
            nonlocal count
            if isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = "model"
                case.body.pop("max_completion_tokens", None)
                case.body["max_output_tokens" if "input" in case.body else "max_tokens"] = 2
            elif isinstance(case.body, dict):
                case.body.pop("stream", None)  # of a context, which nobody makes here
            reply = case.call_and_validate(checks=[fails, *asked], timeout=60)
            if reply.status_code == 202:
                httpx.post(f"{gateway.url}/v1/operations/{reply.json()['id']}/cancel")
            count += 1

        ask()
    return count


def test_made_up_requests_are_answered_as_it_says(gateway: Gateway, lamp: str) -> None:
    assert tried(gateway, 3, derandomize=True) >= len(ROUTES)


@pytest.mark.nightly
def test_many_made_up_requests_are_answered_as_it_says(gateway: Gateway, lamp: str) -> None:
    assert tried(gateway, 200, derandomize=False) >= 100 * len(ROUTES) // 2
