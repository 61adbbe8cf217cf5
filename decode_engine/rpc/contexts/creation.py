"""From requests for contexts to jobs in the queue: every check of what a client sends, with its bounds."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np

from decode_engine.errors import PromptTooLongError
from decode_engine.rpc.answers.prompting import StoredMessages, parse_messages
from decode_engine.rpc.contexts.listing import parse_name, require_own_labels, seconds_of
from index_store.errors import (
    ContextNotFoundError,
    InvalidArgumentError,
    JobNotFoundError,
    JobUnfinishedError,
    ManifestError,
    NameTakenError,
    SparseKVError,
)
from index_store.family.parents import EXACT, child_id, parent_of
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import (
    MOST_METHODS,
    MOST_PRIORITY,
    MOST_REQUEST_CHARACTERS,
    JobOrder,
    JobPhase,
    JobProgress,
    JobRecord,
    JobState,
    ReadingOptions,
)
from index_store.jobs.uploads import Uploads
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.presets import get_method
from index_store.models.conversation.messages import Conversation
from index_store.models.tokenizer import Tokenizer
from index_store.store.catalog import Store, require_free
from index_store.store.clean_up import StoreRoom
from index_store.store.description.callers import OPERATOR, Caller
from index_store.store.description.context_id import ModelIdentity, context_id
from index_store.store.description.dtypes import AS_DTYPE, INT8, ROW_CODINGS
from index_store.store.description.json_fields import check_labels
from index_store.store.description.manifest import SHORTEST_TTL, Manifest, require_dtype, require_model
from index_store.store.zarr_io import ContextFiles
from sparsekv.v1 import context_pb2 as pb


def unattended(queue: JobQueue, record: JobRecord) -> str:
    """A sentence where no worker takes jobs of the record's model now, so that it would wait for ever; "" otherwise."""
    if queue.attended(record.order.model):
        return ""
    return (
        f"no worker makes contexts of model {record.order.model_name!r} now; start one beside the store "
        "(`prefill-worker serve`), or the server with --prefill: it takes this up"
    )


MOST_NAME_CHARACTERS = 500
MOST_METHOD_CHARACTERS = 128

logger = logging.getLogger(__name__)

_UPLOADS = "uploads/"
_TITLE_CHARACTERS = 60
_FULL_TITLE = 4000  # characters of a document that its title is looked for in


