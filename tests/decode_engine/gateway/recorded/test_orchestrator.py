"""One orchestrator by each client on one server: it routes, looks up in three contexts, calls, and goes on after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

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

CODES = {"mill": "48213", "dairy": "70916", "forge": "35572"}
"""What each context says, by its name."""

WEATHER = "The harbour was grey that morning, and ships came in late from the north. People spoke little. "
ROUTES: Any = {
    "type": "object",
    "properties": {"context": {"enum": list(CODES)}},
    "required": ["context"],
    "additionalProperties": False,
}


@dataclass
class Served:
    """A server of its own process, which can be stopped and started again at the same address."""

    store: Path
    port: int = 0
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "decode_engine", "serve", "--store", str(self.store)]
        command += [
            "--model",
            "reader",
            "--prefill",
            "--device",
            "cpu",
            "--no-warm-up",
            "--method",
            "context",
        ]
        command += ["--listen", "127.0.0.1:0", "--http-port", str(self.port), "--format", "json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ.copy())
        self.url = json.loads(self._process.stdout.readline())["url"]
        self.port = httpx.URL(self.url).port or 0

    def restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.communicate(timeout=120)
        assert self._process.returncode == 0


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
