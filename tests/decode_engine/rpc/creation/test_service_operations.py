"""Operations over the network: listed, waited for, cancelled, forgotten, and those that are damaged."""

from __future__ import annotations

import grpc
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from decode_engine.errors import CancelledError
from decode_engine.rpc.client import Client
from index_store.errors import (
    JobCorruptError,
    JobNotFoundError,
    JobUnfinishedError,
)
from prefill_worker.build.checkpoint import Checkpoint
from prefill_worker.worker.queue_worker import QueueWorker
from tests.decode_engine.conftest import Library, Stubs
from tests.decode_engine.rpc.creation.conftest import document, names
from tests.support.serving.service import fails


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


def test_operations_are_listed_and_forgotten(client: Client, worker: QueueWorker, stubs: Stubs) -> None:
    made = [client.create_context(document(f"listed {number}"), wait=False) for number in range(3)]
    listed = [operation.name for operation in client.list_operations(page_size=2)]
    assert [name for name in listed if name in {one.name for one in made}] == [one.name for one in made[::-1]]
    with pytest.raises(JobUnfinishedError, match="cancel it first"):
        client.delete_operation(made[0].name)
    for one in made:
        client.cancel_operation(one.name)
        client.delete_operation(one.name)
        with pytest.raises(JobNotFoundError):
            client.get_operation(one.name)
    operations = operations_pb2_grpc.OperationsStub(stubs.channel)
    for wrong in ({"name": "contexts"}, {"filter": "done"}, {"page_size": -1}, {"page_token": "x"}):
        request = operations_pb2.ListOperationsRequest(**wrong)
        code, info, _ = fails(lambda request=request: [operations.ListOperations(request)])
        assert (code, info.metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, next(iter(wrong)))
    assert not worker.work_once()


def test_a_wait_ends_after_its_time(client: Client) -> None:
    operation = client.create_context(document("patient"), wait=False)
    assert client.wait_operation(operation.name, 0.1) == client.get_operation(operation.name)
    client.cancel_operation(operation.name)


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
