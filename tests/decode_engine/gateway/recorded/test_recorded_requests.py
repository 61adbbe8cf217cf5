"""Requests as clients send them and send back what they were told: served, and what changes nothing is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from decode_engine.gateway.serving import HttpPort
from index_store.store.catalog import Store
from prefill_worker.config import WorkerConfig
from prefill_worker.worker.queue_worker import QueueWorker
from tests.decode_engine.conftest import CALLING, make_library
from tests.decode_engine.gateway.test_tools import made
from tests.support.serving.front import both_of
from tests.support.serving.service import loaded
from tests.support.serving.workers import working

RECORDED: dict[str, Any] = {
    name: recorded
    for file in sorted(Path(__file__).parent.glob("*.json"))
    for name, recorded in json.loads(file.read_text()).items()
}
LATE_SYSTEMS = CALLING.replace("message.role != 'system'", "message.role != 'system' or not loop.first")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[HttpPort]:
    """In front of a model with tools, whose template says messages of a system wherever they stand."""
    library = make_library(tmp_path_factory.mktemp("recorded"))
    settings = json.loads((library.model / "tokenizer_config.json").read_text())
    settings["chat_template"] = LATE_SYSTEMS
    (library.model / "tokenizer_config.json").write_text(json.dumps(settings))
    Store(library.store, create=True)
    worker = QueueWorker(WorkerConfig(store=library.store, model=str(library.model), device="cpu"))
    with (
        loaded(library.config()) as started,
        working(worker),
        both_of(started, pytestconfig) as (_, served),
    ):
        yield served


def begun(body: dict[str, Any]) -> dict[str, Any]:
    """A context that the request continues."""
    if "prompt" in body:
        return {"text": body["prompt"][0][:300]}
    said = {"role": "system", "content": body["instructions"]} if "instructions" in body else None
    first = said or next(iter(body.get("messages") or body["input"]))
    return {"messages": [first], "tools": body.get("tools", [])}


@pytest.mark.parametrize("client", RECORDED)
def test_what_clients_send_is_served(web: httpx.Client, client: str) -> None:
    recorded = RECORDED[client]
    body = recorded["body"]
    context = made(web, **begun(body))
    reply = web.post(recorded["path"], json=body)
    assert reply.status_code == 200, reply.text
    told = [name for name in reply.headers.get("x-sparsekv-taken", "").split(", ") if name]
    assert sorted(told) == sorted(recorded["taken"])
    texts = reply.text.split("\n\n") if body.get("stream") else [f"data: {reply.text}"]
    events = [json.loads(text.partition("data: ")[2]) for text in texts if "data: {" in text]
    assert not any("error" in event and event["error"] for event in events)
    if recorded["path"] == "/v1/responses" and body["stream"]:
        for number, event in enumerate(events):
            assert TypeAdapter(ResponseStreamEvent).validate_python(event).sequence_number == number
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert events[-1]["response"]["instructions"] == body.get("instructions")
    if not body.get("stream"):
        usage = events[0]["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        assert details["cached_tokens"] == context["token_count"]
