"""What the real server says about itself, how it admits requests by memory, and which RPCs it has."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from google.longrunning import operations_pb2
from typer.testing import CliRunner

from decode_engine.cli.command_line import commands
from decode_engine.cli.status_command import rate_lines, status_lines
from decode_engine.engine.session_memory import session_bytes
from decode_engine.errors import SessionMemoryError
from decode_engine.rpc.client import Client
from decode_engine.rpc.client.connection import REPEATED
from decode_engine.rpc.context_service import ContextService, OperationsService
from decode_engine.rpc.generation_service import GenerationService
from decode_engine.rpc.server import DecodeServer
from index_store.methods.presets import get_method
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import Library
from tests.support.serving.service import LONG, loaded, wait_until


def _need(server: DecodeServer, context: str, tokens: int) -> int:
    manifest = server.backend.store.manifest(context.removeprefix("contexts/"))
    return session_bytes(get_method("full").on(manifest), tokens)


def test_status_tells_what_runs_and_counts_what_was_fed(
    server: DecodeServer, client: Client, lamp: str
) -> None:
    wait_until(lambda: client.server_status().requests == 0)  # of other tests
    before = client.server_status()
    generation = client.generate(lamp, text="Who?", max_tokens=20, method="full")
    generation.read()
    wait_until(lambda: client.server_status().requests == 0)
    after = client.server_status()
    assert after.prompt_tokens - before.prompt_tokens == 4
    assert after.decode_tokens - before.decode_tokens == after.decode_steps - before.decode_steps == 19
    assert after.steps - before.steps >= 19
    assert (after.waiting, after.prompting, after.decoding, after.session_bytes) == (0, 0, 0, 0)
    assert (after.host_bytes_read, after.rows_reused, after.device_wait_for_host_ns) == (0, 0, 0)
    assert after.contexts >= 1
    assert after.context_loads >= 1
    assert 0 < after.context_bytes <= after.context_limit_bytes == 2**28
    assert after.session_limit_bytes > 2**20
    with client.generate(lamp, text="Who?", max_tokens=LONG, temperature=1.0, seed=1, method="full") as long:
        pieces = iter(long)
        for _ in range(3):  # the first comes from the prompt, the second before its step is counted
            next(pieces)
        status = client.server_status()
        assert (status.requests, status.decoding, status.decode_batch) == (1, 1, 1)
        assert status.session_bytes == _need(server, lamp, 4 + LONG)
        assert status.context_used_bytes > 0
    assert status.mean_batch >= 1


def test_requests_wait_for_memory_and_those_that_never_fit_are_refused(
    server: DecodeServer, library: Library, lamp: str
) -> None:
    limit = _need(server, lamp, LONG + 4) * 3 // 2
    config = library.config(session_memory=limit)
    with loaded(config) as small, Client(small.address) as client:
        with client.generate(lamp, text="Who?", max_tokens=LONG, method="full") as running:
            next(iter(running))
            waiting = client.generate(lamp, text="Who?", max_tokens=LONG, method="full")
            wait_until(lambda: client.server_status().waiting == 1)
            status = client.server_status()
            assert (status.decoding, status.session_limit_bytes) == (1, limit)
            assert status.session_bytes <= limit
            running.cancel()
            next(iter(waiting))
            waiting.cancel()
        ask = {"text": "Who?", "max_tokens": LONG, "method": "csattention"}
        with pytest.raises(SessionMemoryError, match="raise --session-memory") as caught:
            client.generate(lamp, **{**ask, "min_tokens": LONG}).read()
        assert int(caught.value.metadata["needed"]) > int(caught.value.metadata["limit"]) == limit
        with client.generate(lamp, **{**ask, "n": 2, "temperature": 1}) as cut:
            next(iter(cut))
            assert 0 < cut.usage.max_tokens < LONG
            assert limit * 0.8 < client.server_status().session_bytes <= limit
        assert client.server_status().context_loads == 1


def test_the_command_tells_what_the_server_tells(server: DecodeServer, client: Client, lamp: str) -> None:
    client.generate(lamp, text="Who?", max_tokens=3).read()
    wait_until(lambda: client.server_status().requests == 0)
    told = client.server_status()
    arguments = ["status", "--server", server.address]
    as_json = CliRunner().invoke(commands(), [*arguments, "--format", "json"])
    choices, reads = list(told.method_choices), list(told.template_reads)
    assert json.loads(as_json.stdout) == {
        **asdict(told),
        "mean_batch": told.mean_batch,
        "method_choices": choices,
        "template_reads": reads,
        **json.loads(json.dumps(asdict(client.tenants()))),
    }
    text = CliRunner().invoke(commands(), arguments).stdout
    assert "requests: 0 decoding, 0 reading their prompts, 0 waiting, 0 loading" in text
    assert f"{told.prompt_tokens} prompt tokens, {told.decode_tokens} decoded" in text


def test_what_was_moved_is_told_where_something_was(client: Client) -> None:
    status = replace(client.server_status(), host_bytes_read=3 * 2**20, rows_reused=17)
    assert "3 MiB read by the device, 17 rows found on it; requests waited 0 ms" in status_lines(status)[-1]
    assert not any("read by the device" in line for line in status_lines(client.server_status()))


def test_a_status_is_watched_until_interrupted(
    server: DecodeServer, client: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(seconds: float) -> None:
        """In place of the pause between two looks."""
        if looks:
            raise KeyboardInterrupt
        looks.append(seconds)
        client.generate(lamp, text="Who?", max_tokens=3, method="full").read()
        wait_until(lambda: client.server_status().requests == 0)

    for output in ("text", "json"):
        looks: list[float] = []
        monkeypatch.setattr("decode_engine.cli.status_command.sleep", ask)
        told = CliRunner().invoke(
            commands(), ["status", "--watch", "--server", server.address, "--format", output]
        )
        monkeypatch.undo()
        if output == "text":
            assert told.stdout.count("requests: 0 decoding") == 2
            assert told.stdout.count("in the last second: 2 tokens decoded, 4 of prompts read") == 1
        else:
            first, second = map(json.loads, told.stdout.splitlines())
            assert second["decode_tokens"] - first["decode_tokens"] == 2


def test_what_came_since_is_not_told_of_a_server_that_was_started_again(client: Client) -> None:
    status = client.server_status()
    assert rate_lines(status, replace(status, steps=status.steps + 1)) == rate_lines(status, None) == []


CHANGING = {"DeleteContext", "UploadDocument", "DeleteOperation"}
"""Calls that change something: nobody repeats them unasked."""

HANDLERS = {
    "ContextService": ContextService,
    "GenerationService": GenerationService,
    "Operations": OperationsService,
}
"""The class that answers the calls of each service."""

SERVICES = [
    descriptor
    for module in (context_pb2, generation_pb2, operations_pb2)
    for descriptor in module.DESCRIPTOR.services_by_name.values()
]


def test_every_rpc_has_a_handler() -> None:
    missing = [
        method.full_name
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in vars(HANDLERS[descriptor.name])
    ]
    assert missing == []


def test_every_rpc_is_repeated_or_known_to_change_something() -> None:
    expected = {
        method.name
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in CHANGING and not method.server_streaming
    }
    assert expected == REPEATED
