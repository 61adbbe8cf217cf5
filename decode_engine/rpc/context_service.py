"""The services of contexts and of the operations that make them: thin handlers between messages and the store.

Handlers run on the listener's thread and never block it: what reads files goes through `Asker.run`, what waits for
memory through `Asker.run_alone`. Errors are left to the gate.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from google.longrunning import operations_pb2, operations_pb2_grpc
from google.protobuf.empty_pb2 import Empty
from msgspec import structs

from decode_engine.errors import CancelledError, UnfinishedCallError
from decode_engine.orders.events import Core, Residency
from decode_engine.rpc.contexts.creation import Workshop, unattended
from decode_engine.rpc.contexts.listing import (
    COLLECTION,
    Pager,
    changed_fields,
    find_context,
    page_size,
    parse_name,
    update_context,
)
from decode_engine.rpc.describe import describe_broken, describe_context, describe_upload
from decode_engine.rpc.door.access import Sharing
from decode_engine.rpc.transport.asker import Asker
from decode_engine.rpc.transport.status import Paths, status_of, to_status
from decode_engine.rpc.transport.work import Bound
from index_store.cli.traces import trace_id
from index_store.errors import ContextNotFoundError, InvalidArgumentError, SparseKVError
from index_store.family.parents import parent_of
from index_store.jobs.job_queue import BrokenJob, JobQueue
from index_store.jobs.job_queue import Entry as JobEntry
from index_store.jobs.job_record import JobRecord, JobState, is_job_id
from index_store.jobs.uploads import Upload, UploadWriting
from index_store.memory.placement import Placement
from index_store.store.catalog import Store
from index_store.store.description.callers import OPERATOR, Caller
from index_store.store.description.manifest import Manifest
from index_store.store.listing import BrokenContext
from sparsekv.v1 import context_pb2 as pb
from sparsekv.v1 import context_pb2_grpc

logger = logging.getLogger(__name__)

_COLLECTION, _OPERATIONS = "operations/", ("operations",)
_MAX_WARMING = 8
"""Calls that load contexts ahead of need, at once: each holds a thread while it waits."""
_MAX_ORDERING = 8
"""Calls that order contexts, at once: each holds a thread while its document is cut into tokens."""
_MAX_UPLOADING = 8
_UPLOAD_S = 600
_MAX_WAITS = 64
"""Calls that wait for operations, at once: each has the store looked into every quarter of a second."""
_LOOK_S = 0.25
_DEFAULT_WAIT_S, _LONGEST_WAIT_S = 60.0, 600.0
_BUSY_S = 2.0
"""How long an update waits for others of the same context; a job that writes it takes longer."""


@dataclass(frozen=True, slots=True)
class Library:
    """Contexts of a store. loop: on which the engine is asked; what is here is called by other threads.

    workshop: where contexts are ordered. paths: what no client is told. caller: for whom it is all there is.
    """

    store: Store
    workshop: Workshop
    core: Core
    loop: asyncio.AbstractEventLoop
    paths: Paths
    pager: Pager
    caller: Caller = OPERATOR

    def seen_by(self, caller: Caller) -> Library:
        """The same as a caller sees it."""
        store, workshop = self.store.seen_by(caller), replace(self.workshop, caller=caller)
        return replace(self, store=store, workshop=workshop, caller=caller)

    @property
    def queue(self) -> JobQueue:
        """The jobs that are there for the caller."""
        return self.workshop.queue.seen_by(self.caller)

    def describe_id(self, id_: str) -> pb.Context:
        """The context of an id as the API shows it, also where it has been deleted."""
        try:
            return self.describe([self.store.entry(id_)])[0]
        except ContextNotFoundError:
            gone = pb.Context.UNAVAILABLE
            message = "the context was made, and has been deleted since"
            return pb.Context(name=COLLECTION + id_, state=gone, state_message=message)

    def describe(self, entries: Sequence[Manifest | BrokenContext]) -> list[pb.Context]:
        """Contexts of the store as the API shows them."""
        children = Counter(entry.parent.id for entry in self.store.list() if entry.parent is not None)
        bases = [self._base(entry) for entry in entries]
        wanted = [base.id for base in bases if isinstance(base, Manifest)]
        asking = self.core.residency(wanted)
        residency = asyncio.run_coroutine_threadsafe(asking, self.loop).result()
        return [
            self._describe(entry, base, residency, children[entry.id])
            for entry, base in zip(entries, bases, strict=True)
        ]

    def _base(self, entry: Manifest | BrokenContext) -> Manifest | BrokenContext:
        if isinstance(entry, BrokenContext):
            return entry
        try:
            return parent_of(self.store, entry) or entry
        except SparseKVError as error:
            return BrokenContext(entry.id, error)

    def _describe(
        self,
        entry: Manifest | BrokenContext,
        base: Manifest | BrokenContext,
        residency: Residency,
        children: int,
    ) -> pb.Context:
        if isinstance(base, BrokenContext) or isinstance(entry, BrokenContext):
            broken = describe_broken(base if isinstance(base, BrokenContext) else entry)  # type: ignore[arg-type]
            broken.state_message = self.paths.hide(broken.state_message)
            return broken
        tuned, problem = None, ""
        try:
            tuned = self.store.default_method(base.id)
        except SparseKVError as error:
            problem = self.paths.hide(error.message)
        described = describe_context(
            base,
            tuned,
            problem,
            expired=self.store.expired(entry),
            resident=base.id in residency.ids,
            placement=Placement(residency.placements.get(base.id, Placement.DEVICE.value)),
            child=entry if entry.parent is not None else None,
            children=children,
        )
        if not self.caller.owns(entry.tenant):  # who reads it, too, and who made it, is its tenant's affair
            for name in ("owner", "readers", "parent"):
                described.ClearField(name)
        return described

    def operations(
        self, request: operations_pb2.ListOperationsRequest
    ) -> operations_pb2.ListOperationsResponse:
        """One page of all operations, newest first. Raises InvalidArgumentError."""
        if request.name not in ("", "operations"):
            raise InvalidArgumentError(f"name is {request.name[:100]!r}, expected operations", field="name")
        if request.filter:
            raise InvalidArgumentError(
                f"filter is {request.filter[:100]!r}, expected none: operations cannot be filtered",
                field="filter",
            )
        size = page_size(request)
        all_entries = self.workshop.queue.entries()
        entries = sorted(self.queue.entries(), key=_place)
        if request.page_token:
            age, id_ = self.pager.read(request.page_token, _OPERATIONS)
            last = float(age), id_
            entries = [entry for entry in entries if _place(entry) > last]
        shown = entries[:size]
        token = ""
        if len(entries) > size:
            token = self.pager.token([*map(str, _place(shown[-1]))], _OPERATIONS)
        return operations_pb2.ListOperationsResponse(
            operations=[self.operation(entry, all_entries) for entry in shown], next_page_token=token
        )

    def operation(
        self, entry: JobEntry, entries: Sequence[JobEntry] | None = None
    ) -> operations_pb2.Operation:
        """One operation. entries: all there are, where they are known."""
        operation = operations_pb2.Operation(name=_COLLECTION + entry.id)
        if isinstance(entry, BrokenJob):
            operation.done = True
            operation.error.CopyFrom(to_status(entry.error))
            operation.error.message = self.paths.hide(operation.error.message)
            return operation
        operation.metadata.Pack(self._metadata(entry, entries))
        operation.done = not entry.open
        if entry.state is JobState.DONE:
            operation.response.Pack(self.describe_id(entry.order.context))
        elif entry.state is JobState.CANCELLED:
            operation.error.CopyFrom(to_status(CancelledError("the operation was cancelled")))
        elif entry.failure is not None:
            failure = entry.failure
            metadata = {name: self.paths.hide(value) for name, value in failure.metadata.items()}
            operation.error.CopyFrom(status_of(failure.reason, self.paths.hide(failure.message), metadata))
        return operation

    def _metadata(self, record: JobRecord, entries: Sequence[JobEntry] | None) -> pb.CreateContextMetadata:
        metadata = pb.CreateContextMetadata
        order, progress = record.order, record.progress
        phase, ahead, remaining, reason = metadata.ENDED, 0, None, ""
        if record.open and self.workshop.queue.held(record.id):
            phase, remaining = getattr(metadata, progress.phase.name), progress.remaining
        elif record.open:
            phase, reason = metadata.QUEUED, unattended(self.workshop.queue, record)
            known = self.workshop.queue.entries() if entries is None else entries
            line = [other.id for other in known if isinstance(other, JobRecord) and other.open]
            ahead = line.index(record.id) if record.id in line else 0
        return metadata(
            phase=phase,
            tokens_done=progress.tokens_done,
            tokens_total=order.tokens,
            bytes_written=progress.bytes_written,
            remaining=None if remaining is None else timedelta(seconds=math.ceil(remaining)),
            create_time=record.created_at,
            jobs_ahead=ahead,
            context=f"contexts/{order.context}",
            layers_done=progress.layers_done,
            layers_total=progress.layers_total,
            owner=order.owner,
            waiting_reason=reason,
            notes=[self.paths.hide(note) for note in record.notes],
        )


def _operation_id(name: str) -> str:
    """The job's id in an operation's name. Raises InvalidArgumentError for anything else."""
    id_ = name.removeprefix(_COLLECTION)
    if not name.startswith(_COLLECTION) or not is_job_id(id_):
        raise InvalidArgumentError(
            f"name is {name[:100]!r}, expected {_COLLECTION} and 32 hexadecimal digits", field="name"
        )
    return id_


def _place(entry: JobEntry) -> tuple[float, str]:
    """Newest first, those that cannot be read last."""
    return (-entry.created_at.timestamp() if isinstance(entry, JobRecord) else math.inf, entry.id)


class ContextService(context_pb2_grpc.ContextServiceServicer):
    """Lists, describes, changes, loads and deletes stored contexts."""

    def __init__(self, library: Library, model: str, sharing: Sharing) -> None:
        """model: fingerprint of the one that is served."""
        self._library = library
        self._model = model
        self._warming = Bound(_MAX_WARMING, "contexts are being loaded ahead of need", sharing)
        self._ordering = Bound(_MAX_ORDERING, "contexts are being ordered", sharing)
        self._uploading = Bound(_MAX_UPLOADING, "documents are being uploaded", sharing)

    async def CreateContext(self, request: pb.CreateContextRequest, call: Asker) -> operations_pb2.Operation:
        def create() -> operations_pb2.Operation:
            traceparent = call.traceparent if trace_id(call.traceparent) else ""
            library = self._library.seen_by(call.caller)
            return library.operation(library.workshop.order(request, call.check, traceparent))

        # Who leaves has the order made or not made, and finds out by its request_id.
        operation = await self._ordering.run(partial(call.run_alone, create), call.caller.tenant)
        call.note(operation=operation.name)
        return operation

    async def UploadDocument(
        self, requests: AsyncIterator[pb.UploadDocumentRequest], call: Asker
    ) -> pb.Upload:
        uploads = self._library.workshop.uploads
        async with self._uploading.place(call.caller.tenant):
            writing = await call.run(partial(uploads.begin, call.caller.tenant))
            try:
                upload = await self._receive(requests, writing, call)
            except BaseException:
                await self._discard(writing, call)
                raise
        call.note(upload=upload.id)
        return describe_upload(upload)

    async def _receive(
        self, requests: AsyncIterator[pb.UploadDocumentRequest], writing: UploadWriting, call: Asker
    ) -> Upload:
        sha256 = ""
        try:
            async with asyncio.timeout(_UPLOAD_S):
                async for request in requests:
                    sha256 = request.sha256 or sha256
                    await call.run(partial(writing.add, request.data))
            return await call.run(partial(writing.finish, sha256))
        except TimeoutError as error:
            raise UnfinishedCallError(
                f"the document did not come within {_UPLOAD_S} s; send it anew"
            ) from error

    async def _discard(self, writing: UploadWriting, call: Asker) -> None:
        """Gives an upload up; what fails here is logged, since its sender is told what failed before."""
        try:
            await asyncio.shield(call.run_alone(writing.discard))
        except Exception:
            logger.exception("what had come of an upload was not removed")

    async def GetContext(self, request: pb.GetContextRequest, call: Asker) -> pb.Context:
        if request.name:
            call.note(context=parse_name(request.name))
        library = self._library.seen_by(call.caller)

        def get() -> pb.Context:
            return library.describe([find_context(library.store, request, self._model)])[0]

        context = await call.run(get)
        call.note(context=context.name.removeprefix(COLLECTION))
        return context

    async def ListContexts(self, request: pb.ListContextsRequest, call: Asker) -> pb.ListContextsResponse:
        library = self._library.seen_by(call.caller)

        def list_page() -> pb.ListContextsResponse:
            page, token = library.pager.page(library.store, request)
            return pb.ListContextsResponse(contexts=library.describe(page), next_page_token=token)

        return await call.run(partial(library.store.bounded, list_page))

    async def UpdateContext(self, request: pb.UpdateContextRequest, call: Asker) -> pb.Context:
        library = self._library.seen_by(call.caller)
        id_ = parse_name(request.context.name, "context.name")
        call.note(context=id_)
        work = partial(update_context, library.store, id_, request, _BUSY_S, call.caller)
        changed = await call.run(work)
        if "readers" in changed_fields(request):
            call.note(readers=list(changed.readers))
        await library.core.changed(id_)
        return (await call.run(partial(library.describe, [changed])))[0]

    async def DeleteContext(self, request: pb.DeleteContextRequest, call: Asker) -> Empty:
        library = self._library.seen_by(call.caller)
        id_ = parse_name(request.name)
        call.note(context=id_)
        try:
            await call.run(partial(library.store.require_own, id_))
            try:
                await call.run(partial(library.store.delete, id_, recursive=request.force))
            finally:
                await library.core.changed(id_)
        except ContextNotFoundError:
            if not request.allow_missing:
                raise
        return Empty()

    async def WarmContext(self, request: pb.WarmContextRequest, call: Asker) -> pb.WarmContextResponse:
        library = self._library.seen_by(call.caller)
        id_ = parse_name(request.name)
        call.note(context=id_)
        deadline_ns = None if call.deadline_s is None else int(call.deadline_s * 1e9)
        async with self._warming.place(call.caller.tenant):
            await call.run(partial(library.store.manifest, id_))
            warmed = await library.core.warm(id_, deadline_ns)
            context = await call.run(partial(library.describe_id, id_))
            return pb.WarmContextResponse(context=context, **structs.asdict(warmed))


class OperationsService(operations_pb2_grpc.OperationsServicer):  # type: ignore[misc]  # without types
    """Lists, waits for, cancels and forgets the operations that make contexts."""

    def __init__(self, library: Library, sharing: Sharing) -> None:
        self._library = library
        self._waiting = Bound(_MAX_WAITS, "calls wait for operations", sharing)

    async def ListOperations(
        self, request: operations_pb2.ListOperationsRequest, call: Asker
    ) -> operations_pb2.ListOperationsResponse:
        library = self._library.seen_by(call.caller)
        return await call.run(partial(library.store.bounded, partial(library.operations, request)))

    async def GetOperation(
        self, request: operations_pb2.GetOperationRequest, call: Asker
    ) -> operations_pb2.Operation:
        id_ = _operation_id(request.name)
        call.note(operation=request.name)
        return await self._look(id_, call)

    async def WaitOperation(
        self, request: operations_pb2.WaitOperationRequest, call: Asker
    ) -> operations_pb2.Operation:
        id_ = _operation_id(request.name)
        call.note(operation=request.name)
        asked = request.timeout.ToTimedelta().total_seconds() if request.HasField("timeout") else None
        wait_s = _DEFAULT_WAIT_S if asked is None else min(max(asked, 0.0), _LONGEST_WAIT_S)
        end = time.monotonic() + wait_s
        async with self._waiting.place(call.caller.tenant):
            while True:
                operation = await self._look(id_, call)
                left = end - time.monotonic()
                if operation.done or left <= 0:
                    return operation
                await asyncio.sleep(min(left, _LOOK_S))

    async def CancelOperation(self, request: operations_pb2.CancelOperationRequest, call: Asker) -> Empty:
        queue = self._library.seen_by(call.caller).queue
        id_ = _operation_id(request.name)
        call.note(operation=request.name)
        await call.run(partial(queue.cancel, id_))
        return Empty()

    async def DeleteOperation(self, request: operations_pb2.DeleteOperationRequest, call: Asker) -> Empty:
        queue = self._library.seen_by(call.caller).queue
        id_ = _operation_id(request.name)
        call.note(operation=request.name)
        await call.run(partial(queue.remove, id_))
        return Empty()

    async def _look(self, id_: str, call: Asker) -> operations_pb2.Operation:
        library = self._library.seen_by(call.caller)

        def look() -> operations_pb2.Operation:
            return library.operation(library.queue.entry(id_))

        return await call.run(partial(library.store.bounded, look))
