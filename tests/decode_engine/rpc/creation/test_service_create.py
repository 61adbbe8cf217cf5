"""Contexts made over the network: orders, operations, uploads, a worker that takes them, and children made whole."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import NEVER, AsyncClient, Client, CreateOptions, Keep, OperationInfo
from decode_engine.rpc.contexts.creation import _filled
from decode_engine.rpc.server import DecodeServer
from index_store.cli.console import LineReporter, SilentReporter
from index_store.errors import (
    ContextExpiredError,
    ContextNotFoundError,
    InvalidArgumentError,
    JobCorruptError,
    NameTakenError,
)
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.uploads import UploadWriting
from index_store.models.conversation.messages import Message, Role
from index_store.store.catalog import Store, utc_now
from index_store.store.clean_up import clean_up
from index_store.store.description.manifest import Manifest
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.config import AddIndexConfig, DetachConfig, PrefillConfig
from prefill_worker.jobs.added_indexes import run_add_index
from prefill_worker.jobs.children import run_detach
from prefill_worker.jobs.job import run_job
from prefill_worker.worker.queue_worker import QueueWorker
from sparsekv.v1 import context_pb2
from tests.decode_engine.conftest import Library, make_library
from tests.support.serving.service import answered, loaded, wait_until
from tests.support.serving.workers import working
from tests.support.store import raising

WORDS = "The keeper of the {} lighthouse counted ships and wrote them down. "


def document(name: str, times: int = 6) -> str:
    """A text that no other test has."""
    return WORDS.format(name) * times


def names(client: Client) -> set[str]:
    return {context.name for context in client.list_contexts()}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A store of this module alone, with a toy model."""
    library = make_library(tmp_path_factory.mktemp("shop"))
    library.prefill("first")  # makes the store
    return library


@pytest.fixture(scope="module")
def server(shop: Library) -> Iterator[DecodeServer]:
    with loaded(shop.config()) as started:
        yield started


@pytest.fixture(scope="module")
def worker(shop: Library) -> QueueWorker:
    """Works when a test tells it to."""
    return shop.worker(chunk=100)


@pytest.fixture(name="working")
def _working(worker: QueueWorker) -> Iterator[None]:
    """The worker works beside the test."""
    with working(worker):
        yield


def ordered(client: Client, worker: QueueWorker, *text: str, **options: Any) -> OperationInfo:
    """An order that the worker has done."""
    operation = client.create_context(*text, wait=False, **options)
    worker.work_once()
    return operation


