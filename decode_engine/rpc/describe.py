"""Stored contexts, methods, answers and what the server does, as the API's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from msgspec import structs

from decode_engine.layers.figures import Figures
from decode_engine.orders.events import Status, Tenancy, Times, TokenLogprob
from decode_engine.rpc.contexts.defaults import default_method, remainder_name, supported_methods
from decode_engine.rpc.contexts.listing import COLLECTION
from index_store.errors import FormatVersionError, StoreUnavailableError
from index_store.family.parents import outgrown
from index_store.jobs.uploads import Upload
from index_store.memory.placement import Placement
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Mass, Ratio, Threshold, TokenCount
from index_store.store.catalog import TunedDefault
from index_store.store.description.callers import Caller
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.manifest import IndexEntry, Manifest
from index_store.store.listing import BrokenContext
from sparsekv.v1 import context_pb2, conversation_pb2, generation_pb2

if TYPE_CHECKING:
    from decode_engine.rpc.answers.answering import Said, Summary
    from decode_engine.rpc.transport.calls import Traffic

_BUDGET_SIZES = frozenset({"keep", "threshold", "mass", "tokens"})


def describe_context(
    manifest: Manifest,
    tuned: TunedDefault | None = None,
    problem: str = "",
    *,
    expired: bool,
    resident: bool,
    placement: Placement = Placement.DEVICE,
    child: Manifest | None = None,
    children: int = 0,
) -> context_pb2.Context:
    """A readable context as the API shows it.

    problem: why it cannot be known what the context was tuned to; it then has no default. placement: where it is, or
    would be. child: is described, and the context is its parent, whose methods and indexes it has. children: how many
    continue what is described.
    """
    states = context_pb2.Context
    own = manifest if child is None else child
    default = default_method(manifest, tuned)
    budget = None if problem else default.method().budget
    return context_pb2.Context(
        name=COLLECTION + own.id,
        display_name=own.name,
        model=manifest.model.name,
        architecture=manifest.model.architecture,
        token_count=own.token_count,
        dtype=manifest.dtype,
        kv_bytes=own.kv_bytes,
        index_bytes=own.index_bytes,
        state=states.EXPIRED if expired else states.READY,
        state_message=problem or ("" if child is None else _advice(child, manifest)),
        create_time=own.created_at,
        expire_time=own.expires_at,
        renew=None if own.renew is None else timedelta(seconds=own.renew),
        resident=resident,
        methods=supported_methods(manifest),
        default_method="" if problem else default.expression,
        default_budget="" if budget is None else budget.label,
        tuned=default.tuned,
        indexes=[_describe_index(index, manifest.token_count) for index in manifest.indexes],
        dense_layers=manifest.dense_layers,
        placement=placement.value,
        labels=own.labels,
        pinned=own.pinned,
        is_conversation=own.conversation is not None,
        parent="" if child is None else COLLECTION + manifest.id,
        parent_token_count=0 if child is None else manifest.token_count,
        children=children,
        owner=own.owner,
        tenant=own.tenant,
        readers=own.readers,
        rows=own.rows,
    )


def _advice(child: Manifest, parent: Manifest) -> str:
    """What to do about a child that has outgrown its parent; "" about others."""
    if not outgrown(child):
        return ""
    added = child.token_count - parent.token_count
    return (
        f"it adds {added} tokens to the {parent.token_count} of its parent, and every session on it indexes and holds "
        f"them anew; a worker (`prefill-worker serve`) makes it stand alone once it has nothing else to do, and "
        f"`prefill-worker detach {child.id[:12]}` does so at once"
    )


def describe_broken(broken: BrokenContext) -> context_pb2.Context:
    states = context_pb2.Context
    state = states.CORRUPT
    if isinstance(broken.error, FormatVersionError):
        state = states.UNSUPPORTED
    elif isinstance(broken.error, StoreUnavailableError):
        state = states.UNAVAILABLE
    return context_pb2.Context(name=COLLECTION + broken.id, state=state, state_message=broken.error.message)


def describe_methods(head_dim: int, dtype: str) -> generation_pb2.ListMethodsResponse:
    """All methods, with their sizes for a model's head dim and for keys and values stored in that dtype."""
    return generation_pb2.ListMethodsResponse(
        methods=[_describe_method(method, head_dim) for method in METHODS.values()],
        head_dim=head_dim,
        dtype=dtype,
        kv_bytes_per_token=2 * head_dim * stored_dtype(dtype).itemsize,
    )


