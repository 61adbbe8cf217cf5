"""Jobs of the queue as `google.longrunning` operations: names, pages, progress, results and errors."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Sequence

from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from decode_engine.errors import CancelledError
from decode_engine.rpc.transport.status import Paths, status_of, to_status
from index_store.errors import InvalidArgumentError
from index_store.jobs.job_queue import BrokenJob, Entry, JobQueue
from index_store.jobs.job_record import JobPhase, JobRecord, JobState, is_job_id
from sparsekv.v1 import context_pb2

COLLECTION = "operations/"
DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

_PHASES = {
    JobPhase.PREPARING: context_pb2.CreateContextMetadata.PREPARING,
    JobPhase.READING: context_pb2.CreateContextMetadata.READING,
    JobPhase.INDEXING: context_pb2.CreateContextMetadata.INDEXING,
    JobPhase.VERIFYING: context_pb2.CreateContextMetadata.VERIFYING,
}

Describe = Callable[[str], context_pb2.Context]
"""The context of an id, as the API shows it, whether it is there or not."""


def parse_operation(name: str) -> str:
    """The job's id in an operation's name. Raises InvalidArgumentError for anything else."""
    id_ = name.removeprefix(COLLECTION)
    if not name.startswith(COLLECTION) or not is_job_id(id_):
        raise InvalidArgumentError(
            f"name is {name[:100]!r}, expected {COLLECTION} and 32 hexadecimal digits", field="name"
        )
    return id_


class Operations:
    """The operations of a queue. paths: what no client is told."""

    def __init__(self, queue: JobQueue, describe: Describe, paths: Paths) -> None:
        self._queue = queue
        self._describe = describe
        self._paths = paths

    def get(self, id_: str) -> operations_pb2.Operation:
        """Raises JobNotFoundError."""
        return self.show(self._queue.entry(id_))

    def page(self, request: operations_pb2.ListOperationsRequest) -> operations_pb2.ListOperationsResponse:
        """One page of all operations, newest first. Raises InvalidArgumentError."""
        if request.name not in ("", "operations"):
            raise InvalidArgumentError(f"name is {request.name[:100]!r}, expected operations", field="name")
        if request.filter:
            raise InvalidArgumentError(
                f"filter is {request.filter[:100]!r}, expected none: operations cannot be filtered",
                field="filter",
            )
        if request.page_size < 0:
            raise InvalidArgumentError(
                f"page_size is {request.page_size}, expected 0 or more", field="page_size"
            )
        size = min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        all_entries = self._queue.entries()
        entries = sorted(all_entries, key=_place)
        if request.page_token:
            last = _read_token(request.page_token)
            entries = [entry for entry in entries if _place(entry) > last]
        shown = entries[:size]
        token = _write_token(_place(shown[-1])) if len(entries) > size else ""
        return operations_pb2.ListOperationsResponse(
            operations=[self.show(entry, all_entries) for entry in shown], next_page_token=token
        )

    def show(self, entry: Entry, entries: Sequence[Entry] | None = None) -> operations_pb2.Operation:
        """One operation. entries: all there are, where they are known."""
        operation = operations_pb2.Operation(name=COLLECTION + entry.id)
        if isinstance(entry, BrokenJob):
            operation.done = True
            operation.error.CopyFrom(to_status(entry.error))
            operation.error.message = self._paths.hide(operation.error.message)
            return operation
        operation.metadata.Pack(self._metadata(entry, entries))
        operation.done = not entry.open
        if entry.state is JobState.DONE:
            operation.response.Pack(self._describe(entry.order.context))
        elif entry.state is JobState.CANCELLED:
            operation.error.CopyFrom(to_status(CancelledError("the operation was cancelled")))
        elif entry.failure is not None:
            failure = entry.failure
            metadata = {name: self._paths.hide(value) for name, value in failure.metadata.items()}
            operation.error.CopyFrom(status_of(failure.reason, self._paths.hide(failure.message), metadata))
        return operation

    def _metadata(
        self, record: JobRecord, entries: Sequence[Entry] | None
    ) -> context_pb2.CreateContextMetadata:
        metadata = context_pb2.CreateContextMetadata
        order, progress = record.order, record.progress
        phase, ahead, remaining, reason = metadata.ENDED, 0, None, ""
        if record.open and self._queue.held(record.id):
            phase, remaining = _PHASES[progress.phase], progress.remaining
        elif record.open:
            phase, reason = metadata.QUEUED, unattended(self._queue, record)
            known = self._queue.entries() if entries is None else entries
            ahead = sum(
                isinstance(other, JobRecord) and other.open and other.turn < record.turn for other in known
            )
        return metadata(
            phase=phase,
            tokens_done=progress.tokens_done,
            tokens_total=order.tokens,
            bytes_written=progress.bytes_written,
            remaining=None if remaining is None else Duration(seconds=math.ceil(remaining)),
            create_time=_timestamp(record),
            jobs_ahead=ahead,
            context=f"contexts/{order.context}",
            layers_done=progress.layers_done,
            layers_total=progress.layers_total,
            owner=order.owner,
            waiting_reason=reason,
            notes=[self._paths.hide(note) for note in record.notes],
        )


def unattended(queue: JobQueue, record: JobRecord) -> str:
    """A sentence where no worker takes jobs of the record's model now, so that it would wait for ever; "" otherwise."""
    if queue.attended(record.order.model):
        return ""
    return (
        f"no worker makes contexts of model {record.order.model_name!r} now; start one beside the store "
        "(`prefill-worker serve`), or the server with --prefill: it takes this up"
    )


_Place = tuple[float, str]


def _place(entry: Entry) -> _Place:
    """Newest first, those that cannot be read last."""
    return (-entry.created_at.timestamp() if isinstance(entry, JobRecord) else math.inf, entry.id)


def _write_token(place: _Place) -> str:
    return base64.urlsafe_b64encode(json.dumps([str(place[0]), place[1]]).encode()).decode()


def _read_token(token: str) -> _Place:
    try:
        age, id_ = json.loads(base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True))
        return (float(age), str(id_))
    except (binascii.Error, ValueError, TypeError, UnicodeEncodeError, RecursionError):
        raise InvalidArgumentError(
            "page_token is not one that a server issued; pass next_page_token of the previous page unchanged, or start "
            "again without one",
            field="page_token",
        ) from None


def _timestamp(record: JobRecord) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(record.created_at)
    return stamp
