"""What a server answers, as plain values: the fields of the API's messages under the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from index_store.errors import SparseKVError
from index_store.models.conversation.messages import ToolCall
from sparsekv.v1 import context_pb2, generation_pb2

ReplyT = TypeVar("ReplyT")


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """An index of a stored context."""

    name: str
    kind: str
    parameters: Mapping[str, str]
    bytes_per_token: float
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ContextInfo:
    """A stored context.

    state: "READY", "EXPIRED", "CORRUPT", "UNSUPPORTED" or "UNAVAILABLE" (now); state_message says why, or what to do.
    default_method, default_budget: of a request that says neither; the budget is text for people, "" for everything.
    tuned: whether they were chosen by tuning. placement: where it is in memory or would be, "device", "hybrid" or
    "host"; "" where a server does not say. is_conversation: whether it was made of messages. parent: name of the
    context that it continues, whose tokens count in parent_token_count; "" without one. children: how many continue it.
    owner: name of the token by which it was made; "" where none was asked for. rows: how exact rows are stored, "dtype"
    or "int8".
    """

    name: str
    display_name: str
    model: str
    architecture: str
    token_count: int
    dtype: str
    kv_bytes: int
    index_bytes: int
    state: str
    state_message: str
    create_time: datetime
    expire_time: datetime | None
    resident: bool
    methods: tuple[str, ...]
    default_method: str
    default_budget: str
    tuned: bool
    indexes: tuple[IndexInfo, ...]
    dense_layers: tuple[int, ...]
    placement: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = False
    is_conversation: bool = False
    parent: str = ""
    parent_token_count: int = 0
    children: int = 0
    owner: str = ""
    rows: str = "dtype"


@dataclass(frozen=True, slots=True)
class ContextPage:
    """Some of the contexts, newest first. next_page_token: "" where these are the last."""

    contexts: tuple[ContextInfo, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class WarmResult:
    """A context in memory, whether it was there before, and how long the call waited for it in nanoseconds.

    first_layer_ns, all_layers_ns: from the beginning of the load that brought it there until the first layer, and all
    layers, were there.
    """

    context: ContextInfo
    already_resident: bool
    load_ns: int
    first_layer_ns: int = 0
    all_layers_ns: int = 0


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """A method; sparsekv/v1/generation.proto says what each field means.

    One of keep_ratio, target_mass and token_budget is set, none where everything is attended to.
    bytes_per_token: of its indexes, per KV head and layer.
    """

    name: str
    summary: str
    source: str
    index: str
    partition: str
    indexes: tuple[str, ...]
    keep_ratio: float | None
    target_mass: float | None
    token_budget: int | None
    budget: str
    remainder: str
    remainder_optional: bool
    parameters: Mapping[str, str]
    bytes_per_token: float


@dataclass(frozen=True, slots=True)
class MethodList:
    """All methods, and what their sizes are for; kv_bytes_per_token: of keys and values per KV head and layer."""

    methods: tuple[MethodInfo, ...]
    head_dim: int
    dtype: str
    kv_bytes_per_token: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that was likely in another's place. text: its bytes, maybe a part of a character. logprob: natural."""

    token_id: int
    text: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability, and what else was likely in its place."""

    token_id: int
    text: bytes
    logprob: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A part of a call of a tool. index: which of the answer's. id, name: in the first part. arguments_json: the next
    characters of a JSON object."""

    index: int
    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class LayersLooked:
    """Where a group of layers looked: positions of the context, and the shares of attention that went there."""

    first: int
    last: int
    positions: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Where in its context a token of an answer was looked for, by groups of layers. token: which one."""

    token: int
    layers: tuple[LayersLooked, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message of a generation brought. index: of which answer. logprobs, looks: where wanted."""

    token_ids: tuple[int, ...]
    text: str
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallPart, ...] = ()
    looks: tuple[Look, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a generation, as far as is known. cached_tokens: those that were stored, and not computed.

    max_tokens: that may be generated.
    """

    context_tokens: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    max_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a request waits for: "context" or "session"; requests_ahead: that are admitted before it, for "session"."""

    cause: str
    requests_ahead: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock times of a generation in nanoseconds, and counts; see sparsekv/v1/generation.proto."""

    load_ns: int
    queue_ns: int
    prompt_ns: int
    first_token_ns: int
    search_ns: int
    gather_ns: int
    attend_ns: int
    append_ns: int
    decode_steps: int
    decode_ns: int
    total_ns: int
    device_wait_for_host_ns: int = 0
    host_bytes_read: int = 0
    rows_reused: int = 0


@dataclass(frozen=True, slots=True)
class SelectionFigures:
    """How much of the context was touched. fraction_sparse is None when no layer searched."""

    searches: int
    keys_kept: int
    keys_attended: int
    keys_available: int
    fraction_sparse: float | None
    fraction_all: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an answer came as it did; sparsekv/v1/generation.proto says what each field means."""

    lookup: str
    context: str
    cached_tokens: int
    missed: str
    missed_context: str
    missed_tokens: int
    tier: str
    method: str
    method_reason: str
    door_ms: float
    load_ms: float
    queue_ms: float
    prompt_ms: float
    decode_ms: float
    audited_steps: int
    audited_kl: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a finished generation was and took. finish_reason: "stop", "length", "end_of_sequence" or "tool_calls".

    budget, remainder: those that were really used, "" where every key was attended. kept_context: name of the context
    that the session was kept as; "" where it was not. method_reason: why the server chose the method; "" where it did
    not. context: name of the one that was used, named or found; "" where all of the prompt was read. explanation: where
    it was wanted. drafted_tokens: that were verified; accepted_tokens: of these, those of the answer.
    """

    finish_reason: str
    context_tokens: int
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    selection: SelectionFigures
    method: str
    budget: str
    remainder: str
    seed: int
    cached_tokens: int = 0
    max_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kept_context: str = ""
    method_reason: str = ""
    context: str = ""
    explanation: Explanation | None = None


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


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens of a text, and the bytes of each, which may be a part of a character."""

    ids: tuple[int, ...]
    texts: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What a server does now, and did since it started; sparsekv/v1/generation.proto says what each field means."""

    waiting: int
    prompting: int
    decoding: int
    requests: int
    session_bytes: int
    session_limit_bytes: int
    context_bytes: int
    context_used_bytes: int
    context_limit_bytes: int
    contexts: int
    context_loads: int
    context_hits: int
    context_evictions: int
    steps: int
    prompt_tokens: int
    decode_steps: int
    decode_tokens: int
    decode_batch: int
    context_device_bytes: int
    context_device_used_bytes: int
    context_device_limit_bytes: int
    host_bytes_read: int
    rows_reused: int
    device_wait_for_host_ns: int
    open_calls: int = 0
    unfinished_calls: int = 0
    unread_answers: int = 0
    plain_requests: int = 0
    found_beginnings: int = 0
    found_tokens: int = 0
    kept_beginnings: int = 0
    removed_beginnings: int = 0
    model: str = ""
    method_choices: tuple[str, ...] = ()
    max_positions: int = 0
    template_reads: tuple[str, ...] = ()

    @property
    def mean_batch(self) -> float:
        """Requests that generated together, over all turns in which some did."""
        return self.decode_tokens / max(self.decode_steps, 1)


def read_reply(kind: type[ReplyT], message: Message, **given: object) -> ReplyT:
    """A message as a plain value, whose fields have the names of the message's; `given` are those that have not."""
    names = [field.name for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    return kind(**{name: _value(message, name) for name in names}, **given)


def read_context(message: context_pb2.Context) -> ContextInfo:
    """A context of the API as a plain value."""
    state = context_pb2.Context.State.Name(message.state)  # as filters and all lists say it
    return read_reply(ContextInfo, message, state=state, create_time=message.create_time.ToDatetime(UTC))


def read_nothing(message: Message) -> None:
    """Of a reply that says no more than that it came."""


def read_summary(message: generation_pb2.GenerationSummary) -> Summary:
    """A generation's summary as a plain value."""
    usage = {field.name: getattr(message.usage, field.name) for field in message.usage.DESCRIPTOR.fields}
    return read_reply(Summary, message, **usage)


def read_logprobs(messages: Iterable[generation_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Log probabilities as plain values."""
    return tuple(read_reply(TokenLogprob, message) for message in messages)


def read_piece(message: generation_pb2.GenerateResponse) -> Piece:
    """The part of an answer that a message brought."""
    calls = tuple(read_reply(ToolCallPart, part) for part in message.tool_calls)
    told = read_logprobs(message.logprobs)
    looks = tuple(read_reply(Look, look) for look in message.looks)
    return Piece(tuple(message.token_ids), message.text, message.index, told, calls, looks)


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


_READERS: Mapping[str, Callable[[Any], object]] = {
    "sparsekv.v1.TokenLogprob": lambda message: read_reply(TokenLogprob, message),
    "sparsekv.v1.TokenLogprob.Alternative": lambda message: read_reply(Alternative, message),
    "sparsekv.v1.Context": read_context,
    "sparsekv.v1.Context.Index": lambda message: read_reply(IndexInfo, message),
    "sparsekv.v1.Method": lambda message: read_reply(MethodInfo, message),
    "sparsekv.v1.Timings": lambda message: read_reply(Timings, message),
    "sparsekv.v1.SelectionFigures": lambda message: read_reply(SelectionFigures, message),
    "sparsekv.v1.Look.Layers": lambda message: read_reply(LayersLooked, message),
    "sparsekv.v1.Explanation": lambda message: read_reply(Explanation, message) if message.lookup else None,
}
"""What makes plain values of the messages inside messages."""


def _value(message: Message, name: str) -> object:
    """A field's value: None where it may be unset and is, an enumerator's name in small letters."""
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.message_type is None:
        if field.has_presence and not message.HasField(name):
            return None
        if field.enum_type is not None:
            return field.enum_type.values_by_number[value].name.lower()
        return tuple(value) if field.is_repeated else value
    if field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if isinstance(value, Timestamp):
        return value.ToDatetime(UTC) if message.HasField(name) else None
    read = _READERS[field.message_type.full_name]
    if field.is_repeated:
        return tuple(map(read, value))
    return read(value)