def test_it_is_the_context_that_a_job_on_the_machine_makes(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    text = document("same")
    operation = ordered(client, worker, text)
    path = shop.store.parent / "same.txt"
    path.write_text(text)
    report = run_job(PrefillConfig(model=str(shop.model), store=shop.store, input=(path,)), SilentReporter())
    assert operation.context_name == f"contexts/{report.manifest.id}"
    assert not report.created


def test_an_order_costs_a_request_also_where_nothing_is_to_be_done(
    client: Client, worker: QueueWorker, server: DecodeServer
) -> None:
    def charged() -> int:
        return sum(each["requests"] for each in server.backend.tenants.totals().values())

    before = charged()
    for expected in (1, 2):
        client.create_context(document("charged"), request_id="charged", wait=False)
        assert charged() == before + expected
    worker.work_once()
    assert client.create_context(document("charged"), wait=False).done
    assert charged() == before + 3


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
        summary = answered(client, made.name, question="Who?", max_tokens=3, method=method, keep=keep)[1]
        assert summary.context_tokens == made.token_count
        kept = summary.kept_context
    child = client.get_context(kept)
    assert (child.parent, child.rows) == (made.name, "dtype")
    summary = answered(client, child.name, text="And then?", max_tokens=3, method="refined")[1]
    assert summary.context_tokens == child.token_count
    later = ordered(client, worker, "It rained. " * 9, parent=made.name)
    read = client.wait_operation(later.name).result()
    assert (read.parent, read.rows) == (made.name, "dtype")


def test_a_request_id_makes_repeats_harmless_also_after_a_restart(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    first = client.create_context(document("repeated"), request_id="order 1", wait=False)
    assert client.create_context(document("repeated"), request_id="order 1", wait=False).name == first.name
    with pytest.raises(InvalidArgumentError, match="request_id 'order 1' was used for another request"):
        client.create_context(document("another"), request_id="order 1", wait=False)
    with loaded(shop.config()) as restarted, Client(restarted.address) as later:
        assert later.create_context(document("repeated"), request_id="order 1", wait=False) == first
        worker.work_once()
        assert later.wait_operation(first.name).result().name == first.context_name
    assert client.create_context(document("repeated"), request_id="order 1", wait=False).name == first.name


def test_what_has_expired_is_made_again_by_the_same_request(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    """Whether it is still on the disk or was removed, and once for all repeats; what was deleted in its time is not."""
    order: CreateOptions = {"request_id": "again", "display_name": "again", "renew_s": 3600.0}
    first = ordered(client, worker, document("again"), **order)
    made = client.wait_operation(first.name).result()
    assert (made.renew_s, client.find_context("again").name) == (3600.0, made.name)
    store, id_ = Store(shop.store), made.name.removeprefix("contexts/")
    for removed in (False, True):
        store.update(id_, lambda manifest: replace(manifest, expires_at=utc_now()))
        with pytest.raises(ContextExpiredError, match="make it again"):
            client.generate(made.name, text="a", max_tokens=1).read()
        if removed:
            clean_up(store)
            with pytest.raises(ContextNotFoundError):
                client.find_context("again")
        repeats = [client.create_context(document("again"), wait=False, **order) for _ in range(2)]
        assert [(each.name, each.done) for each in repeats] == [(first.name, False)] * 2
        worker.work_once()
        assert client.wait_operation(first.name).result().state == "READY"
        assert client.create_context(document("again"), wait=False, **order).done
        client.generate(made.name, text="a", max_tokens=1).read()
    client.delete_context(made.name)


def test_what_a_rule_removed_is_made_again_without_its_document(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    """Of a text, of messages, and of a child; with what they had, or what the request says."""
    store = Store(shop.store)
    orders: list[dict[str, object]] = [
        {"text": document("kept"), "methods": ["quest"], "labels": {"team": "law"}, "ttl_s": 7200.0},
        {"messages": [Message(Role.USER, document("kept talk"))], "renew_s": 3600.0},
    ]
    for number, order in enumerate(orders):
        first = ordered(client, worker, display_name=f"kept {number}", **order)
        made = client.wait_operation(first.name).result()
        store.update(made.name[9:], lambda manifest: replace(manifest, expires_at=utc_now()))
        with pytest.raises(ContextExpiredError):
            client.generate(made.name, text="a", max_tokens=1).read()
        for removed in (False, True):
            if removed:
                store.update(made.name[9:], lambda manifest: replace(manifest, expires_at=utc_now()))
                clean_up(store)
                with pytest.raises(ContextNotFoundError):
                    client.get_context(made.name)
            ref = made.display_name if removed else made.name
            operation = client.create_context(again=ref, ttl_s=order.get("ttl_s"), wait=False)  # type: ignore[typeddict-item]
            worker.work_once()
            again = client.wait_operation(operation.name).result()
            assert (again.name, again.display_name) == (made.name, made.display_name)
            assert (again.methods, again.labels, again.renew_s) == (made.methods, made.labels, made.renew_s)
            lives_s = (again.expire_time - utc_now()).total_seconds()  # type: ignore[operator]
            assert lives_s == pytest.approx(order.get("ttl_s", order.get("renew_s")), abs=60)
            client.generate(made.name, text="a", max_tokens=1).read()

    base = ordered(client, worker, document("kept base"))
    child = ordered(client, worker, document("more"), parent=base.context_name, ttl_s=3600.0)
    store.update(child.context_name[9:], lambda manifest: replace(manifest, expires_at=utc_now()))
    clean_up(store)
    operation = ordered(client, worker, again=child.context_name, labels={"a": "b"}, ttl_s=60.0)
    again = client.wait_operation(operation.name).result()
    assert (again.name, again.labels) == (child.context_name, {"a": "b"})


def test_what_somebody_deleted_is_never_made_again(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    """Neither what was there when it was deleted, nor what only could be made again, nor what was made again."""
    store = Store(shop.store)
    for number in range(3):
        first = ordered(client, worker, document(f"deleted {number}"), ttl_s=3600.0)
        id_ = first.context_name[9:]
        for _ in range(number):
            store.update(id_, lambda manifest: replace(manifest, expires_at=utc_now()))
            clean_up(store)
            assert store.ended.known(id_) is not None
            if number == 2 and not store.lists(id_):
                client.create_context(again=id_, wait=False)
                worker.work_once()
                break
        client.delete_context(first.context_name)
        with pytest.raises(ContextNotFoundError, match="nothing is kept of a context"):
            client.create_context(again=id_, wait=False)
        with pytest.raises(ContextNotFoundError):
            client.delete_context(first.context_name)


def test_it_lives_as_long_as_it_did(lamp_manifest: Manifest) -> None:
    two_hours = lamp_manifest.created_at + timedelta(hours=2)
    for kept, request, ttl_s, renew_s in (
        (replace(lamp_manifest, expires_at=two_hours), {}, 7200, 0),
        (replace(lamp_manifest, expires_at=lamp_manifest.created_at), {}, 1, 0),
        (lamp_manifest, {}, 0, 0),
        (replace(lamp_manifest, expires_at=two_hours, renew=60.0), {}, 0, 60),
        (replace(lamp_manifest, expires_at=two_hours, renew=60.0), {"ttl": timedelta(seconds=5)}, 5, 60),
    ):
        filled = _filled(context_pb2.CreateContextRequest(again="a", **request), kept)  # type: ignore[arg-type]
        assert (filled.ttl.seconds, filled.renew.seconds) == (ttl_s, renew_s)
        assert filled.again == "a"


@pytest.fixture
def lamp_manifest(shop: Library) -> Manifest:
    return Store(shop.store).list()[-1]


def test_what_an_order_cannot_say_is_not_made_again(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    id_ = shop.prefill("salted again", text=document("salted again"), ttl="1h")
    with pytest.raises(InvalidArgumentError, match="was made in a way that no order has") as raised:
        client.create_context(again=id_, wait=False)
    assert raised.value.metadata["field"] == "again"
    with pytest.raises(InvalidArgumentError, match="goes with no parent"):
        client.create_context(again=id_, parent=f"contexts/{id_}", wait=False)
    with pytest.raises(InvalidArgumentError, match="exactly one of text, token_ids, messages, upload, again"):
        client.create_context("a", again=id_, wait=False)
    with pytest.raises(ContextNotFoundError, match="send its document again"):
        client.create_context(again="nobody's", wait=False)


def test_uses_renew_at_every_door(client: Client, worker: QueueWorker, shop: Library) -> None:
    """A request that names it, one that begins with it, and loading; a change of the field counts at once."""
    operation = ordered(client, worker, document("renewed"), ttl_s=60.0, renew_s=7200.0)
    name = client.wait_operation(operation.name).result().name
    store, id_ = Store(shop.store), name.removeprefix("contexts/")
    ids = client.tokenize(document("renewed")).ids
    uses: list[Callable[[], object]] = [
        lambda: client.generate(name, text="a", max_tokens=1).read(),
        lambda: client.generate("", token_ids=[*ids, 5], max_tokens=1).read(),
        lambda: client.warm_context(name),
    ]
    for use in uses:
        store.update(id_, lambda manifest: replace(manifest, expires_at=utc_now() + timedelta(minutes=1)))
        use()
        wait_until(lambda: (store.manifest(id_).expires_at or utc_now()) > utc_now() + timedelta(minutes=119))
    assert client.update_context(name, renew_s=0).renew_s is None
    assert client.update_context(name, expire_time=NEVER).expire_time is None
    ends = client.update_context(name, renew_s=60).expire_time
    assert ends is not None
    assert ends < utc_now() + timedelta(minutes=2)
    again = client.update_context(name, expire_time=NEVER)
    assert (again.expire_time, again.renew_s) == (None, None)
    with pytest.raises(InvalidArgumentError, match=r"renew is 0\.5 s, expected 1 s to"):
        client.update_context(name, renew_s=0.5)
    client.delete_context(name)


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
    plain = ordered(client, worker, document("edition", 9))
    again = ordered(client, worker, document("edition", 10))
    names = [client.get_context(each.context_name).display_name for each in (plain, again)]
    assert len(set(names)) == 2
    answered(client, moved.context_name, text="a", max_tokens=1, keep=Keep("branch"))
    with pytest.raises(NameTakenError):
        answered(client, moved.context_name, text="b", max_tokens=1, keep=Keep("branch"))
    moving = Keep("branch", move_name=True)
    _, summary = answered(client, moved.context_name, text="b", max_tokens=1, keep=moving)
    assert client.find_context("branch").name == summary.kept_context
    answered(client, moved.context_name, text="c", max_tokens=1, keep=Keep())
    assert client.find_context("the log").name == moved.context_name


def test_an_order_without_a_worker_says_so(
    client: Client, shop: Library, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "decode_engine.rpc"):
        order = client.create_context(document("alone"), wait=False)
    assert (order.phase, order.jobs_ahead) == ("queued", 0)
    assert "no worker makes contexts of model 'model' now" in order.waiting_reason
    assert "prefill-worker serve" in order.waiting_reason
    assert order.waiting_reason in caplog.text
    assert client.get_operation(order.name).waiting_reason == order.waiting_reason
    with JobQueue(shop.store).attending("0" * 64):  # a worker of another model helps nobody
        assert client.get_operation(order.name).waiting_reason
    stopping = threading.Event()
    beginning = threading.Thread(target=shop.worker().run, args=(stopping,))
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
    ] == [0, 1, 2, 3]
    finished = []
    for _ in orders:
        worker.work_once()
        finished += [
            name for name in made if client.get_operation(made[name].name).done and name not in finished
        ]
    assert finished == ["urgent", "old", "new", "idle"]


def test_what_discarding_an_upload_meets_hides_nothing(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(UploadWriting, "discard", raising(OSError(5, "Input/output error")))
    assert client.upload_document(b"a keeper").size_bytes == 8  # and nothing is left to be discarded
    with pytest.raises(InvalidArgumentError, match="the document is empty"):
        client.upload_document(b"")


def test_a_server_without_its_context_tells_so(client: Client, worker: QueueWorker) -> None:
    operation = ordered(client, worker, document("deleted"))
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


def test_the_queue_is_bounded(client: Client, server: DecodeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    queue: JobQueue = server.backend.workshop.queue
    monkeypatch.setattr(queue, "_most_jobs", 0)
    with pytest.raises(Exception, match="try again later") as caught:
        client.create_context(document("crowded"), wait=False)
    assert caught.value.reason == "QUEUE_FULL"  # type: ignore[attr-defined]
    assert caught.value.retry_after_s == 5.0  # type: ignore[attr-defined]


def test_nothing_is_left_beside_the_records(shop: Library, worker: QueueWorker) -> None:
    while worker.work_once():
        pass
    left = [path for path in (shop.store / "jobs").rglob("*") if path.is_file() and path.name != "job.json"]
    assert left == []
    assert list(Path(shop.store / "contexts").glob(".*")) == []


def test_a_waiting_job_is_cancelled_at_once_and_a_running_one_soon(
    client: Client, worker: QueueWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = client.create_context(document("unwanted"), wait=False)
    client.cancel_operation(waiting.name)
    ended = client.get_operation(waiting.name)
    assert ended.done
    assert isinstance(ended.error, CancelledError)
    assert not worker.work_once()

    running = client.create_context(document("interrupted", 20), wait=False)
    phases = []

    def cancel_after_the_first_pass(checkpoint: Checkpoint, *arguments: object) -> None:
        phases.append(client.get_operation(running.name).phase)
        client.cancel_operation(running.name)

    monkeypatch.setattr(Checkpoint, "keep", cancel_after_the_first_pass)
    assert worker.work_once()
    assert phases == ["reading"]
    assert isinstance(client.get_operation(running.name).error, CancelledError)
    assert running.context_name not in names(client)
    client.cancel_operation(running.name)  # of what has ended nothing happens
    assert isinstance(client.get_operation(running.name).error, CancelledError)


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
            asked = [{"text": "Who lit it?", "max_tokens": 2}, {"text": "W", "max_tokens": 3}]
            async with client.batch_generate(made.name, asked) as batch:  # type: ignore[arg-type]
                assert sorted([(item.index, len(item.token_ids[0])) async for item in batch]) == [
                    (0, 2),
                    (1, 3),
                ]

    asyncio.run(use())


def test_damaged_jobs_are_named_and_hold_nobody_up(
    client: Client, worker: QueueWorker, shop: Library
) -> None:
    broken = client.create_context(document("damaged"), wait=False)
    (shop.store / "jobs" / broken.name.removeprefix("operations/") / "job.json").write_text("{}")
    fine = client.create_context(document("fine"), wait=False)
    assert worker.work_once()
    assert client.get_operation(fine.name).context is not None
    found = client.get_operation(broken.name)
    assert found.done
    assert isinstance(found.error, JobCorruptError)
    assert str(shop.store) not in str(found.error)
    assert broken.name in {operation.name for operation in client.list_operations()}
    client.delete_operation(broken.name)

    short = client.create_context(document("short"), wait=False)
    (shop.store / "jobs" / short.name.removeprefix("operations/") / "tokens").write_bytes(b"1234")
    assert worker.work_once()
    assert isinstance(client.get_operation(short.name).error, JobCorruptError)


MORE = "Every winter the harbour froze, and the keeper walked over the ice to the ships. "


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("detached"))


def tokens(client: Client, context: str, method: str, **options: Any) -> list[int]:
    return answered(client, context, text="The lamp", max_tokens=12, method=method, **options)[0]


def test_a_child_made_whole_needs_nobody(library: Library) -> None:
    root = "contexts/" + library.prefill("root", method=("csattention", "quest", "multipole"))
    with loaded(library.config()) as server, Client(server.address) as client:
        keep = Keep(name="long", prompt_only=True)
        child = answered(client, root, text=MORE * 4, method="full", keep=keep)[1].kept_context
        expected = tokens(client, child, "full")
        with pytest.raises(InvalidArgumentError, match="continues; add them there"):
            run_add_index(AddIndexConfig(child, library.store, index=("pages",)), LineReporter(io.StringIO()))
        running = client.generate(child, text="The lamp", max_tokens=400, method="full")
        pieces = iter(running)
        begun = [*next(pieces).token_ids]
        changed = client.update_context(child, labels={"team": "sea"})
        report = run_detach(DetachConfig("long", library.store, device="cpu"), LineReporter(io.StringIO()))
        whole = client.find_context("long")
        assert whole.name == f"contexts/{report.manifest.id}" == child
        assert (whole.parent, whole.labels) == ("", {"team": "sea"})
        assert (whole.token_count, whole.create_time) == (changed.token_count, changed.create_time)
        assert Store(library.store).verify(report.manifest.id) == []
        assert answered(client, root, text=MORE * 4, method="full", keep=keep)[1].kept_context == child
        assert client.get_context(child).parent == ""
        (replaced,) = {left.kind for left in clean_up(Store(library.store))}
        assert (replaced, Store(library.store).verify(report.manifest.id)) == ("array", [])
        begun += [token for piece in pieces for token in piece.token_ids]
        assert (len(begun), begun[:12]) == (400, expected)
        client.delete_context(root)
        assert tokens(client, whole.name, "full") == expected
        for method in ("csattention", "quest", "multipole"):
            assert method in whole.methods
            assert len(tokens(client, whole.name, method)) == 12
            assert tokens(client, whole.name, method, keep_ratio=1.0) == expected, method
    with pytest.raises(InvalidArgumentError, match="stands alone already"):
        run_detach(DetachConfig("long", library.store), LineReporter(io.StringIO()))
