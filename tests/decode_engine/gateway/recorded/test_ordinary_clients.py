"""Questions, tools, formats, turns, errors and an orchestrator, by clients that people have, on one server."""

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
from decode_engine.settings.config import ServeConfig
from index_store.store.catalog import Store
from prefill_worker.config import WorkerConfig
from prefill_worker.worker.queue_worker import QueueWorker
from tests.decode_engine.conftest import CALLING, make_library
from tests.decode_engine.gateway.recorded.clients import (
    ASSISTANT,
    CLIENTS,
    PARAMETERS,
    SYSTEM,
    USER,
    Said,
    Talks,
    schema,
)
from tests.decode_engine.gateway.test_tools import made
from tests.support.serving.front import both_of
from tests.support.serving.serve_process import Server
from tests.support.serving.service import loaded
from tests.support.serving.workers import working

NOTES = "The harbour of Elm is grey. Its lamp is lit by the keeper Anna every evening. Ships come from Oslo. "


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[str]:
    """Of a server of the packaged reader, with notes."""
    store = tmp_path_factory.mktemp("clients") / "store"
    Store(store, create=True)
    config = ServeConfig(store, "reader", listen="127.0.0.1:0", device="cpu", warm_up=False, method="context")
    worker = QueueWorker(WorkerConfig(store=store, model="reader", device="cpu"))
    with loaded(config) as server, working(worker), both_of(server, pytestconfig) as (_, gateway):
        with httpx.Client(base_url=gateway.url, timeout=60) as web:
            made(web, text=NOTES * 4, display_name="notes")
        yield f"{gateway.url}/v1"


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.__name__)
def client(request: pytest.FixtureRequest, url: str) -> Talks:
    made_client: Talks = request.param(url)
    return made_client


QUESTION = (USER, "Who lights the lamp of Elm?")


def test_a_question_a_stream_and_a_system(client: Talks) -> None:
    alone = client.ask([QUESTION], stop="\n")
    assert alone
    assert client.stream([QUESTION], stop="\n").strip() == alone.strip()
    told = [(SYSTEM, "You answer from notes."), (SYSTEM, "Be brief."), QUESTION]
    assert client.ask(told, stop="\n")
    assert client.stream(told, stop="\n").strip() == client.ask(told, stop="\n").strip()


def test_a_tool_and_a_schema(client: Talks) -> None:
    name, arguments = client.call([(SYSTEM, "You note things down."), (USER, "How is the sea?")])
    assert name == "note_down"
    assert arguments["mood"] in ("calm", "stormy")
    answer = json.loads(
        client.ask([(USER, "How is the sea?")], response_format=schema(PARAMETERS), max_tokens=65535)
    )
    assert answer["mood"] in ("calm", "stormy")


def test_three_turns_and_an_empty_answer(client: Talks) -> None:
    said: Said = [(SYSTEM, "You answer from notes.")]
    for question in ("Who lights the lamp of Elm?", "Where do ships come from?", "What is grey?"):
        said.append((USER, question))
        said.append((ASSISTANT, client.ask(said, stop="\n")))
    assert len(said) == 7
    assert client.ask([*said[:2], (ASSISTANT, ""), (USER, "Who?")], stop="\n") is not None


def test_errors_say_what_to_do(client: Talks) -> None:
    assert "nowhere" in client.refusal([QUESTION], extra_body={"context": "nowhere"})
    assert "colour" in client.refusal([QUESTION], extra_body={"context": "notes", "colour": 1})
    assert "expected" in client.refusal([QUESTION], temperature=-1)


RECORDED: dict[str, Any] = {
    name: recorded
    for file in sorted(Path(__file__).parent.glob("*.json"))
    for name, recorded in json.loads(file.read_text()).items()
}
LATE_SYSTEMS = CALLING.replace("message.role != 'system'", "message.role != 'system' or not loop.first")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[HttpPort]:
    """In front of a model with tools, whose template says messages of a system wherever they stand."""
    library = make_library(tmp_path_factory.mktemp("recorded"), chat_template=LATE_SYSTEMS)
    with (
        loaded(library.config()) as started,
        working(library.worker()),
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


CODES = {"mill": "48213", "dairy": "70916", "forge": "35572"}
"""What each context says, by its name."""

WEATHER = "The harbour was grey that morning, and ships came in late from the north. People spoke little. "
ROUTES: Any = {
    "type": "object",
    "properties": {"context": {"enum": list(CODES)}},
    "required": ["context"],
    "additionalProperties": False,
}


class Served:
    """A server of its own process, which can be stopped and started again at the same address."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._start(0)

    def _start(self, port: int) -> None:
        options = ("--prefill", "--device", "cpu", "--no-warm-up", "--http-port", str(port))
        self._server = Server(self.store, "reader", *options)
        self.url = self._server.wait_until_served()["url"]

    def restart(self) -> None:
        self.stop()
        self._start(httpx.URL(self.url).port or 0)

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With three contexts."""
    server = Served(tmp_path_factory.mktemp("orchestrator") / "store")
    with httpx.Client(base_url=server.url, timeout=120) as web:
        for name, code in CODES.items():
            text = f"{WEATHER * 6}The access code of the {name} is {code}. {WEATHER * 6}"
            made(web, text=text, display_name=name)
    yield server
    server.stop()


def question(name: str) -> str:
    return f"What is the access code of the {name}?"


def orchestrate(client: Talks) -> Said:
    """Routes without a context, looks up in all three, notes by a tool, answers by JSON; its three turns."""
    routing = [(SYSTEM, "You say which notes are to be read."), (USER, question("dairy"))]
    route = json.loads(client.ask(routing, None, response_format=schema(ROUTES), max_tokens=65535))
    assert route["context"] in CODES
    for name, code in CODES.items():
        looking = [(SYSTEM, "You answer from notes."), (USER, question(name))]
        found = client.ask(looking, name, stop="\n")
        assert code in found
        assert client.stream(looking, name, stop="\n").strip() == found.strip()
    called, arguments = client.call([(SYSTEM, "You note things down."), (USER, "How is the sea?")], "mill")
    assert (called, arguments["mood"] in ("calm", "stormy")) == ("note_down", True)
    answer = json.loads(client.ask([(USER, "How is the sea?")], "forge", response_format=schema(PARAMETERS)))
    assert answer["mood"] in ("calm", "stormy")
    said: Said = [(SYSTEM, "You answer from notes.")]
    for name in CODES:
        said.append((USER, question(name)))
        said.append((ASSISTANT, client.ask(said, "dairy", stop="\n")))
    return said


@pytest.mark.nightly
def test_an_orchestrator_goes_on_after_a_restart(served: Served) -> None:
    """All clients are in the middle of their conversations when the server is told to stop."""
    clients: list[Talks] = [kind(f"{served.url}/v1") for kind in CLIENTS]
    begun = [orchestrate(client) for client in clients]
    for said in begun:
        assert said == begun[0]  # whoever asks, what is asked is the same
    assert CODES["dairy"] in begun[0][4][1]
    before = [client.ask(said[:-1], "dairy", stop="\n") for client, said in zip(clients, begun, strict=True)]
    served.restart()
    for client, said, answer in zip(clients, begun, before, strict=True):
        assert client.ask(said[:-1], "dairy", stop="\n") == answer == said[-1][1]
        assert CODES["mill"] in client.ask([*said, (USER, question("mill"))], "mill", stop="\n")
