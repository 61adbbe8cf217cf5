"""Contexts made over HTTP: from texts, tokens and files; progress, operations, listing, deletion."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import FileObject

from decode_engine.gateway.serving import Gateway
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.gateway.test_replies import valid


def document(name: str) -> str:
    """A text that no other test has."""
    return f"The keeper of the {name} lighthouse counted ships and wrote them down. " * 6


@pytest.fixture(scope="module")
def gateway(tool_server: DecodeServer) -> Iterator[Gateway]:
    """In front of a server that makes contexts itself."""
    with Gateway("127.0.0.1:0", tool_server.grpc) as served:
        yield served


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


def test_a_context_is_made_with_progress_asked_and_deleted(
    web: httpx.Client, official: openai.OpenAI
) -> None:
    told = events(web, {"text": document("red"), "display_name": "red", "stream": True})
    assert told[-1][1] == "[DONE]"
    progress = [operation for name, operation in told if name == "progress"]
    assert progress[-1]["done"]
    assert progress[-1]["tokens_done"] == progress[-1]["tokens_total"] > 0
    (context,) = [context for name, context in told if name == "context"]
    assert (context["display_name"], context["state"]) == ("red", "READY")
    assert web.get("/v1/contexts/red").json()["id"] == context["id"]
    assert context["id"] in {listed["id"] for listed in web.get("/v1/contexts").json()["data"]}
    reply = official.completions.create(model="model", prompt=" The", extra_body={"context": "red"})
    assert reply.usage.prompt_tokens_details.cached_tokens == context["token_count"]
    changes = {"display_name": "crimson", "labels": {"team": "sea"}, "expire_time": "2090-01-01T00:00:00Z"}
    changed = web.patch("/v1/contexts/red", json=changes).json()
    assert (changed["display_name"], changed["labels"]) == ("crimson", {"team": "sea"})
    assert changed["expire_time"].startswith("2090-01-01")
    (found,) = web.get("/v1/contexts", params={"filter": "labels.team = sea"}).json()["data"]
    assert found["id"] == context["id"]
    changed = web.patch("/v1/contexts/crimson", json={"ttl_seconds": 600}).json()
    assert changed["expire_time"] < "2090"
    restored = {"display_name": "red", "labels": {"team": None}, "expire_time": "never"}
    changed = web.patch("/v1/contexts/crimson", json=restored).json()
    assert (changed["labels"], changed["expire_time"]) == ({}, None)
    for wrong in ({"expire_time": "soon"}, {"colour": 1}, {"labels": {"a": 1}}, {}, {"labels": {}}):
        refused = web.patch("/v1/contexts/red", json=wrong)
        assert (refused.status_code, "update_mask" in refused.json()["error"]["message"]) == (400, False)
    until = "2090-01-01T00:00:00+00:00"
    continued = {"text": "And on.", "display_name": "pink", "parent": "red", "stream": True}
    told = events(web, {**continued, "expire_time": until})
    assert (told[-2][0], told[-2][1]["expire_time"] >= until) == ("context", True)
    refused = web.delete("/v1/contexts/red")
    assert (refused.status_code, "force in requests" in refused.json()["error"]["message"]) == (400, True)
    assert web.delete("/v1/contexts/red", params={"force": "yes"}).status_code == 400
    assert web.delete("/v1/contexts/red", params={"force": "true"}).json() == {
        "id": context["id"],
        "object": "context",
        "deleted": True,
    }
    gone = web.get("/v1/contexts/red")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "context_not_found")
    assert "index-store" not in gone.json()["error"]["message"]
    assert web.get("/v1/contexts/pink").status_code == 404


def test_a_file_becomes_a_context(web: httpx.Client, official: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "blue.txt"
    path.write_text(document("blue"))
    file = valid(FileObject, official.files.create(file=path, purpose="user_data"))
    assert (file.filename, file.bytes) == ("blue.txt", path.stat().st_size)
    told = events(web, {"file_id": file.id, "display_name": "blue", "stream": True})
    assert told[-2][0] == "context", told


def test_an_operation_can_be_followed_and_repeated(web: httpx.Client) -> None:
    body = {"text": document("green"), "request_id": "green-1"}
    begun = web.post("/v1/contexts", json=body)
    assert begun.status_code == 202
    operation = begun.json()
    assert web.post("/v1/contexts", json=body).json()["id"] == operation["id"]
    for _ in range(600):
        operation = web.get(f"/v1/operations/{operation['id']}").json()
        if operation["done"]:
            break
        web.get("/health")
    assert operation["context"]["state"] == "READY"
    assert operation["id"] in {listed["id"] for listed in web.get("/v1/operations").json()["data"]}
    assert web.post(f"/v1/operations/{operation['id']}/cancel").status_code == 200


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
