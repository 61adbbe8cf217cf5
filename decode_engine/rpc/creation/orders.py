"""From requests for contexts to jobs in the queue: every check of what a client sends, with its bounds."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from decode_engine.errors import PromptTooLongError
from decode_engine.rpc.contexts.wire_messages import parse_conversation
from index_store.errors import InvalidArgumentError, SparseKVError
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
    check_ttl,
)
from index_store.jobs.reading_options import ReadingOptions
from index_store.jobs.uploads import Uploads
from index_store.methods.presets import DEFAULT_METHOD, get_method
from index_store.models.conversation.messages import Conversation
from index_store.models.loading import Tokenizer
from index_store.store.catalog import Store
from index_store.store.context_id import ModelIdentity, context_id
from sparsekv.v1 import context_pb2

MOST_NAME_CHARACTERS = 500
MOST_METHOD_CHARACTERS = 128

_UPLOADS = "uploads/"
_TITLE_CHARACTERS = 60
_FULL_TITLE = 4000  # characters of a document that its title is looked for in


def _no_check() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Document:
    """What a model is to read. text: to call it by. conversation: what is kept of messages, None for a text."""

    ids: Sequence[int]
    text: str
    conversation: bytes | None = None

    def reading(self) -> dict[str, object]:
        """How it is read, as far as that counts for the context's id."""
        options = ReadingOptions().describe()
        return options if self.conversation is None else {**options, "messages": True}


@dataclass(frozen=True, slots=True)
class Workshop:
    """Where contexts are ordered. identity, tokenizer: the served model's. dtype: of stored keys and values."""

    store: Store
    queue: JobQueue
    uploads: Uploads
    identity: ModelIdentity
    tokenizer: Tokenizer
    dtype: str

    def order(
        self, request: context_pb2.CreateContextRequest, check: Callable[[], None] = _no_check
    ) -> JobRecord:
        """Queues a job for a request, or finds the one that there is already. Takes as long as tokenising takes.

        check: called now and then meanwhile; what it raises ends it. Raises InvalidArgumentError that names the field,
        PromptTooLongError, MethodUnsupportedError, UploadNotFoundError, QueueFullError, and what the store raises.
        """
        methods = _methods(request.methods)
        _check_texts(request)
        ttl = _ttl(request)
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        job_id = _job_id(request.request_id)
        there = self.queue.repeated(job_id, request.request_id, digest)
        if there is not None:
            return there
        document = self._document(request, check)
        kept = document.conversation
        order = JobOrder(
            context=context_id(self.identity, self.dtype, document.reading(), "", document.ids),
            model=self.identity.fingerprint,
            model_name=self.identity.name,
            name=request.display_name,
            title=_title(document.text),
            methods=methods,
            dtype=self.dtype,
            ttl=ttl,
            tokens=len(document.ids),
            conversation="" if kept is None else hashlib.sha256(kept).hexdigest(),
        )
        record = JobRecord(
            id=job_id,
            order=order,
            created_at=self.queue.now(),
            request=request.request_id,
            digest=digest,
            priority=request.priority,
        )
        if self._there(order):
            record = self._done(record)
        added = self.queue.add(record, np.asarray(document.ids, dtype=np.uint32), kept)
        if request.upload:
            self.uploads.remove(request.upload.removeprefix(_UPLOADS))
        return added

    def _document(self, request: context_pb2.CreateContextRequest, check: Callable[[], None]) -> Document:
        """What the model is to read."""
        source = request.WhichOneof("source")
        if source is None:
            raise InvalidArgumentError(
                "the document is missing, expected one of text, token_ids, messages, upload", field="source"
            )
        if source == "token_ids":
            document = self._from_tokens(request.token_ids.ids)
        elif source == "messages":
            document = self._from_messages(parse_conversation(request.messages), check)
        else:
            text = request.text if source == "text" else self._uploaded(request.upload)
            if not text.strip():
                raise InvalidArgumentError(f"{source} is blank, expected words", field=source)
            self._check_fits(self.tokenizer.at_least(text, self.identity.max_positions, check))
            document = Document([*self.tokenizer.prefix_ids, *self.tokenizer.encode(text)], text)
        self._check_fits(len(document.ids))
        if not document.ids:
            raise InvalidArgumentError(f"{source} has no tokens, expected at least one", field=source)
        return document

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
        data = self.uploads.read(name.removeprefix(_UPLOADS))
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

    def _there(self, order: JobOrder) -> bool:
        """Whether the store has the context as it is wanted, and nothing is left to do."""
        if order.ttl is not None:
            return False
        try:
            with self.store.open(order.context) as context:
                manifest = context.manifest
        except SparseKVError:  # not there, or to be made again
            return False
        return order.name in ("", manifest.name) and set(order.methods) <= set(manifest.methods)

    def _done(self, record: JobRecord) -> JobRecord:
        progress = JobProgress(
            JobPhase.VERIFYING, record.order.tokens, self.identity.layers, self.identity.layers
        )
        return JobRecord(
            id=record.id,
            order=record.order,
            created_at=record.created_at,
            request=record.request,
            digest=record.digest,
            priority=record.priority,
            state=JobState.DONE,
            progress=progress,
            ended_at=record.created_at,
        )


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


def _check_texts(request: context_pb2.CreateContextRequest) -> None:
    for field, most in (("display_name", MOST_NAME_CHARACTERS), ("request_id", MOST_REQUEST_CHARACTERS)):
        text: str = getattr(request, field)
        if len(text) > most or not text.isprintable():
            raise InvalidArgumentError(
                f"{field} is {text[:80]!r} of {len(text)} characters, expected at most {most} printable ones",
                field=field,
            )
    if abs(request.priority) > MOST_PRIORITY:
        raise InvalidArgumentError(
            f"priority is {request.priority}, expected -{MOST_PRIORITY} to {MOST_PRIORITY}", field="priority"
        )


def _ttl(request: context_pb2.CreateContextRequest) -> float | None:
    if not request.HasField("ttl"):
        return None
    seconds = request.ttl.seconds + request.ttl.nanos / 1e9
    check_ttl(seconds if math.isfinite(seconds) else -1.0, "ttl")
    return seconds


def _title(text: str) -> str:
    """The first words of a document, to call it by."""
    words = " ".join(text[:_FULL_TITLE].split())
    shown = "".join(letter for letter in words if letter.isprintable())
    return shown[:_TITLE_CHARACTERS].strip() or "unnamed"


def _job_id(request_id: str) -> str:
    """Of one request always the same, so that a repeat finds it."""
    if not request_id:
        return secrets.token_hex(16)
    return hashlib.sha256(f"request\0{request_id}".encode()).hexdigest()[:32]
