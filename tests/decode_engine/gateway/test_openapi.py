"""The OpenAPI document: valid by its own tool, complete, and true of a running server by made-up requests."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator

from decode_engine.gateway.app import ROUTES
from decode_engine.gateway.serving import Gateway
from decode_engine.gateway.wire.reply_structs import ChatChunk
from decode_engine.orders.fields import FIELDS
from tests.decode_engine.gateway.test_replies import ASK


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
