"""Questions, tools, formats, turns and errors by clients that people have, on one server of the packaged reader."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from decode_engine.settings.config import ServeConfig
from index_store.store.catalog import Store
from prefill_worker.config import WorkerConfig
from prefill_worker.worker.queue_worker import QueueWorker
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
