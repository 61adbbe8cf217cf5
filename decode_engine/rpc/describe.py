"""Stored contexts, methods and what the server does, as the API's messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from decode_engine.engine.requests import EngineStats
from decode_engine.rpc.defaults import default_method, supported_methods
from decode_engine.rpc.transport.calls import Traffic
from index_store.errors import FormatVersionError, StoreUnavailableError
from index_store.indexes.registry import INDEX_KINDS
from index_store.memory.arena import ArenaStats
from index_store.memory.placement import Placement
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Ratio, Threshold, TokenCount
from index_store.selection.mass import Mass
from index_store.store.catalog import BrokenContext
from index_store.store.dtypes import stored_dtype
from index_store.store.manifest import IndexEntry, Manifest
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import context_pb2, generation_pb2

COLLECTION = "contexts/"

_BUDGET_SIZES = frozenset({"keep", "threshold", "mass", "tokens"})


def describe_context(
    manifest: Manifest,
    tuned: TunedDefault | None = None,
    problem: str = "",
    *,
    expired: bool,
    resident: bool,
    placement: Placement = Placement.DEVICE,
) -> context_pb2.Context:
    """A readable context as the API shows it.

    problem: why it cannot be known what the context was tuned to; it then has no default. placement: where it is, or
    would be.
    """
    states = context_pb2.Context
    default = default_method(manifest, tuned)
    budget = None if problem else default.method().budget
    return context_pb2.Context(
        name=COLLECTION + manifest.id,
        display_name=manifest.name,
        model=manifest.model.name,
        architecture=manifest.model.architecture,
        token_count=manifest.token_count,
        dtype=manifest.dtype,
        kv_bytes=manifest.kv_bytes,
        index_bytes=manifest.index_bytes,
        state=states.EXPIRED if expired else states.READY,
        state_message=problem,
        create_time=_timestamp(manifest.created_at),
        expire_time=None if manifest.expires_at is None else _timestamp(manifest.expires_at),
        resident=resident,
        methods=supported_methods(manifest),
        default_method="" if problem else default.expression,
        default_budget="" if budget is None else budget.label,
        tuned=default.tuned,
        indexes=[_describe_index(index, manifest.token_count) for index in manifest.indexes],
        dense_layers=manifest.dense_layers,
        placement=placement.value,
    )


def describe_broken(broken: BrokenContext) -> context_pb2.Context:
    """A context whose metadata cannot be used."""
    states = context_pb2.Context
    state = states.CORRUPT
    if isinstance(broken.error, FormatVersionError):
        state = states.UNSUPPORTED
    elif isinstance(broken.error, StoreUnavailableError):
        state = states.UNAVAILABLE
    return context_pb2.Context(
        name=COLLECTION + broken.id,
        state=state,
        state_message=broken.error.message,
    )


def describe_methods(head_dim: int, dtype: str) -> generation_pb2.ListMethodsResponse:
    """All methods, with their sizes for a model's head dim and for keys and values stored in that dtype."""
    return generation_pb2.ListMethodsResponse(
        methods=[_describe_method(method, head_dim) for method in METHODS.values()],
        head_dim=head_dim,
        dtype=dtype,
        kv_bytes_per_token=2 * head_dim * stored_dtype(dtype).itemsize,
    )


def describe_status(engine: EngineStats, arena: ArenaStats, traffic: Traffic) -> generation_pb2.ServerStatus:
    """What scheduler, memory and calls do, as the API shows it: the scheduler's figures under their own names."""
    return generation_pb2.ServerStatus(
        **asdict(engine),
        context_bytes=arena.used_bytes,
        context_used_bytes=arena.leased_bytes,
        context_limit_bytes=arena.budget_bytes,
        contexts=arena.contexts,
        context_loads=arena.loads,
        context_hits=arena.hits,
        context_evictions=arena.evictions,
        context_device_bytes=arena.used.device,
        context_device_used_bytes=arena.leased.device,
        context_device_limit_bytes=arena.budget.device,
        open_calls=traffic.open,
        unfinished_calls=traffic.unfinished,
        unread_answers=traffic.unread,
    )


def _describe_method(method: Method, head_dim: int) -> generation_pb2.Method:
    """A method as the API shows it."""
    budget = method.budget
    partition = None if method.drops_remainder else method.partition or method.index
    return generation_pb2.Method(
        name=method.name,
        summary=method.summary,
        source=method.source,
        index="" if method.index is None else method.index.name,
        partition="" if partition is None else partition.name,
        indexes=[spec.name for spec in method.index_specs()],
        keep_ratio=budget.keep if isinstance(budget, (Ratio, Threshold)) else None,
        target_mass=budget.mass if isinstance(budget, Mass) else None,
        token_budget=budget.tokens if isinstance(budget, TokenCount) else None,
        budget="" if budget is None else budget.label,
        remainder=describe_remainder(method),
        remainder_optional=method.partition_optional,
        parameters=dict(_parameters(method)),
        bytes_per_token=sum(
            INDEX_KINDS[spec.kind].bytes_per_token(spec.parameters, head_dim) for spec in method.index_specs()
        ),
    )


def describe_remainder(method: Method) -> str:
    """Name of the method's remainder; empty when every key is attended."""
    return method.remainder.name if method.sparse else ""


def _parameters(method: Method) -> Iterator[tuple[str, str]]:
    """All that the method is made with, its budget's size aside."""
    if method.budget is None:
        return
    for spec in method.index_specs():
        for name, value in spec.parameters.items():
            yield f"{spec.name}.{name}", _text(value)
    for name, value in method.search.items():
        yield f"search.{name}", _text(value)
    if is_dataclass(method.budget):
        for field in fields(method.budget):
            if field.name not in _BUDGET_SIZES:
                yield f"budget.{field.name}", _text(getattr(method.budget, field.name))
    for name in ("sinks", "recent", "append_block"):
        yield name, _text(getattr(method, name))


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _describe_index(index: IndexEntry, token_count: int) -> context_pb2.Context.Index:
    return context_pb2.Context.Index(
        name=index.name,
        kind=index.kind,
        parameters={name: str(value) for name, value in index.parameters.items()},
        bytes_per_token=index.nbytes / token_count,
        layers=index.layers,
    )


def _timestamp(time: datetime) -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(time)
    return stamp