def describe_status(
    identity: ModelIdentity, template_reads: Iterable[str], status: Status, traffic: Traffic
) -> generation_pb2.ServerStatus:
    """What engine, memory and calls do, as the API shows it: figures of the engine under their own names."""
    figures: dict[str, Any] = {**status.engine, **status.beginnings, **status.arena, **status.objects}
    return generation_pb2.ServerStatus(
        model=identity.name,
        max_positions=identity.max_positions,
        template_reads=sorted(template_reads),
        method_choices=status.choices,
        **figures,
        open_calls=traffic.open,
        unfinished_calls=traffic.unfinished,
        unread_answers=traffic.unread,
        audit_lines_lost=traffic.unlogged,
    )


def describe_tenancy(tenancy: Tenancy, caller: Caller) -> generation_pb2.ListTenantsResponse:
    """What a caller may know of tenants' use, as the API shows it."""
    return generation_pb2.ListTenantsResponse(
        tenants=[generation_pb2.Tenant(**asdict(use)) for use in tenancy.tenants if caller.owns(use.name)],
        quotas_problem=tenancy.problem if caller.admin else "",
    )


def describe_upload(upload: Upload) -> context_pb2.Upload:
    return context_pb2.Upload(
        name=f"uploads/{upload.id}",
        size_bytes=upload.nbytes,
        sha256=upload.sha256,
        expire_time=upload.expires_at,
    )


def _describe_method(method: Method, head_dim: int) -> generation_pb2.Method:
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
        remainder=remainder_name(method),
        remainder_optional=method.partition_optional,
        parameters=dict(_parameters(method)),
        bytes_per_token=sum(spec.built.bytes_per_token(head_dim) for spec in method.index_specs()),
    )


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


def said_message(said: Said, bytes_of: Sequence[bytes]) -> generation_pb2.GenerateResponse:
    """What a door says, as the API shows it. bytes_of: tokens; needed where probabilities are told."""
    waits = said.waiting
    waiting = None
    if waits is not None and waits.cause:
        causes = generation_pb2.Waiting
        cause = causes.SESSION if waits.cause == "session" else causes.CONTEXT
        waiting = causes(cause=cause, requests_ahead=waits.ahead)
    return generation_pb2.GenerateResponse(
        token_ids=said.token_ids,
        text=said.text,
        usage=None if said.usage is None else generation_pb2.Usage(**asdict(said.usage)),
        summary=None if said.summary is None else _summary(said.summary),
        waiting=waiting,
        logprobs=_logprobs(said.logprobs, bytes_of),
        index=said.answer,
        prompt_logprobs=_logprobs(said.prompt_logprobs, bytes_of),
        tool_calls=[
            conversation_pb2.ToolCallPart(
                index=part.index, id=part.id, name=part.name, arguments_json=part.arguments
            )
            for part in said.calls
        ],
        looks=[
            generation_pb2.Look(
                token=look.token,
                layers=[generation_pb2.Look.Layers(**structs.asdict(each)) for each in look.layers],
            )
            for look in said.looks
        ],
    )


def _logprobs(
    logprobs: Iterable[TokenLogprob], bytes_of: Sequence[bytes]
) -> list[generation_pb2.TokenLogprob]:
    return [
        generation_pb2.TokenLogprob(
            token_id=each.token_id,
            text=bytes_of[each.token_id],
            logprob=each.logprob,
            alternatives=[
                generation_pb2.TokenLogprob.Alternative(token_id=token, text=bytes_of[token], logprob=logprob)
                for token, logprob in each.alternatives
            ],
        )
        for each in logprobs
    ]


def _summary(summary: Summary) -> generation_pb2.GenerationSummary:
    end, begins, why = summary.end, summary.begins, summary.explanation
    times, figures = end.times, Figures(**end.figures)
    searched = figures.sparse_available > 0
    measured = {
        name: getattr(times if name in Times.__struct_fields__ else figures, name)
        for name in generation_pb2.Timings.DESCRIPTOR.fields_by_name
    }
    for name in ("first_token_ns", "total_ns"):  # which the engine counts from when it got the order
        measured[name] += summary.before_ns
    return generation_pb2.GenerationSummary(
        finish_reason=summary.reason.upper(),
        usage=generation_pb2.Usage(**asdict(summary.usage)),
        timings=generation_pb2.Timings(**measured),
        selection=generation_pb2.SelectionFigures(
            searches=figures.searches,
            keys_kept=figures.kept,
            keys_attended=figures.sparse_attended,
            keys_available=figures.sparse_available,
            fraction_sparse=figures.sparse_fraction if searched else None,
            fraction_all=figures.fraction,
        ),
        method=begins.method,
        method_reason=begins.reason,
        seed=end.seed,
        budget=begins.budget,
        remainder=begins.remainder,
        kept_context=COLLECTION + end.kept if end.kept else "",
        context=COLLECTION + begins.context if begins.context else "",
        explanation=None if why is None else generation_pb2.Explanation(**asdict(why)),
    )