@dataclass(frozen=True, slots=True)
class Document:
    """What a model is to read. text: to call it by. conversation: what is kept of messages, None for a text.

    parent: what it continues, with all of its tokens in `before`; None where it stands alone. ids: those that follow.
    rows: how exact rows are to be stored.
    """

    ids: Sequence[int]
    text: str
    conversation: bytes | None = None
    parent: Manifest | None = None
    before: Sequence[int] = ()
    rows: str = AS_DTYPE

    def reading(self) -> dict[str, object]:
        """How it is read, as far as that counts for the context's id."""
        options = ReadingOptions(rows=self.rows).describe()
        return options if self.conversation is None else {**options, "messages": True}


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where contexts are ordered. identity, tokenizer: the served model's. dtype: of stored keys and values. room: what
    the store may hold. caller: who orders. allow: asks whether so many tokens may be read for a tenant, and raises
    QuotaExceededError."""

    store: Store
    queue: JobQueue
    uploads: Uploads
    identity: ModelIdentity
    tokenizer: Tokenizer
    dtype: str
    room: StoreRoom
    caller: Caller = OPERATOR
    allow: Callable[[str, int], None] = lambda tenant, tokens: None

    def order(
        self,
        request: pb.CreateContextRequest,
        check: Callable[[], None] = lambda: None,
        traceparent: str = "",
    ) -> JobRecord:
        """Queues a job for a request, or finds the one that there is already. Takes as long as tokenising takes.

        check: called now and then meanwhile; what it raises ends it. traceparent: of the span that this belongs to.
        Raises InvalidArgumentError that names the field, PromptTooLongError, MethodUnsupportedError,
        PermissionDeniedError for what the caller may not, NameTakenError, UploadNotFoundError, QuotaExceededError,
        StoreBoundError, QueueFullError, and what the store raises.
        """
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        kept = self._kept(request) if request.WhichOneof("source") == "again" else None
        if kept is not None:
            request = _filled(request, kept[0])
        methods = _methods(request.methods)
        _check_texts(request)
        labels = _labels(request)
        require_own_labels(self.caller, labels)
        renew = _seconds(request, "renew")
        ttl = renew if (given := _seconds(request, "ttl")) is None else given
        tenant = self.caller.tenant
        job_id = _job_id(request.request_id, tenant)
        there = self.queue.repeated(job_id, request.request_id, digest)
        if there is not None and not self._ended(there):
            self.allow(tenant, 0)
            return there
        rows = self._rows(request)
        document = replace(self._document(request, check) if kept is None else self._again(*kept), rows=rows)
        messages, parent = document.conversation, document.parent
        order = JobOrder(
            context=self._context_id(document),
            model=self.identity.fingerprint,
            model_name=self.identity.name,
            name=request.display_name,
            title=_title(document.text),
            methods=methods if parent is None else parent.methods or (DEFAULT_METHOD,),
            dtype=self.dtype,
            ttl=ttl,
            renew=renew,
            tokens=len(document.ids),
            conversation="" if messages is None else hashlib.sha256(messages).hexdigest(),
            parent="" if parent is None else parent.id,
            owner=self.caller.name,
            tenant=tenant if parent is None else parent.tenant,
            labels=labels,
            rows=document.rows,
            moves=request.move_name,
        )
        self._check_name(order)
        self._check_end(order)
        record = JobRecord(
            id=job_id,
            order=order,
            created_at=self.queue.now(),
            request=request.request_id,
            digest=digest,
            priority=request.priority,
            traceparent=traceparent,
        )
        if self._there(order):
            self.allow(order.tenant, 0)
            record = self._done(record)
        else:
            kind = (self.identity, order.dtype, order.tokens, () if order.parent else order.methods)
            self.room.require(self.room.needed(order.context, *kind), order.tenant, self._coming(order))
            self.allow(order.tenant, order.tokens)
        if there is not None:
            with suppress(JobNotFoundError, JobUnfinishedError):  # another repeat was first
                self.queue.remove(there.id)
        added = self.queue.add(record, np.asarray(document.ids, dtype=np.uint32), messages)
        if added.open and (waiting := unattended(self.queue, added)):
            logger.warning("operation %s waits: %s", added.id, waiting)
        if request.upload:
            self.uploads.remove(request.upload.removeprefix(_UPLOADS), tenant)
        return added

    def _context_id(self, document: Document) -> str:
        if document.parent is None:
            reading, tenant = document.reading(), self.caller.tenant
            return context_id(self.identity, self.dtype, reading, "", document.ids, tenant)
        ids = [*document.before[: document.parent.token_count], *document.ids]
        return child_id(document.parent, EXACT, ids, messages=document.conversation is not None)

    def _rows(self, request: pb.CreateContextRequest) -> str:
        rows: str = request.rows or AS_DTYPE
        if rows not in ROW_CODINGS:
            raise InvalidArgumentError(
                f"rows is {rows[:80]!r}, expected one of {', '.join(ROW_CODINGS)}, or nothing", field="rows"
            )
        if rows == INT8 and (request.parent or not self.identity.searched_layers):
            reason = (
                "a context that continues another one, whose few rows stay"
                if request.parent
                else f"model {self.identity.name!r}, with windows or an index of its own, whose rows stay"
            )
            raise InvalidArgumentError(f"rows is int8, of {reason} as they are; leave it out", field="rows")
        return rows

    def _document(self, request: pb.CreateContextRequest, check: Callable[[], None]) -> Document:
        source = request.WhichOneof("source")
        if source is None:
            raise InvalidArgumentError(
                "the document is missing, expected one of text, token_ids, messages, upload, again",
                field="source",
            )
        if request.parent:
            document = self._continuation(request, source, check)
        elif source == "token_ids":
            document = self._from_tokens(request.token_ids.ids)
        elif source == "messages":
            document = self._from_messages(Conversation(*parse_messages(request.messages)), check)
        else:
            text = self._text(request, source, check)
            document = Document([*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)], text)
        parent = document.parent
        self._check_fits(len(document.ids) + (0 if parent is None else parent.token_count))
        if not document.ids:
            raise InvalidArgumentError(f"{source} has no tokens, expected at least one", field=source)
        return document

    def _kept(self, request: pb.CreateContextRequest) -> tuple[Manifest, ContextFiles]:
        """What a context of the caller's was made of, which has expired, or was removed for others' room."""
        ref = request.again.removeprefix("contexts/")
        if request.parent or not ref:
            raise InvalidArgumentError(
                "again names the context that is made again, and goes with no parent", field="again"
            )
        with suppress(ContextNotFoundError):
            there = self.store.seen_by(self.caller).manifest(
                self.store.seen_by(self.caller).resolve(ref, self.identity.fingerprint)
            )
            if there.tenant == self.caller.tenant:
                require_model(there, self.identity)
                return there, self.store.files(there)
        manifest = self.store.ended.find(ref, self.caller.tenant, self.identity.fingerprint)
        if manifest is None:
            raise ContextNotFoundError(
                f"nothing is kept of a context {ref[:600]!r}; send its document again", context=ref[:600]
            )
        return manifest, self.store.ended.files(manifest)

    def _again(self, manifest: Manifest, files: ContextFiles) -> Document:
        """The document that a context was made of. Raises InvalidArgumentError where an order makes another context of
        it, ParentMissingError, and what reading it raises."""
        base = parent_of(self.store, manifest)
        before = () if base is None else StoredMessages(self.store, base).tokens()
        with files as context:
            ids, messages = context.token_ids().tolist(), context.conversation()
        document = Document(ids, manifest.name, messages, base, before, manifest.rows)
        if self._context_id(document) != manifest.id:
            raise InvalidArgumentError(
                f"context {manifest.id[:12]} was made in a way that no order has (a salt, approximate attention, "
                "another dtype, an answer that was kept); send its document again, or make it as it was made",
                field="again",
            )
        return document

    def _text(self, request: pb.CreateContextRequest, source: str, check: Callable[[], None]) -> str:
        text: str = request.text if source == "text" else self._uploaded(request.upload)
        if not text.strip():
            raise InvalidArgumentError(f"{source} is blank, expected words", field=source)
        self._check_fits(self.tokenizer.at_least(text, self.identity.max_positions, check))
        return text

    def _continuation(
        self, request: pb.CreateContextRequest, source: str, check: Callable[[], None]
    ) -> Document:
        """What follows a stored context; of one that continues another itself, with its own tokens before."""
        if request.methods:
            raise InvalidArgumentError(
                "methods are given beside a parent, whose indexes the context has; leave them out",
                field="methods",
            )
        seen = self.store.seen_by(self.caller)
        named = seen.manifest(parse_name(request.parent, "parent"))
        seen.require_own(named.id)
        self.store.check_expiry(named)
        require_model(named, self.identity)
        require_dtype(named, self.dtype)
        base = parent_of(self.store, named) or named
        stored = StoredMessages(self.store, named)
        before = stored.tokens()
        if source == "messages":
            new, tools = parse_messages(request.messages)
            known = stored.conversation()
            if known is None or tools:
                raise InvalidArgumentError(
                    "messages follow a parent that was made of messages, and have its tools; continue others by text",
                    field="parent" if known is None else "messages.tools",
                )
            ids, kept = self.tokenizer.extend_conversation(known, new, lambda: before)
            document = Document(ids, "\n".join(message.content for message in new), kept.to_bytes())
        elif source == "token_ids":
            document = self._from_tokens(request.token_ids.ids)
        else:
            text = self._text(request, source, check)
            document = Document(self.tokenizer.encode_behind(text), text)
        if not document.ids:
            raise InvalidArgumentError(f"{source} has no tokens, expected at least one", field=source)
        return replace(document, ids=[*before[base.token_count :], *document.ids], parent=base, before=before)

    def _from_tokens(self, ids: Sequence[int]) -> Document:
        self._check_fits(len(ids))
        if ids and max(ids) >= self.identity.vocab_size:
            raise InvalidArgumentError(
                f"token_ids contains {max(ids)}, expected ids of 0 to {self.identity.vocab_size - 1}",
                field="token_ids",
            )
        return Document(ids, self.tokenizer.decode(list(ids[:200])))

    def _from_messages(self, conversation: Conversation, check: Callable[[], None]) -> Document:
        said = "\n".join(message.content for message in conversation.messages)
        self._check_fits(self.tokenizer.at_least(said, self.identity.max_positions, check))
        ids, stored = self.tokenizer.begin_conversation(conversation)
        return Document(ids, said, stored.to_bytes())

    def _uploaded(self, name: str) -> str:
        if not name.startswith(_UPLOADS):
            raise InvalidArgumentError(
                f"upload is {name[:100]!r}, expected {_UPLOADS} and 32 hexadecimal digits", field="upload"
            )
        data = self.uploads.read(name.removeprefix(_UPLOADS), self.caller.tenant)
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InvalidArgumentError(
                f"the uploaded document is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x}); "
                "convert it first",
                field="upload",
            ) from None

    def _check_fits(self, count: int) -> None:
        if count > self.identity.max_positions:
            raise PromptTooLongError(
                f"the document has at least {count} tokens, more than the {self.identity.max_positions} positions of "
                f"model {self.identity.name!r}; shorten it",
                tokens=count,
                max_positions=self.identity.max_positions,
            )

    def _check_name(self, order: JobOrder) -> None:
        """Raises NameTakenError where another context has the name, or is to have it."""
        if not order.name or order.moves:
            return
        require_free(self.store, order.name, order.model, order.context, order.tenant)
        wanted = (order.name, order.model, order.tenant)
        for job in self.queue.entries():
            made = job.order if isinstance(job, JobRecord) and job.open else order
            if made.context != order.context and (made.name, made.model, made.tenant) == wanted:
                raise NameTakenError(
                    f"the name {order.name[:100]!r} is to be that of context {made.context[:12]}, which operation "
                    f"{job.id} makes; choose another one, or say that it moves (move_name)",
                    name=order.name,
                    context=made.context,
                )

    def _check_end(self, order: JobOrder) -> None:
        """Raises PermissionDeniedError where a context that is there would end sooner, which takes the right delete."""
        if order.ttl is None or order.parent:  # a child that is there keeps the later end
            return
        try:
            end = self.store.manifest(order.context).expires_at
        except SparseKVError:  # there is nothing that would end
            return
        if end is None or self.queue.now() + timedelta(seconds=order.ttl) < end:
            self.caller.require("delete")

    def _ended(self, record: JobRecord) -> bool:
        """Whether a job made what had a time to live, and that is over."""
        if record.state is not JobState.DONE or record.order.ttl is None:
            return False
        try:
            return self.store.expired(self.store.manifest(record.order.context))
        except ContextNotFoundError:
            return True

    def _there(self, order: JobOrder) -> bool:
        """Whether the store has the context as it is wanted, and nothing is left to do."""
        if order.ttl is not None:
            return False
        try:
            manifest = self.store.check(order.context)
        except SparseKVError:  # not there, or to be made again
            return False
        return (
            (not order.name or (order.name == manifest.name and not order.moves))
            and set(order.methods) <= set(manifest.methods)
            and order.labels.items() <= manifest.labels.items()
        )

    def _coming(self, order: JobOrder) -> int:
        """Bytes that contexts will take which are being made for the order's tenant, where it has a quota of them."""
        if self.room.quota(order.tenant) is None:
            return 0
        jobs = (job.order for job in self.queue.entries() if isinstance(job, JobRecord) and job.open)
        return sum(
            self.room.needed(
                made.context, self.identity, made.dtype, made.tokens, () if made.parent else made.methods
            )
            for made in jobs
            if made.tenant == order.tenant and made.context != order.context and not made.whole
        )

    def _done(self, record: JobRecord) -> JobRecord:
        progress = JobProgress(
            JobPhase.VERIFYING, record.order.tokens, self.identity.layers, self.identity.layers
        )
        return replace(record, state=JobState.DONE, progress=progress, ended_at=record.created_at)


