"""What requests that wait, are refused or fail are told, what the log says of them, and many at one moment."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from decode_engine.errors import CancelledError, TooManyRequestsError
from decode_engine.gateway.serving import http_door
from decode_engine.rpc.answers import answering
from decode_engine.rpc.client import AsyncClient, Client, Usage, Waiting
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.work import Appointments, BlockingWork
from index_store.errors import ContextCorruptError
from index_store.models.tokenizer import Tokenizer
from sparsekv.v1 import generation_pb2
from tests.decode_engine.conftest import MAX_POSITIONS, Library, Stubs
from tests.support.devices import nightly
from tests.support.serving.service import LONG, fails, loaded, wait_until


@pytest.fixture(scope="module")
def narrow_server(library: Library, lamp: str) -> Iterator[DecodeServer]:
    """A server for one request at a time; three more may wait, all of one client."""
    with loaded(library.config(max_sessions=1, max_waiting=3, max_client_requests=4)) as server:
        yield server


@pytest.fixture
def narrow(narrow_server: DecodeServer) -> Iterator[tuple[DecodeServer, Client]]:
    with Client(narrow_server.address) as client:
        yield narrow_server, client
    wait_until(lambda: narrow_server.backend.engine.places == 0)


def test_who_waits_is_told_how_many_are_ahead(
    narrow: tuple[DecodeServer, Client], lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "_FIRST_NOTICE_S", 0.0)
    monkeypatch.setattr(answering, "_NOTICE_S", 0.02)
    server, client = narrow
    engine = server.backend.engine
    told: list[Waiting] = []
    with client.generate(lamp, text="Who?", max_tokens=LONG) as running:
        next(iter(running))
        second = client.generate(lamp, text="Who?", max_tokens=2)
        wait_until(lambda: engine.stats().waiting == 1)
        third = client.generate(lamp, text="Who?", max_tokens=2, on_wait=told.append)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(third.read)
            wait_until(lambda: Waiting("session", 1) in told)
            assert (third.usage.prompt_tokens, third.usage.completion_tokens) == (4, 0)
            second.cancel()
            wait_until(lambda: Waiting("session", 0) in told)
            running.cancel()
            answer.result(60)
    assert third.summary.completion_tokens == 2


def test_usage_is_known_of_a_cancelled_generation(client: Client, lamp: str) -> None:
    generation = client.generate(lamp, text="Who?", max_tokens=LONG)
    assert generation.usage is None
    pieces = iter(generation)
    received = sum(len(next(pieces).token_ids) for _ in range(3))
    generation.cancel()
    with pytest.raises(CancelledError):
        received += sum(len(piece.token_ids) for piece in pieces)
    context = client.get_context(lamp)
    assert generation.usage == Usage(context.token_count, 4, received, context.token_count, LONG)


def test_the_refused_get_appointments_and_patient_clients_keep_them(
    narrow: tuple[DecodeServer, Client], lamp: str
) -> None:
    _, client = narrow
    running = [client.generate(lamp, text="Who?", max_tokens=LONG) for _ in range(4)]
    wait_until(lambda: client.server_status().requests == 4)
    with pytest.raises(TooManyRequestsError) as caught:
        client.generate(lamp, text="Who?", max_tokens=2).read()
    assert 0 < caught.value.retry_after_s <= 60
    patient = client.generate(lamp, text="Who?", max_tokens=2, patience_s=60)
    for generation in running:
        generation.cancel()
    patient.read()
    assert patient.summary.completion_tokens == 2


def test_one_client_cannot_have_all_places(library: Library, lamp: str) -> None:
    with loaded(library.config(max_client_requests=2)) as server, Client(server.address) as client:
        running = [client.generate(lamp, text="Who?", max_tokens=LONG) for _ in range(2)]
        wait_until(lambda: server.backend.engine.places == 2)
        with pytest.raises(TooManyRequestsError, match="limit for one client"):
            client.generate(lamp, text="Who?", max_tokens=2).read()
        assert client.server_status().requests == 2
        for generation in running:
            generation.cancel()
        patient = client.generate(lamp, text="Who?", max_tokens=2, patience_s=60)
        patient.read()
        assert patient.summary.completion_tokens == 2


def test_appointments_follow_each_other_as_fast_as_places_become_free() -> None:
    now = 0.0
    appointments = Appointments(lambda: now)
    for _ in range(100):
        now += 0.5
        appointments.place_freed()
    delays = [appointments.next_s() for _ in range(4)]
    assert delays == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.01)
    now += 100.0
    assert appointments.next_s() == pytest.approx(0.5, rel=0.01)
    assert max(appointments.next_s() for _ in range(1000)) == 60.0


def test_one_line_per_request_says_who_asked_what_and_what_it_took(
    client: Client, lamp: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        client.generate(lamp, text="Who?", max_tokens=5, method="full").read()
        wait_until(lambda: any(getattr(record, "rpc", "") == "Generate" for record in caplog.records))
    (record,) = [record for record in caplog.records if getattr(record, "rpc", "") == "Generate"]
    facts = vars(record)
    assert facts["peer"].startswith("ipv4:127.0.0.1:")
    assert (facts["context"], facts["method"]) == (lamp.removeprefix("contexts/"), "full")
    assert (facts["prompt_tokens"], facts["generated_tokens"]) == (4, 5)
    assert facts["cached_tokens"] == client.get_context(lamp).token_count
    assert facts["reason"] == "OK"
    assert 0 <= facts["queue_ms"] <= facts["first_token_ms"] <= facts["total_ms"] <= facts["milliseconds"]
    assert "method=full prompt_tokens=4" in record.getMessage()


def test_no_path_of_the_server_reaches_a_client(
    library: Library, client: Client, stubs: Stubs, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = library.prefill("pathless")
    manifest = library.store / "contexts" / id_ / "manifest.json"
    chunk = library.chunk(id_)
    chunk.unlink()
    with caplog.at_level(logging.INFO), pytest.raises(ContextCorruptError) as caught:
        client.generate(f"contexts/{id_}", text="x").read()
    seen = [caught.value.message, *caught.value.metadata.values()]
    manifest.write_text("{")
    seen.append(client.get_context(f"contexts/{id_}").state_message)
    assert all(str(library.store) not in text and str(library.store.parent) not in text for text in seen)
    assert str(library.store) in caplog.text  # the log is for who runs the server
    client.delete_context(f"contexts/{id_}")


def test_threads_do_not_stay_after_a_rush(server: DecodeServer, client: Client, lamp: str) -> None:
    client.generate(lamp, text="Who?", max_tokens=2).read()

    def threads() -> int:
        """But for those that wait to read files, of which a few are kept (`read_bounded`)."""
        return sum(thread.name != "read" for thread in threading.enumerate())

    before = threads()
    with ThreadPoolExecutor(20) as pool:
        texts = list(pool.map(lambda _: client.generate(lamp, text="Who?", max_tokens=20).read(), range(20)))
        assert len(set(texts)) == 1
    wait_until(lambda: threads() <= before + 1)


def test_the_prompt_is_bounded_before_it_is_cut(
    stubs: Stubs, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text: (cut.append(len(text)), encode(self, text))[1]
    )
    for prompt in (
        {"text": "word " * 1_600_000},
        {"question": "x\n" * 3_900_000},
        {"token_ids": generation_pb2.TokenIds(ids=range(1, 2_000_000))},
    ):
        request = generation_pb2.GenerateRequest(context=lamp, **prompt)
        _, info, message = fails(lambda request=request: stubs.generations.Generate(request))
        assert info.reason == "PROMPT_TOO_LONG"
        assert "room for" in message
    assert sum(cut) <= 16 * MAX_POSITIONS  # of millions of characters


SESSIONS, WAITING = 64, 256  # of which all but a quarter may be of one client, and on one context

Wide = tuple[DecodeServer, str]


@pytest.fixture(scope="module")
def wide(library: Library, lamp: str) -> Iterator[Wide]:
    config = library.config(max_sessions=SESSIONS, max_waiting=WAITING, http_port=0)
    with loaded(config) as server, http_door(config, server.grpc) as gateway:
        yield server, gateway.url


async def by_grpc(wide: Wide, count: int, more: dict[str, Any]) -> list[str]:
    async with AsyncClient(wide[0].address) as client:

        async def ask(number: int) -> str:
            async with client.generate("", text=f"Who is {number}?", max_tokens=2, **more) as generation:
                await generation.read()
            return str(generation.summary.finish_reason)

        return list(await asyncio.gather(*map(ask, range(count))))


async def by_http(wide: Wide, count: int, more: dict[str, Any]) -> list[str]:
    async with httpx.AsyncClient(
        base_url=wide[1], timeout=300, limits=httpx.Limits(max_connections=None)
    ) as client:

        async def ask(number: int) -> str:
            said = {"role": "user", "content": f"Who is {number}?"}
            body = {"model": "model", "messages": [said], "max_tokens": 2, **more}
            reply = (await client.post("/v1/chat/completions", json=body)).json()
            return str(reply.get("error") or reply["choices"][0]["finish_reason"])

        return list(await asyncio.gather(*map(ask, range(count))))


Burst = Callable[[Wide, int, dict[str, Any]], Any]
DOORS = {"grpc": by_grpc, "http": by_http}


@pytest.mark.parametrize("count", [64, *nightly(256)])
@pytest.mark.parametrize("burst", DOORS.values(), ids=DOORS)
def test_a_burst_is_answered(wide: Wide, burst: Burst, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gets a thread before all have come: first of the door, then of the engine."""
    server, _ = wide
    submit, come = BlockingWork.submit, dict.fromkeys((server.grpc.listener.work, server.backend.threads), 0)

    def counted(work: BlockingWork, function: Callable[[], Any]) -> Future[Any]:
        come[work] += 1
        return submit(work, function)

    go_on = {work: threading.Event() for work in come}
    for work, event in go_on.items():
        for _ in range(8):  # its threads
            submit(work, event.wait)
    monkeypatch.setattr(BlockingWork, "submit", counted)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.extend(asyncio.run(burst(wide, count, {}))))
    asking.start()
    try:
        for work, event in go_on.items():
            wait_until(lambda work=work: come[work] >= count or not asking.is_alive())  # type: ignore[misc]
            event.set()
    finally:
        for event in go_on.values():
            event.set()
        asking.join()
    assert set(answers) == {"length"}
    assert len(answers) == count


@pytest.mark.parametrize("burst", DOORS.values(), ids=DOORS)
def test_constraints_of_a_burst_are_compiled_in_turn(wide: Wide, burst: Burst) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 9}
    told = {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}
    more = {"json_schema": schema} if burst is by_grpc else {"response_format": told}
    assert asyncio.run(burst(wide, 64, more)) == ["length"] * 64
