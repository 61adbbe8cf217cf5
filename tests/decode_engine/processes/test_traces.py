"""A trace through all processes of a server, as a collector writes it: door, engine, worker."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import httpx
import pytest

from index_store.cli.traces import open_traces, trace_id
from index_store.errors import InvalidArgumentError
from sparsekv.v1 import generation_pb2, generation_pb2_grpc
from tests.decode_engine.conftest import make_library
from tests.support.serving.collector import Collector, Told, collecting
from tests.support.serving.serve_process import Server, serving
from tests.support.serving.service import wait_until

SERVER, CONSUMER = 2, 5
PARTS = ["load", "queue", "prompt", "decode"]


def header(trace: str) -> str:
    return f"00-{trace * 32}-{'7' * 16}-01"


@dataclass(frozen=True)
class Traced:
    """A server that was asked a few things, and what the collector got."""

    server: Server
    url: str
    model: str
    collector: Collector
    prefill: Told


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    library = make_library(folder)
    with collecting(folder) as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with serving(library, "--no-warm-up", "--doors", "1", "--prefill") as server:
            ready = server.wait_until_served()
            document = {
                "display_name": "lamp",
                "text": "The lamp was lit by a keeper. " * 20,
                "methods": ["csattention"],
            }
            with httpx.Client(base_url=ready["url"], timeout=120) as web:
                made = web.post("/v1/contexts", json=document, headers={"traceparent": header("a")})
                assert made.status_code in (200, 202), made.text

                def prefills() -> list[Told]:
                    return [
                        span
                        for span in collector.spans("a" * 32)
                        if span.name == f"prefill {library.model.name}"
                    ]

                wait_until(lambda: bool(prefills()))
                (prefill,) = prefills()
                asked = {
                    "model": library.model.name,
                    "context": "lamp",
                    "messages": [{"role": "user", "content": "Who?"}],
                    "max_tokens": 3,
                    "temperature": 0,
                }
                web.post(
                    "/v1/chat/completions", json=asked, headers={"traceparent": header("b")}
                ).raise_for_status()
            with grpc.insecure_channel(ready["address"]) as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                request = generation_pb2.GenerateRequest(text="Who?", max_tokens=4, n=2, temperature=1)
                assert list(stub.Generate(request, metadata=(("traceparent", header("c")),)))
            yield Traced(server, ready["url"], library.model.name, collector, prefill)


def spans(traced: Traced, trace: str, count: int) -> list[Told]:
    wait_until(lambda: len(traced.collector.spans(trace * 32)) >= count)
    found = traced.collector.spans(trace * 32)
    assert len(found) == count, found
    return found


def check_order(door: Told, engine: Told, parts: list[Told]) -> None:
    """Parts follow each other without a gap, inside the engine's, and that inside the door's."""
    assert door.start <= engine.start == parts[0].start
    assert all(before.end == after.start for before, after in itertools.pairwise(parts))
    assert parts[-1].end <= engine.end <= door.end


def test_a_chat_is_followed_from_http_to_its_last_step(traced: Traced) -> None:
    found = spans(traced, "b", 6)
    by_name = {span.name: span for span in found}
    door, engine = by_name["POST /v1/chat/completions"], by_name[f"chat {traced.model}"]
    parts = [by_name[name] for name in PARTS]
    assert (door.parent, door.kind, engine.parent) == ("7" * 16, SERVER, door.id)
    assert {part.parent for part in parts} == {engine.id}
    assert {part.pid for part in parts} == {engine.pid} != {door.pid}
    check_order(door, engine, parts)
    assert parts[-1].end == engine.end
    assert door.attributes["http.route"] == "/v1/chat/completions"
    assert door.attributes["sparsekv.status"] == 200
    told = engine.attributes
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("chat", traced.model)
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 3)
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] > told["gen_ai.usage.cache_read.input_tokens"] > 100
    assert (told["sparsekv.lookup"], told["sparsekv.tier"]) == ("named", "disk")
    assert parts[-1].attributes["sparsekv.decode_steps"] == 2
    assert not any(span.failed for span in found)


def test_it_is_linked_to_the_prefill_of_its_context(traced: Traced) -> None:
    (engine,) = (span for span in spans(traced, "b", 6) if span.name.startswith("chat "))
    assert engine.links == [("a" * 32, traced.prefill.id)]
    assert engine.attributes["sparsekv.context"] == traced.prefill.attributes["sparsekv.context"]


def test_a_job_is_followed_from_its_order_to_the_worker(traced: Traced) -> None:
    found = spans(traced, "a", 6)
    by_name = {span.name: span for span in found}
    door, waiting = by_name["POST /v1/contexts"], by_name["queue"]
    parts = [by_name[name] for name in ("reading", "indexing", "verifying")]
    assert {traced.prefill.parent, waiting.parent} == {door.id}
    assert {part.parent for part in parts} == {traced.prefill.id}
    assert traced.prefill.kind == CONSUMER
    assert traced.prefill.pid != door.pid
    assert door.start <= waiting.start <= waiting.end
    assert abs(waiting.end - traced.prefill.start) < 1e6  # each has looked at the clock for itself
    assert traced.prefill.start <= parts[0].start
    assert parts[0].start <= parts[1].start <= parts[2].start <= parts[2].end <= traced.prefill.end


def test_answers_over_grpc_decode_side_by_side(traced: Traced) -> None:
    found = spans(traced, "c", 7)
    (door,) = (span for span in found if span.kind == SERVER)
    (engine,) = (span for span in found if span.parent == door.id)
    assert (door.name, door.parent) == ("sparsekv.v1.GenerationService/Generate", "7" * 16)
    assert engine.name == f"text_completion {traced.model}"
    assert (engine.links, engine.attributes["gen_ai.usage.output_tokens"]) == ([], 8)
    for answer in (0, 1):
        parts = [span for span in found if span.attributes.get("sparsekv.answer", answer) == answer]
        check_order(door, engine, [next(part for part in parts if part.name == name) for name in PARTS])


def test_a_request_that_fails_says_why(traced: Traced) -> None:
    asked = {"model": traced.model, "prompt": "Who?", "method": "csattention", "max_tokens": 3}
    refused = httpx.post(
        f"{traced.url}/v1/completions", json=asked, headers={"traceparent": header("d")}, timeout=60
    )
    assert refused.status_code == 400
    door, engine = spans(traced, "d", 2)
    assert (engine.failed, engine.attributes["error.type"]) == (True, "METHOD_UNSUPPORTED")
    assert not door.failed  # the client's own fault


def test_logs_name_the_trace(traced: Traced) -> None:
    def lines() -> list[str]:
        return [line["trace_id"] for line in traced.server.logs if "trace_id" in line]

    wait_until(lambda: {"a" * 32, "b" * 32, "c" * 32} <= set(lines()))


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (header("a"), "a" * 32),
        (header("0"), ""),
        (f"ff-{'a' * 32}-{'7' * 16}-01", ""),
        (f"00-{'a' * 32}-{'0' * 16}-01", ""),
        ("00-a", ""),
        (None, ""),
    ],
)
def test_what_is_no_header_names_no_trace(told: str | None, expected: str) -> None:
    assert trace_id(told) == expected


def test_without_a_collector_nothing_is_made_or_imported() -> None:
    code = (
        "import sys; from index_store.cli.traces import open_traces; "
        "print(open_traces(), 'opentelemetry' in sys.modules)"
    )
    told = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    for more in ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_SDK_DISABLED": "true"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**told, **more}, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["None", "False"]


def test_what_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidArgumentError, match=r"pip install 'sparsekv\[traces\]'"):
        open_traces()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(
        InvalidArgumentError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', expected http/protobuf"
    ):
        open_traces()
