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

from decode_engine.gateway.serving import HttpPort
from decode_engine.rpc.server import DecodeServer
from tests.decode_engine.gateway.test_replies import valid
from tests.support.serving.front import both_of


def document(name: str) -> str:
    """A text that no other test has."""
    return f"The keeper of the {name} lighthouse counted ships and wrote them down. " * 6


@pytest.fixture(scope="module")
def gateway(tool_server: DecodeServer, pytestconfig: pytest.Config) -> Iterator[HttpPort]:
    """In front of a server that makes contexts itself."""
    with both_of(tool_server, pytestconfig) as (_, served):
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
