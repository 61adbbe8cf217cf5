"""What a server answers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sparsekv.v1 import context_pb2, generation_pb2


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
    """A stored context. state: "ready", "expired", "corrupt" or "unsupported"; state_message says why not ready.

    default_method, default_budget: of a request that says neither; the budget is text for people, "" for everything.
    tuned: whether they were chosen by tuning. placement: where it is in memory or would be, "device", "hybrid" or
    "host"; "" where a server does not say.
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
class Piece:
    """What one message of a generation brought."""

    token_ids: tuple[int, ...]
    text: str


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
class Summary:
    """What a finished generation was and took. finish_reason: "stop", "length" or "end_of_sequence".

    budget, remainder: those that were really used, "" where every key was attended.
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

    @property
    def mean_batch(self) -> float:
        """Requests that generated together, over all turns in which some did."""
        return self.decode_tokens / max(self.decode_steps, 1)


def read_status(message: generation_pb2.ServerStatus) -> ServerStatus:
    """A server's status as a plain value."""
    return ServerStatus(**{name: getattr(message, name) for name in ServerStatus.__slots__})


def read_methods(message: generation_pb2.ListMethodsResponse) -> MethodList:
    """The methods of the API as plain values."""
    return MethodList(
        tuple(_read_method(method) for method in message.methods),
        message.head_dim,
        message.dtype,
        message.kv_bytes_per_token,
    )


def _read_method(message: generation_pb2.Method) -> MethodInfo:
    return MethodInfo(
        name=message.name,
        summary=message.summary,
        source=message.source,
        index=message.index,
        partition=message.partition,
        indexes=tuple(message.indexes),
        keep_ratio=_optional(message, "keep_ratio"),
        target_mass=_optional(message, "target_mass"),
        token_budget=message.token_budget if message.HasField("token_budget") else None,
        budget=message.budget,
        remainder=message.remainder,
        remainder_optional=message.remainder_optional,
        parameters=dict(sorted(message.parameters.items())),
        bytes_per_token=message.bytes_per_token,
    )


def read_context(message: context_pb2.Context) -> ContextInfo:
    """A context of the API as a plain value."""
    expires = message.HasField("expire_time")
    return ContextInfo(
        name=message.name,
        display_name=message.display_name,
        model=message.model,
        architecture=message.architecture,
        token_count=message.token_count,
        dtype=message.dtype,
        kv_bytes=message.kv_bytes,
        index_bytes=message.index_bytes,
        state=context_pb2.Context.State.Name(message.state).lower(),
        state_message=message.state_message,
        create_time=message.create_time.ToDatetime(UTC),
        expire_time=message.expire_time.ToDatetime(UTC) if expires else None,
        resident=message.resident,
        methods=tuple(message.methods),
        default_method=message.default_method,
        default_budget=message.default_budget,
        tuned=message.tuned,
        indexes=tuple(
            IndexInfo(i.name, i.kind, dict(i.parameters), i.bytes_per_token, tuple(i.layers))
            for i in message.indexes
        ),
        dense_layers=tuple(message.dense_layers),
        placement=message.placement,
    )


def read_summary(message: generation_pb2.GenerationSummary) -> Summary:
    """A generation's summary as a plain value."""
    usage, timings, selection = message.usage, message.timings, message.selection
    return Summary(
        finish_reason=generation_pb2.GenerationSummary.FinishReason.Name(message.finish_reason).lower(),
        context_tokens=usage.context_tokens,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        timings=Timings(**{name: getattr(timings, name) for name in Timings.__slots__}),
        selection=SelectionFigures(
            searches=selection.searches,
            keys_kept=selection.keys_kept,
            keys_attended=selection.keys_attended,
            keys_available=selection.keys_available,
            fraction_sparse=_optional(selection, "fraction_sparse"),
            fraction_all=selection.fraction_all,
        ),
        method=message.method,
        budget=message.budget,
        remainder=message.remainder,
        seed=message.seed,
    )


def _optional(message: Any, field: str) -> float | None:
    return getattr(message, field) if message.HasField(field) else None
