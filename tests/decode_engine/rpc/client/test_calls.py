"""A call of either client while it runs: cut short, cancelled, read by threads, made by processes that were forked."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from decode_engine.errors import CancelledError, DeadlineExceededError, ServerUnreachableError
from decode_engine.rpc.client import AsyncClient, Client
from decode_engine.rpc.client.answers import finish
from decode_engine.rpc.client.connection import AsyncWire, BlockingWire, Repeats, Stream
from index_store.errors import ContextBusyError, SparseKVError
from sparsekv.v1 import context_pb2_grpc
from tests.decode_engine.rpc.client.conftest import IDS, Scripted

Server = tuple[Scripted, Client]


def test_what_a_loop_has_left_is_read_later(scripted: Server) -> None:
    generation = scripted[1].generate("contexts/x", text="a")
    for piece in generation:
        assert piece.text == "hel"
        break
    assert generation.usage is None
    assert generation.read() == "lo"
    assert generation.summary.finish_reason == "stop"
    assert generation.read() == ""


def test_an_answer_begins_before_it_is_read(scripted: Server) -> None:
    servicer, client = scripted
    with client.generate("contexts/x", text="stays silent"):
        assert servicer.begun.wait(60)
    assert servicer.ended.wait(60)


def test_an_answer_that_nobody_holds_ends(scripted: Server) -> None:
    servicer, client = scripted
    generation = client.generate("contexts/x", text="stays silent")
    assert servicer.begun.wait(60)
    del generation
    assert servicer.ended.wait(60)


def test_another_thread_cancels_what_one_reads(scripted: Server) -> None:
    servicer, client = scripted
    generation = client.generate("contexts/x", text="stays silent")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(generation.read)
        assert servicer.begun.wait(60)
        generation.cancel()
        with pytest.raises(CancelledError, match="the call was cancelled"):
            reading.result(60)
    assert servicer.ended.wait(60)
    generation.cancel()


def test_another_task_cancels_what_one_reads(scripted: Server) -> None:
    servicer, client = scripted

    async def use() -> None:
        async with AsyncClient(client._address) as asynchronous:
            generation = asynchronous.generate("contexts/x", text="stays silent")
            reading = asyncio.create_task(generation.read())
            assert await asyncio.to_thread(servicer.begun.wait, 60)
            generation.cancel()
            with pytest.raises(CancelledError, match="the call was cancelled"):
                await reading
            assert await asyncio.to_thread(servicer.ended.wait, 60)

    asyncio.run(use())


def test_a_task_that_is_cancelled_ends_its_answer(scripted: Server) -> None:
    servicer, client = scripted

    async def use() -> None:
        async with AsyncClient(client._address) as asynchronous:
            reading = asyncio.create_task(asynchronous.generate("contexts/x", text="stays silent").read())
            assert await asyncio.to_thread(servicer.begun.wait, 60)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await asyncio.to_thread(servicer.ended.wait, 60)

    asyncio.run(use())


INTERRUPTED = """
import sys
from decode_engine.rpc.client import Client
generation = Client(sys.argv[1]).generate("contexts/x", text="stays silent", on_wait=lambda _: print(flush=True))
try:
    generation.read()
except KeyboardInterrupt:
    sys.stdin.read()  # as long as the test looks
"""


def test_an_interrupt_from_the_keyboard_ends_the_answer(scripted: Server) -> None:
    servicer, client = scripted
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, client._address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reading:
        reading.stdout.readline()
        reading.send_signal(signal.SIGINT)
        assert servicer.ended.wait(60)
        assert reading.poll() is None
    assert reading.returncode == 0


def test_a_deadline_passes_in_the_middle(scripted: Server) -> None:
    with pytest.raises(DeadlineExceededError):
        scripted[1].generate("contexts/x", text="stays silent", timeout_s=0.5).read()


def test_who_waits_is_told_in_the_thread_that_reads_and_may_call(scripted: Server) -> None:
    client = scripted[1]
    told: list[Any] = []

    def tell(news: object) -> None:
        told.append((threading.get_ident(), client.get_operation("operations/x").name, news))

    client.generate("contexts/x", text="waits first", on_wait=tell).read()
    client.wait_operation("operations/x", on_progress=tell)
    assert {ident for ident, _, _ in told} == {threading.get_ident()}
    assert [name for _, name, _ in told] == ["operations/x"] * 3
    assert [getattr(news, "cause", None) or news.done for _, _, news in told] == ["session", False, True]


def test_threads_share_a_client(scripted: Server) -> None:
    client = scripted[1]

    def use(number: int) -> tuple[str, int]:
        return client.generate("contexts/x", text="a").read(), len(list(client.list_contexts()))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(12))) == [("hello", len(IDS))] * 12


def test_the_blocking_client_works_where_a_loop_runs(scripted: Server) -> None:
    async def use() -> tuple[str, list[str]]:
        contexts = [context.name for context in scripted[1].list_contexts()]
        first = next(scripted[1].list_contexts())
        assert first.name == contexts[0]
        return scripted[1].generate("contexts/x", text="a").read(), contexts

    assert asyncio.run(use()) == ("hello", [f"contexts/{id_}" for id_ in IDS])


FORKED = """
import os, signal, sys
from decode_engine.rpc.client import Client

