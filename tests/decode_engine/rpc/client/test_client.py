"""The Python client: references, errors, retries, its connection to nobody, and calls while they run."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from datetime import datetime
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message as ProtoMessage
from google.protobuf.message_factory import GetMessageClass

from decode_engine.errors import CancelledError, DeadlineExceededError, InternalError, ServerUnreachableError
from decode_engine.rpc.client import AsyncClient, Client, Keep, verbs
from decode_engine.rpc.client.answers import finish
from decode_engine.rpc.client.connection import AsyncWire, BlockingWire, Repeats, Stream
from decode_engine.rpc.client.replies import read_reply
from decode_engine.settings.request_bounds import MAX_REQUEST_BYTES
from index_store.errors import ContextBusyError, InvalidArgumentError, SparseKVError
from index_store.models.conversation.messages import Message, Role, Tool, ToolCall
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc, values
from sparsekv.v1.values import OperationState

IDS = ("a" * 64, "a" * 40 + "b" * 24, "c" * 64)


class Scripted(
    context_pb2_grpc.ContextServiceServicer,
    generation_pb2_grpc.GenerationServiceServicer,
    operations_pb2_grpc.OperationsServicer,  # type: ignore[misc]
):
    """Answers what a test needs, and counts calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refusals = 0
        self.warm = threading.Event()
        self.begun, self.ended = threading.Event(), threading.Event()
        """A generation has come; it has ended, whoever ended it."""

    def GetContext(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("GetContext")
        if len(self.calls) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        name = request.name or f"contexts/{IDS[2]}"
        return context_pb2.Context(name=name, display_name=request.reference)

    def ListContexts(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("ListContexts")
        start = int(request.page_token or 0)
        page = [
            context_pb2.Context(name=f"contexts/{id_}", display_name=f"book {id_[0]}")
            for id_ in IDS[start : start + 1]
        ]
        token = str(start + 1) if start + 1 < len(IDS) else ""
        return context_pb2.ListContextsResponse(contexts=page, next_page_token=token)

    def DeleteContext(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("DeleteContext")
        if request.name == "contexts/ends":
            context.abort(grpc.StatusCode.CANCELLED, "")
        context.abort(grpc.StatusCode.UNAVAILABLE, "starting")

    def WarmContext(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("WarmContext")
        self.warm.wait(60)
        return context_pb2.WarmContextResponse()

    def ListMethods(self, request: Any, context: grpc.ServicerContext) -> Any:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not for you")

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.calls.append("Generate")
        context.add_callback(self.ended.set)
        self.begun.set()
        if request.text in ("waits first", "stays silent"):
            yield generation_pb2.GenerateResponse(waiting=generation_pb2.Waiting(cause=2))
        if request.text == "stays silent":
            self.ended.wait(60)
            return
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        yield generation_pb2.GenerateResponse(token_ids=[1, 2], text="hel")
        if request.text == "breaks off":
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        yield generation_pb2.GenerateResponse(token_ids=[3])
        summary = generation_pb2.GenerationSummary(
            finish_reason=generation_pb2.GenerationSummary.STOP,
            usage=generation_pb2.Usage(context_tokens=7, prompt_tokens=2, completion_tokens=3),
            timings=generation_pb2.Timings(search_ns=5, total_ns=9),
            selection=generation_pb2.SelectionFigures(keys_kept=4, fraction_all=0.5),
            method="refined",
            seed=2**64 - 1,
            budget="2.00%",
            remainder="centred",
        )
        yield generation_pb2.GenerateResponse(text="lo", summary=summary)

    def WaitOperation(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("WaitOperation")
        return operations_pb2.Operation(name=request.name, done=self.calls.count("WaitOperation") == 2)

    def GetOperation(self, request: Any, context: grpc.ServicerContext) -> Any:
        return operations_pb2.Operation(name=request.name)

    def BatchGenerate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.calls.append("BatchGenerate")
        if self.refusals:
            self.refusals -= 1
            context.abort(grpc.StatusCode.UNAVAILABLE, "starting")
        summary = generation_pb2.GenerationSummary(finish_reason=generation_pb2.GenerationSummary.STOP)
        told = [generation_pb2.TokenLogprob(token_id=id_, logprob=-0.5) for id_ in (3, 4)]
        call = {"id": "c", "name": "look", "arguments_json": '{"at":'}
        for response in (
            generation_pb2.GenerateResponse(prompt_logprobs=told),
            generation_pb2.GenerateResponse(token_ids=[3], logprobs=told[:1], tool_calls=[call]),
            generation_pb2.GenerateResponse(tool_calls=[{"arguments_json": "1}"}]),  # and no text or tokens
            generation_pb2.GenerateResponse(text="hello", token_ids=[4], logprobs=told[1:], summary=summary),
        ):
            yield generation_pb2.BatchGenerateResponse(response=response)


Server = tuple[Scripted, Client]


@pytest.fixture
def scripted() -> Iterator[Server]:
    servicer = Scripted()
    server = grpc.server(ThreadPoolExecutor(8))
    context_pb2_grpc.add_ContextServiceServicer_to_server(servicer, server)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    operations_pb2_grpc.add_OperationsServicer_to_server(servicer, server)
    server.start()
    with Client(f"127.0.0.1:{port}", timeout_s=60) as client:
        yield servicer, client
    servicer.warm.set()
    servicer.ended.set()
    server.stop(0)


def test_references_are_resolved_by_the_server_in_one_call(scripted: Server) -> None:
    servicer, client = scripted
    servicer.calls += ["started"] * 2
    found = client.find_context("the book of c")
    assert (found.name, found.display_name) == ("contexts/" + IDS[2], "the book of c")
    assert servicer.calls[2:] == ["GetContext"]


def test_calls_that_change_nothing_are_repeated(scripted: Server) -> None:
    servicer, client = scripted
    assert client.get_context("contexts/x").name == "contexts/x"
    assert servicer.calls == ["GetContext"] * 3


def test_calls_that_change_something_are_not_repeated(scripted: Server) -> None:
    servicer, client = scripted
    with pytest.raises(ServerUnreachableError):
        client.delete_context("contexts/x")
    assert servicer.calls == ["DeleteContext"]


def test_deadline_of_the_client(scripted: Server) -> None:
    with Client(scripted[1]._address, timeout_s=0.5) as hasty, pytest.raises(DeadlineExceededError):
        hasty.warm_context("contexts/x")  # which is not answered before the test ends


def test_foreign_errors_keep_code_and_message(scripted: Server) -> None:
    with pytest.raises(InternalError, match="PERMISSION_DENIED: not for you"):
        scripted[1].list_methods()


def test_nobody_answers() -> None:
    with Client("127.0.0.1:1") as client:
        assert not client.is_serving()
        with pytest.raises(ServerUnreachableError, match="decode-engine serve"):
            list(client.list_contexts())
        with pytest.raises(ServerUnreachableError):
            client.generate("contexts/x", text="a").read()


def asking(**arguments: Any) -> Callable[[Client], object]:
    return lambda client: client.generate("contexts/x", **arguments)


HALF = "a\ud800b"
SAID = Message(Role.USER, HALF)
WORD = Message(Role.USER, "x")
LARGE = [1] * (MAX_REQUEST_BYTES + 1)
FIRST, LAST = map(datetime.fromisoformat, ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"))
ONE_PROMPT, ONE_BUDGET = "give exactly one of question", "give at most one of keep_ratio"
TOO_LARGE = f"expected at most {MAX_REQUEST_BYTES}"
UNSENDABLE: list[tuple[Callable[[Client], object], str, str]] = [
    (asking(), "prompt", ONE_PROMPT),
    (asking(text="a", question="b"), "prompt", ONE_PROMPT),
    (asking(token_ids=[1], text="a"), "prompt", ONE_PROMPT),
    (asking(text="a", keep_ratio=0.1, target_mass=0.9), "budget", ONE_BUDGET),
    (asking(text="a", keep_ratio=0.1, token_budget=10), "budget", ONE_BUDGET),
    (asking(text="a", logit_bias={1: 10**400}), "logit_bias", "^logit_bias is "),
    (asking(text="a", temperature=10**400), "temperature", "^temperature is "),
    (asking(text="a", seed=-1), "seed", "^seed is -1"),
    (asking(token_ids=[5, -1]), "token_ids", r"^token_ids is \[5, -1\]"),
    (asking(text="a", max_tokens=2**40), "max_tokens", "^max_tokens is 1099511627776"),
    (asking(text="a", stop=["\udcff"]), "stop", r"^stop is \['\\udcff'\]"),
    (asking(question="\udcff" * 1000), "question", r"^question is '\\udcff.*\.\.\."),
    (asking(messages=[SAID]), "messages[0].content", r"^messages\[0\]\.content is "),
    (asking(messages=[WORD, SAID]), "messages[1].content", r"^messages\[1\]\.content is "),
    (asking(messages=[WORD], tools=[Tool(HALF)]), "tools[0].name", r"^tools\[0\]\.name is "),
    (asking(text="x", keep=Keep(HALF)), "display_name", "^display_name is "),
    (asking(text="x", choices=[HALF]), "texts", "^texts is "),
    (lambda client: client.generate(HALF, text="x"), "context", "^context is "),
    (lambda client: client.batch_generate("contexts/x", [{"text": HALF}]), "text", "^text is "),
    (lambda client: client.batch_generate("contexts/x", [{"token_ids": LARGE}]), "prompt", TOO_LARGE),
    (lambda client: client.update_context("x", expire_time=FIRST), "expire_time", "^expire_time is "),
    (lambda client: client.update_context("x", expire_time=LAST), "expire_time", "^expire_time is "),
    (lambda client: client.update_context("contexts/x", labels={HALF: None}), "paths", "^paths is "),
    (lambda client: client.get_context(HALF), "name", "^name is "),
    (lambda client: next(client.list_contexts(name_prefix=HALF)), "name_prefix", "^name_prefix is "),
    (lambda client: next(client.list_contexts(state="ready")), "state", "expected one of READY, "),
    (lambda client: client.create_context(HALF), "text", "half a character at 1"),
    (lambda client: client.create_context(HALF * 2**21), "text", "half a character at 1"),  # to be uploaded
    (lambda client: client.create_context("x", labels={"a": HALF}), "labels", "^labels is "),
    (lambda client: client.create_context(messages=[SAID]), "messages[0].content", "no request can carry"),
    (lambda client: client.create_context(token_ids=LARGE), "request", TOO_LARGE),
    (lambda client: client.count_tokens([SAID]), "messages[0].content", "no request can carry"),
    (lambda client: client.count_tokens("x" * len(LARGE)), "request", TOO_LARGE),
    (lambda client: client.detokenize(LARGE), "request", TOO_LARGE),
]


@pytest.mark.parametrize(("ask", "field", "told"), UNSENDABLE)
def test_what_no_request_can_carry_is_refused_by_its_field(
    ask: Callable[[Client], object], field: str, told: str
) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError, match=told) as caught:
        ask(client)
    assert caught.value.metadata["field"] == field


def test_both_clients_have_the_same_verbs() -> None:
    def verbs(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(verb).parameters)
            for name, verb in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_") and name != "run"
        }

    assert verbs(Client) == verbs(AsyncClient)


def test_an_answer_begins_again_where_no_server_took_it(scripted: Server) -> None:
    servicer, client = scripted
    servicer.refusals = 2
    assert client.generate("contexts/x", text="a").read() == "hello"
    assert servicer.calls == ["Generate"] * 3
    with pytest.raises(ServerUnreachableError, match="stopped before the answer was complete"):
        client.generate("contexts/x", text="breaks off").read()
    assert servicer.calls == ["Generate"] * 4
    servicer.refusals = 9
    with pytest.raises(ServerUnreachableError, match="starting"):
        client.generate("contexts/x", text="a").read()
    assert servicer.calls == ["Generate"] * 8


def test_a_batch_begins_again_where_no_server_took_it(scripted: Server) -> None:
    servicer, client = scripted
    servicer.refusals = 2
    items = list(client.batch_generate("contexts/x", [{"text": "a"}]))
    assert [(item.index, item.texts) for item in items] == [(0, ("hello",))]
    servicer.refusals = 9
    with pytest.raises(ServerUnreachableError, match="starting"):
        list(client.batch_generate("contexts/x", [{"text": "a"}]))
    assert servicer.calls == ["BatchGenerate"] * 7


def test_a_batch_brings_calls_and_log_probabilities_as_an_answer_does(
    scripted: Server,
) -> None:
    [item] = scripted[1].batch_generate("contexts/x", [{"text": "a"}])
    assert (item.texts, item.token_ids) == (("hello",), ((3, 4),))
    assert item.tool_calls == ((ToolCall("look", '{"at":1}', "c"),),)
    assert [[each.token_id for each in own] for own in item.logprobs] == [[3, 4]]
    assert [each.token_id for each in item.prompt_logprobs] == [3, 4]


def test_the_asynchronous_client_reads_cancels_and_fails_like_the_other(
    scripted: Server,
) -> None:
    client = scripted[1]

    async def use() -> None:
        async with AsyncClient(client._address, timeout_s=60) as asynchronous:
            assert (await asynchronous.get_context("contexts/x")).name == "contexts/x"
            listed = [context.name async for context in asynchronous.list_contexts()]
            assert listed == [f"contexts/{id_}" for id_ in IDS]
            async with asynchronous.generate("contexts/x", text="a") as generation:
                assert await generation.read() == "hello"
                assert generation.summary.completion_tokens == 3
            with pytest.raises(ServerUnreachableError):
                await asynchronous.delete_context("contexts/x")
            with pytest.raises(InternalError, match="PERMISSION_DENIED: not for you"):
                await asynchronous.list_methods()
            assert not await asynchronous.is_serving()

    asyncio.run(use())


def fill(message: ProtoMessage) -> ProtoMessage:
    """Sets every field, of a oneof the last one."""
    for field in message.DESCRIPTOR.fields:
        place = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            place["a"] = "b"
        elif field.message_type is not None:
            fill(place.add() if field.is_repeated else place)
        else:
            value: Any = {field.TYPE_STRING: "x", field.TYPE_BYTES: b"x"}.get(field.type, 1)
            place.append(value) if field.is_repeated else setattr(message, field.name, value)
    return message


NOT_OF_THE_MESSAGE = {"name", "done", "context_name"}
"""What an operation itself says."""


@pytest.mark.parametrize("name", values.CLASSES)
def test_every_field_of_every_message_is_read(name: str) -> None:
    kind, message = values.CLASSES[name], GetMessageClass(Default().FindMessageTypeByName(name))
    assert read_reply(kind, message()) == kind()
    read, others = read_reply(kind, fill(message())), NOT_OF_THE_MESSAGE if kind is OperationState else set()
    unread = {
        field.name for field in fields(kind) if getattr(read, field.name) == getattr(kind(), field.name)
    }
    one_of = {field.name for each in message.DESCRIPTOR.oneofs for field in each.fields[:-1]}
    assert unread == others | one_of


def test_one_text_stands_for_a_list_of_it() -> None:
    request = verbs.generate_request("", {"text": "x", "stop": "dairy is"})
    assert list(request.stop) == ["dairy is"]
    assert list(verbs.generate_request("", {"text": "x", "choices": "yes"}).constraint.choices.texts) == [
        "yes"
    ]
    order = verbs.create_context({"methods": "quest"}, text="x").request
    assert list(order.methods) == ["quest"]


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


@pytest.mark.parametrize("task", [False, True])
def test_another_task_cancels_what_one_reads_or_that_task_itself(scripted: Server, task: bool) -> None:
    servicer, client = scripted
    error, told = (asyncio.CancelledError, "") if task else (CancelledError, "the call was cancelled")

    async def use() -> None:
        async with AsyncClient(client._address) as asynchronous:
            generation = asynchronous.generate("contexts/x", text="stays silent")
            reading = asyncio.create_task(generation.read())
            assert await asyncio.to_thread(servicer.begun.wait, 60)
            (reading if task else generation).cancel()
            with pytest.raises(error, match=told):
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


def test_a_server_that_ends_under_a_call_is_unreachable(scripted: Server) -> None:
    with pytest.raises(ServerUnreachableError, match="ended the call"):
        scripted[1].delete_context("contexts/ends")


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