def _filled(request: pb.CreateContextRequest, kept: Manifest) -> pb.CreateContextRequest:
    """The request, with what it says nothing of as it was of a context."""
    filled = pb.CreateContextRequest(
        display_name=kept.name,
        rows=kept.rows,
        methods=() if request.methods or kept.parent is not None else kept.methods,
        labels=kept.labels,
    )
    filled.MergeFrom(request)
    if not request.HasField("renew") and kept.renew is not None:
        filled.renew.FromNanoseconds(round(kept.renew * 1e9))
    if not (request.HasField("ttl") or filled.HasField("renew")) and kept.expires_at is not None:
        filled.ttl.FromTimedelta(max(kept.expires_at - kept.created_at, SHORTEST_TTL))
    return filled


def _methods(given: Sequence[str]) -> tuple[str, ...]:
    if not given:
        return (DEFAULT_METHOD,)
    if len(given) > MOST_METHODS or len(set(given)) != len(given):
        raise InvalidArgumentError(
            f"methods has {len(given)} names, expected at most {MOST_METHODS} different ones", field="methods"
        )
    for name in given:
        if not 0 < len(name) <= MOST_METHOD_CHARACTERS:
            raise InvalidArgumentError(
                f"a name in methods has {len(name)} characters, expected 1 to {MOST_METHOD_CHARACTERS}",
                field="methods",
            )
    return tuple(get_method(name).name for name in given)


