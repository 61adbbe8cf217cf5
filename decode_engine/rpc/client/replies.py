"""What a server answers, as plain values: those of `sparsekv.v1.values`, read from messages in one way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC
from functools import cache, partial
from operator import attrgetter
from typing import Any, TypeVar

from google.longrunning import operations_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from decode_engine.rpc.transport.status import error_of
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.models.conversation.messages import ToolCall
from sparsekv.v1 import context_pb2, values
from sparsekv.v1.values import ContextInfo, OperationState, Piece, Summary, TokenLogprob

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class ServerStatus(values.ServerStatus):
    """What a server does now, and did since it started; sparsekv/v1/generation.proto says what each field means."""

    @property
    def mean_batch(self) -> float:
        """Requests that generated together, over all turns in which some did."""
        return self.decode_tokens / max(self.decode_steps, 1)


@dataclass(frozen=True, slots=True)
class OperationInfo(OperationState):
    """A context that is being made, or was.

    phase: "" and create_time: None where the operation cannot be read. context: the finished context, None before and
    after an error. error: what it ended with, None otherwise.
    """

    context: ContextInfo | None = None
    error: SparseKVError | None = None

    def result(self) -> ContextInfo:
        """The context. Raises the operation's error, and InvalidArgumentError before the operation is done."""
        if self.error is not None:
            raise self.error
        if self.context is None:
            raise InvalidArgumentError(f"operation {self.name} is not done; wait for it")
        return self.context


@dataclass(frozen=True, slots=True)
class BatchItem:
    """What became of one request of a batch. index: which. texts, token_ids, summaries, tool_calls, logprobs: of its
    answers. prompt_logprobs: of the prompt's tokens but the first, where they are wanted.

    error: why it failed; the rest is what came before.
    """

    index: int
    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    summaries: tuple[Summary, ...]
    error: SparseKVError | None = None
    tool_calls: tuple[tuple[ToolCall, ...], ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def reads(kind: type[ReplyT]) -> Callable[[Message], ReplyT]:
    """What makes a plain value of that kind of its message."""
    return partial(read_reply, kind)


def read_reply(kind: type[ReplyT], message: Message, **given: object) -> ReplyT:
    """A message as a plain value; `given` are fields that it has not."""
    read = {name: read(message) for name, read in _readers(kind, message.DESCRIPTOR).items()}  # type: ignore[arg-type]
    return kind(**{**read, **given})


def read_all(kind: type[ReplyT], messages: Iterable[Message]) -> tuple[ReplyT, ...]:
    """Several of them."""
    return tuple(read_reply(kind, message) for message in messages)


def read_nothing(message: Message) -> None:
    """Of a reply that says no more than that it came."""


def read_operation(operation: operations_pb2.Operation) -> OperationInfo:
    """An operation as a plain value."""
    state, made = context_pb2.CreateContextMetadata(), context_pb2.Context()
    result = operation.WhichOneof("result")
    there = result == "response" and operation.response.Unpack(made)
    operation.metadata.Unpack(state)
    return read_reply(
        OperationInfo,
        state,
        name=operation.name,
        done=operation.done,
        context_name=state.context,
        context=read_reply(ContextInfo, made) if there else None,
        error=error_of(operation.error) if result == "error" else None,
    )


def calls_of(pieces: Iterable[Piece]) -> tuple[ToolCall, ...]:
    """The calls that pieces of one answer make together."""
    calls: list[ToolCall] = []
    for part in (part for piece in pieces for part in piece.tool_calls):
        if part.index == len(calls):
            calls.append(ToolCall(part.name, "", part.id))
        before = calls[part.index]
        calls[part.index] = replace(before, arguments=before.arguments + part.arguments_json)
    return tuple(calls)


def texts_of(pieces: Sequence[Piece]) -> list[str]:
    """The texts of all answers that there are pieces of."""
    count = max((piece.index for piece in pieces), default=-1) + 1
    return ["".join(piece.text for piece in pieces if piece.index == index) for index in range(count)]


_CLASSES: Mapping[str, type[Any]] = {**values.CLASSES, "sparsekv.v1.ServerStatus": ServerStatus}
_SPELLED = frozenset({"sparsekv.v1.Context.State"})
"""Enumerators that are said as they are, as all lists say them; others in small letters."""


@cache
def _readers(kind: Any, message: Descriptor) -> dict[str, Callable[[Any], object]]:
    """What reads the fields of a class from its message, by name; those of a summary's usage stand in itself."""
    found: dict[str, Callable[[Any], object]] = {}
    for name, default in ((each.name, each.default) for each in fields(kind)):
        if field := message.fields_by_name.get(name) or message.fields_by_name.get(name.removesuffix("_s")):
            found[name] = _reader(field, may_be_unset=default is None and field.has_presence)
        elif kind is Summary:
            found[name] = attrgetter(f"usage.{name}")
    return found


def _reader(field: FieldDescriptor, *, may_be_unset: bool) -> Callable[[Any], object]:
    """What reads a field of a message. may_be_unset: it is None then."""
    get = attrgetter(field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return lambda message: dict(sorted(get(message).items()))
    one = _one(field)
    if field.is_repeated:
        return (
            (lambda message: tuple(get(message)))
            if one is None
            else lambda message: tuple(map(one, get(message)))
        )
    read = get if one is None else lambda message: one(get(message))
    return (lambda message: read(message) if message.HasField(field.name) else None) if may_be_unset else read


def _one(field: FieldDescriptor) -> Callable[[Any], object] | None:
    if (kind := field.message_type) is not None:
        others = {
            "google.protobuf.Timestamp": lambda time: time.ToDatetime(UTC),
            "google.protobuf.Duration": lambda time: time.ToTimedelta().total_seconds(),
        }
        return others.get(kind.full_name) or reads(_CLASSES[kind.full_name])
    if (enum := field.enum_type) is not None:
        spelled = enum.full_name in _SPELLED
        names = {
            n: value.name if spelled else value.name.lower() for n, value in enum.values_by_number.items()
        }
        names[0] = ""  # not set
        return names.__getitem__
    return None
