"""Contexts made over the network: orders, operations, uploads, and a worker that takes them, over a real server."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from decode_engine.errors import PromptTooLongError
from decode_engine.rpc.client import AsyncClient, Client, Keep, OperationInfo
from decode_engine.rpc.server import DecodeServer
from index_store.errors import (
    InvalidArgumentError,
    MethodUnsupportedError,
    NameTakenError,
    UploadNotFoundError,
)
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.uploads import UploadWriting
from index_store.models.conversation.messages import Conversation, Message, Role, Tool
from prefill_worker.worker.queue_worker import QueueWorker
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import MAX_POSITIONS, Library, Stubs
from tests.decode_engine.rpc.creation.conftest import document, make_worker, names
from tests.support.serving.service import fails


@pytest.mark.usefixtures("working")
def test_a_context_is_made_of_a_text_and_answers(client: Client) -> None:
    told: list[OperationInfo] = []
    operation = client.create_context(
        document("northern", 12), display_name="north", on_progress=told.append, methods=["csattention"]
    )
    made = operation.result()
    assert (operation.done, operation.phase, operation.error) == (True, "ended", None)
    assert (
        operation.tokens_done == operation.tokens_total == made.token_count == len(document("northern", 12))
    )
    assert operation.layers_done == operation.layers_total > 0
    assert operation.bytes_written == made.kv_bytes + made.index_bytes
    assert operation.context_name == made.name
    assert (made.display_name, made.default_method, made.expire_time) == ("north", "csattention", None)
    assert told[-1] == operation
    assert [later.tokens_done for later in told] == sorted(later.tokens_done for later in told)
    with client.generate(made.name, question="Who counted?", max_tokens=4) as generation:
        generation.read()
    assert generation.summary.context_tokens == made.token_count


def test_it_is_the_context_that_a_job_on_the_machine_makes(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    text = document("same")
    operation = client.create_context(text, wait=False)
    worker.work_once()
    path = shop.store.parent / "same.txt"
    path.write_text(text)
    from index_store.cli.console import SilentReporter
    from prefill_worker.config import PrefillConfig
    from prefill_worker.jobs.job import run_job

    report = run_job(PrefillConfig(model=str(shop.model), store=shop.store, input=(path,)), SilentReporter())
    assert operation.context_name == f"contexts/{report.manifest.id}"
    assert not report.created


def test_what_is_stored_is_done_at_once(client: Client, worker: QueueWorker) -> None:
    first = client.create_context(document("done"), wait=False)
    assert (first.done, first.phase) == (False, "queued")
    assert first.context_name not in names(client)
    worker.work_once()
    again = client.create_context(document("done"), wait=False)
    assert again.done
    assert again.result().name == first.context_name
    # Another method is something else to do.
    more = client.create_context(document("done"), methods=["quest"], wait=False)
    assert not more.done
    worker.work_once()
    assert "quest" in client.wait_operation(more.name).result().methods
    assert client.create_context(document("done"), methods=["quest"], wait=False).done


def test_rows_in_8_bits_are_made_answered_and_continued(client: Client, worker: QueueWorker) -> None:
    text = document("coded", 12)
    operation = client.create_context(text, methods=["refined"], rows="int8", wait=False)
    plain = client.create_context(text, methods=["refined"], wait=False)
    assert operation.context_name != plain.context_name
    worker.work_once()
    worker.work_once()
    made, exact = (client.wait_operation(each.name).result() for each in (operation, plain))
    assert (made.rows, exact.rows, made.dtype) == ("int8", "dtype", exact.dtype)
    assert made.kv_bytes < exact.kv_bytes / 3
    assert client.create_context(text, methods=["refined"], rows="int8", wait=False).done
    kept = ""
    for method in ("full", "refined"):
        keep = Keep("more") if method == "refined" else None
        with client.generate(
            made.name, question="Who?", max_tokens=3, method=method, keep=keep
        ) as generation:
            generation.read()
        assert generation.summary.context_tokens == made.token_count
        kept = generation.summary.kept_context
    child = client.get_context(kept)
    assert (child.parent, child.rows) == (made.name, "dtype")
    with client.generate(child.name, text="And then?", max_tokens=3, method="refined") as generation:
        generation.read()
    assert generation.summary.context_tokens == child.token_count
    later = client.create_context("It rained. " * 9, parent=made.name, wait=False)
    worker.work_once()
    read = client.wait_operation(later.name).result()
    assert (read.parent, read.rows) == (made.name, "dtype")


def test_a_request_id_makes_repeats_harmless_also_after_a_restart(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    first = client.create_context(document("repeated"), request_id="order 1", wait=False)
    assert client.create_context(document("repeated"), request_id="order 1", wait=False).name == first.name
    with pytest.raises(InvalidArgumentError, match="request_id 'order 1' was used for another request"):
        client.create_context(document("another"), request_id="order 1", wait=False)
    with DecodeServer(shop.config()) as restarted:
        restarted.load()
        with Client(restarted.address) as later:
            assert later.create_context(document("repeated"), request_id="order 1", wait=False) == first
            worker.work_once()
            assert later.wait_operation(first.name).result().name == first.context_name
    assert client.create_context(document("repeated"), request_id="order 1", wait=False).name == first.name


def test_a_name_moves_to_a_new_edition(client: Client, worker: QueueWorker) -> None:
    first = client.create_context(document("edition"), display_name="the log", wait=False)
    with pytest.raises(NameTakenError, match=f"is to be that of context .*{first.name[-32:]}"):
        client.create_context(document("edition", 8), display_name="the log", wait=False)
    worker.work_once()
    with pytest.raises(NameTakenError, match=r"belongs to context .*move_name in requests"):
        client.create_context(document("edition", 8), display_name="the log", wait=False)
    with pytest.raises(InvalidArgumentError, match="move_name is set without display_name"):
        client.create_context(document("edition", 8), move_name=True, wait=False)
    assert client.create_context(document("edition"), display_name="the log", wait=False).done
    moved = client.create_context(document("edition", 8), display_name="the log", move_name=True, wait=False)
    assert client.find_context("the log").name == first.context_name  # until the other one is there
    worker.work_once()
    assert client.find_context("the log").name == moved.context_name
    assert client.get_context(first.context_name).display_name.startswith("the log ")
    # What is called by its first words alone takes no name from anybody.
    plain = client.create_context(document("edition", 9), wait=False)
    worker.work_once()
    again = client.create_context(document("edition", 10), wait=False)
    worker.work_once()
    names = [client.get_context(each.context_name).display_name for each in (plain, again)]
    assert len(set(names)) == 2
    with client.generate(moved.context_name, text="a", max_tokens=1, keep=Keep("branch")) as generation:
        generation.read()
    with pytest.raises(NameTakenError):
        client.generate(moved.context_name, text="b", max_tokens=1, keep=Keep("branch")).read()
    keep = Keep("branch", move_name=True)
    with client.generate(moved.context_name, text="b", max_tokens=1, keep=keep) as generation:
        generation.read()
    assert client.find_context("branch").name == generation.summary.kept_context
    with client.generate(moved.context_name, text="c", max_tokens=1, keep=Keep()) as generation:
        generation.read()
    assert client.find_context("the log").name == moved.context_name


def test_an_order_without_a_worker_says_so(
    client: Client, shop: Library, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "decode_engine.rpc.creation"):
        order = client.create_context(document("alone"), wait=False)
    assert (order.phase, order.jobs_ahead) == ("queued", 0)
    assert "no worker makes contexts of model 'model' now" in order.waiting_reason
    assert "prefill-worker serve" in order.waiting_reason
    assert order.waiting_reason in caplog.text
    assert client.get_operation(order.name).waiting_reason == order.waiting_reason
    with JobQueue(shop.store).attending("0" * 64):  # a worker of another model helps nobody
        assert client.get_operation(order.name).waiting_reason
    stopping = threading.Event()
    beginning = threading.Thread(target=make_worker(shop).run, args=(stopping,))
    beginning.start()
    done = client.wait_operation(order.name)
    assert (done.phase, done.waiting_reason) == ("ended", "")
    another = client.create_context(document("alone", 7), wait=False)
    assert another.waiting_reason == ""
    client.wait_operation(another.name)
    stopping.set()
    beginning.join()


def test_higher_priorities_come_first_then_the_oldest(client: Client, worker: QueueWorker) -> None:
    orders = [("old", 0), ("new", 0), ("urgent", 5), ("idle", -5)]
    made = {
        name: client.create_context(document(name), priority=priority, wait=False)
        for name, priority in orders
    }
    assert [
        client.get_operation(made[name].name).jobs_ahead for name in ("urgent", "old", "new", "idle")
    ] == [
        0,
        1,
        2,
        3,
    ]
    finished = []
    for _ in orders:
        worker.work_once()
        finished += [
            name for name in made if client.get_operation(made[name].name).done and name not in finished
        ]
    assert finished == ["urgent", "old", "new", "idle"]


def test_tokens_and_uploads_are_documents_too(
    client: Client, worker: QueueWorker, server: DecodeServer
) -> None:
    text = document("uploaded")
    ids = server.backend.runner.tokenizer.encode(text)
    by_ids = client.create_context(token_ids=ids, wait=False)
    upload = client.upload_document(text.encode())
    assert upload.size_bytes == len(text.encode())
    by_upload = client.create_context(upload=upload.name, wait=False)
    assert by_upload.context_name == by_ids.context_name
    named = client.upload_document(text.encode())
    first = client.create_context(upload=named.name, request_id="with an upload", wait=False)
    assert client.create_context(upload=named.name, request_id="with an upload", wait=False) == first
    with pytest.raises(UploadNotFoundError, match="it was used, has expired, or never was"):
        client.create_context(upload=upload.name, wait=False)
    while worker.work_once():
        pass
    assert client.get_operation(by_ids.name).result().token_count == len(ids)
    assert client.get_operation(by_upload.name).result() == client.get_operation(by_ids.name).result()


def test_messages_are_a_document_that_further_turns_follow(client: Client, worker: QueueWorker) -> None:
    said = [
        Message(Role.SYSTEM, "You keep the lamp."),
        Message(Role.USER, document("spoken")),
        Message(Role.ASSISTANT, "I see."),
    ]
    operation = client.create_context(messages=said, request_id="talk", wait=False)
    assert client.create_context(messages=said, request_id="talk", wait=False) == operation
    while worker.work_once():
        pass
    made = client.get_operation(operation.name).result()
    assert made.is_conversation
    assert made.display_name.startswith("You keep the lamp.")
    turn = [Message(Role.USER, "Who counted?")]
    with client.generate(made.name, messages=turn, max_tokens=3) as generation:
        generation.read()
    assert generation.summary.context_tokens == made.token_count
    tools = Conversation(tuple(said), (Tool("count", "Counts ships."),))
    with pytest.raises(
        InvalidArgumentError, match=r"leaves tools\[0\].name out"
    ):  # they reach the toy's template
        client.create_context(messages=tools, wait=False)
    with pytest.raises(InvalidArgumentError, match="found 0 messages"):
        client.create_context(messages=[], wait=False)


def test_uploads_are_checked(client: Client, stubs: Stubs) -> None:
    part = context_pb2.UploadDocumentRequest
    with pytest.raises(InvalidArgumentError, match="the document is empty"):
        client.upload_document(b"")
    code, info, details = fails(
        lambda: [stubs.contexts.UploadDocument(iter([part(data=b"a", sha256="0" * 64)]))]
    )
    assert (code, info.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert "send it again" in details
    broken = client.upload_document(b"\xff\xfe no text")
    with pytest.raises(InvalidArgumentError, match="not UTF-8 text"):
        client.create_context(upload=broken.name, wait=False)


def test_what_discarding_an_upload_meets_hides_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writing: UploadWriting) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(UploadWriting, "discard", fail)
    assert client.upload_document(b"a keeper").size_bytes == 8  # and nothing is left to be discarded
    with pytest.raises(InvalidArgumentError, match="the document is empty"):
        client.upload_document(b"")


def test_a_server_without_its_context_tells_so(client: Client, worker: QueueWorker) -> None:
    operation = client.create_context(document("deleted"), wait=False)
    worker.work_once()
    client.delete_context(operation.context_name)
    found = client.get_operation(operation.name).result()
    assert (found.state, found.state_message) == (
        "UNAVAILABLE",
        "the context was made, and has been deleted since",
    )
    again = client.create_context(document("deleted"), wait=False)
    assert not again.done
    worker.work_once()
    assert client.get_operation(again.name).result().state == "READY"


TOKENS = generation_pb2.TokenIds


@pytest.mark.parametrize(
    ("request_", "reason", "said"),
    [
        ({}, "INVALID_ARGUMENT", "the document is missing"),
        ({"text": "  "}, "INVALID_ARGUMENT", "text is blank"),
        ({"token_ids": TOKENS()}, "INVALID_ARGUMENT", "token_ids has no tokens"),
        ({"token_ids": TOKENS(ids=[2**31])}, "INVALID_ARGUMENT", "expected ids of 0 to"),
        ({"text": "a" * (MAX_POSITIONS + 1)}, "PROMPT_TOO_LONG", f"the {MAX_POSITIONS} positions"),
        ({"token_ids": TOKENS(ids=[1] * (MAX_POSITIONS + 1))}, "PROMPT_TOO_LONG", "positions"),
        ({"upload": "x"}, "INVALID_ARGUMENT", "expected uploads/"),
        ({"upload": "uploads/" + "0" * 32}, "UPLOAD_NOT_FOUND", "there is no upload"),
        ({"upload": "uploads/../x"}, "UPLOAD_NOT_FOUND", "there is no upload"),
        ({"text": "a", "methods": ["best"]}, "METHOD_UNSUPPORTED", "best"),
        ({"text": "a", "methods": ["full", "full"]}, "INVALID_ARGUMENT", "different ones"),
        ({"text": "a", "methods": ["x" * 129]}, "INVALID_ARGUMENT", "128"),
        ({"text": "a", "rows": "int4"}, "INVALID_ARGUMENT", "expected one of dtype, int8"),
        ({"text": "a", "rows": "int8", "parent": "contexts/a"}, "INVALID_ARGUMENT", "leave it out"),
        ({"text": "a", "display_name": "a\nb"}, "INVALID_ARGUMENT", "display_name"),
        ({"text": "a", "request_id": "a" * 129}, "INVALID_ARGUMENT", "request_id"),
        ({"text": "a", "priority": 101}, "INVALID_ARGUMENT", "-100 to 100"),
        ({"text": "a", "ttl": Duration()}, "INVALID_ARGUMENT", "expected 1 s to 36500 days"),
        ({"text": "a", "ttl": Duration(seconds=2**40)}, "INVALID_ARGUMENT", "ttl"),
    ],
)
def test_wrong_orders_are_refused(stubs: Stubs, request_: dict[str, object], reason: str, said: str) -> None:
    request = context_pb2.CreateContextRequest(**request_)  # type: ignore[arg-type]
    _, info, details = fails(lambda: [stubs.contexts.CreateContext(request)])
    assert info.reason == reason
    assert said in details


def test_the_queue_is_bounded(client: Client, server: DecodeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    queue: JobQueue = server.backend.workshop.queue
    monkeypatch.setattr(queue, "_most_jobs", 0)
    with pytest.raises(Exception, match="try again later") as caught:
        client.create_context(document("crowded"), wait=False)
    assert caught.value.reason == "QUEUE_FULL"  # type: ignore[attr-defined]
    assert caught.value.retry_after_s == 5.0  # type: ignore[attr-defined]


def test_the_client_says_what_it_cannot_send(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="exactly one of"):
        client.create_context(wait=False)
    with pytest.raises(MethodUnsupportedError):
        client.create_context("a", methods=["unknown"])
    with pytest.raises(PromptTooLongError):
        client.create_context("a" * (5 << 20))  # uploaded, and then found to be too long


@pytest.mark.usefixtures("working")
def test_the_asynchronous_client_has_the_same_verbs(server: DecodeServer) -> None:
    async def use() -> None:
        async with AsyncClient(server.address) as client:
            made = (await client.create_context(document("asynchronous"), ttl_s=3600)).result()
            assert made.expire_time is not None
            upload = await client.upload_document(document("parts").encode())
            operation = await client.create_context(upload=upload.name, wait=False)
            await client.cancel_operation(operation.name)
            assert (await client.wait_operation(operation.name)).done
            assert (await client.get_operation(operation.name)).done
            assert operation.name in [listed.name async for listed in client.list_operations()]
            await client.delete_operation(operation.name)

    asyncio.run(use())


def test_nothing_is_left_beside_the_records(shop: Library, worker: QueueWorker) -> None:
    while worker.work_once():
        pass
    left = [path for path in (shop.store / "jobs").rglob("*") if path.is_file() and path.name != "job.json"]
    assert left == []
    assert list(Path(shop.store / "contexts").glob(".*")) == []