def _check_texts(request: pb.CreateContextRequest) -> None:
    for field, most in (("display_name", MOST_NAME_CHARACTERS), ("request_id", MOST_REQUEST_CHARACTERS)):
        text: str = getattr(request, field)
        if len(text) > most or not text.isprintable():
            raise InvalidArgumentError(
                f"{field} is {text[:80]!r} of {len(text)} characters, expected at most {most} printable ones",
                field=field,
            )
    if request.move_name and not request.display_name:
        raise InvalidArgumentError(
            "move_name is set without display_name, which says what moves", field="move_name"
        )
    if abs(request.priority) > MOST_PRIORITY:
        raise InvalidArgumentError(
            f"priority is {request.priority}, expected -{MOST_PRIORITY} to {MOST_PRIORITY}", field="priority"
        )


def _labels(request: pb.CreateContextRequest) -> dict[str, str]:
    labels = dict(request.labels)
    try:
        check_labels("labels", labels)
    except ManifestError as error:
        raise InvalidArgumentError(error.message, field="labels") from None
    return labels


def _seconds(request: pb.CreateContextRequest, name: str) -> float | None:
    if not request.HasField(name):
        return None
    return seconds_of(getattr(request, name), name)


def _title(text: str) -> str:
    words = " ".join(text[:_FULL_TITLE].split())
    shown = "".join(letter for letter in words if letter.isprintable())
    return shown[:_TITLE_CHARACTERS].strip() or "unnamed"


def _job_id(request_id: str, tenant: str) -> str:
    """Of one request of a tenant always the same, so that a repeat finds it."""
    if not request_id:
        return secrets.token_hex(16)
    of = f"\0{tenant}" if tenant else ""
    return hashlib.sha256(f"request\0{request_id}{of}".encode()).hexdigest()[:32]