child = os.fork()
if not child:
    signal.alarm(60)
with Client(sys.argv[1]) as client:
    assert client.generate("contexts/x", text="a").read() == "hello"
    assert len(list(client.list_contexts())) == 3
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
UNCLOSED = """
import sys
from decode_engine.rpc.client import Client
client = Client(sys.argv[1])
print(next(client.list_contexts()).name[:9], next(iter(client.generate("contexts/x", text="a"))).text)
running = client.generate("contexts/x", text="stays silent")
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [(FORKED, ""), pytest.param(UNCLOSED, "contexts/ hel\n", marks=pytest.mark.nightly)],
)
def test_forked_processes_have_clients_and_processes_end_without_closing_them(
    scripted: Server, program: str, printed: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, scripted[1]._address],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_ends_under_a_call_is_unreachable() -> None:
    class Ending(context_pb2_grpc.ContextServiceServicer):  # type: ignore[misc]
        def DeleteContext(self, request: Any, context: grpc.ServicerContext) -> Any:
            context.abort(grpc.StatusCode.CANCELLED, "")

    server = grpc.server(ThreadPoolExecutor(1))
    context_pb2_grpc.add_ContextServiceServicer_to_server(Ending(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as client, pytest.raises(ServerUnreachableError, match="ended the call"):
        client.delete_context("contexts/x")
    server.stop(0)


class Refused:
    """A call that no server takes."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    def __next__(self) -> Any:
        raise grpc.RpcError

    async def read(self) -> Any:
        raise grpc.RpcError


class Calls(Repeats):
    """Makes calls, and cancels what reads them: while the second one is made, or once the first one was refused."""

    def __init__(self, *, while_made: bool) -> None:
        super().__init__("nowhere", None)
        self.while_made = while_made
        self.made: list[Refused] = []
        self.stream: Any = None

    def start(self, left_s: float | None) -> Refused:
        if self.made and self.while_made:
            self.stream.cancel()
        self.made.append(Refused())
        return self.made[-1]

    def translate(self, error: grpc.RpcError) -> SparseKVError:
        if not self.while_made:
            self.stream.cancel()
        if len(self.made) > 1 and self.made[-1].cancelled:
            return CancelledError("the client ended the call")
        return ServerUnreachableError("no server")


@pytest.mark.parametrize("while_made", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_stream_that_is_cancelled_while_it_begins_again_ends(blocking: bool, while_made: bool) -> None:
    calls = Calls(while_made=while_made)

    async def read() -> None:
        wire = (BlockingWire if blocking else AsyncWire)("127.0.0.1:1", None)
        calls.stream = Stream(wire, calls.start, calls)
        await calls.stream.read()

    with pytest.raises(CancelledError):
        finish(read()) if blocking else asyncio.run(read())
    assert [call.cancelled for call in calls.made] == [True] * (2 if while_made else 1)


def test_where_nobody_listens_one_attempt_tells() -> None:
    repeats = Repeats("127.0.0.1:1", None)
    for nobody in (
        ServerUnreachableError("no server answers (failed to connect to all addresses)"),
        ContextBusyError("a job writes it"),
    ):
        with pytest.raises(type(nobody)):
            repeats.wait_s(nobody)
    stopped = ServerUnreachableError("no server answers (Socket closed)")
    assert [0 <= repeats.wait_s(stopped) <= longest_s for longest_s in (0.1, 0.2, 0.4)] == [True] * 3
    with pytest.raises(ServerUnreachableError):
        repeats.wait_s(stopped)
