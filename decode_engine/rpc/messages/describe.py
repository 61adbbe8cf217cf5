"""Stored contexts, methods, answers and what the server does, as the API's messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime

from google.protobuf.timestamp_pb2 import Timestamp

from decode_engine.engine.requests import EngineStats, Finished, FinishReason, Token
from decode_engine.engine.sampling.logprobs import TokenLogprob
from decode_engine.rpc.contexts.defaults import default_method, supported_methods
from decode_engine.rpc.contexts.names import COLLECTION
from decode_engine.rpc.creation.kept_beginnings import BeginningStats
from decode_engine.rpc.transport.calls import Traffic
from index_store.errors import FormatVersionError, StoreUnavailableError
from index_store.family.parents import outgrown
from index_store.indexes.registry import INDEX_KINDS
from index_store.jobs.uploads import Upload
from index_store.memory.books import ArenaStats
from index_store.memory.placement import Placement
from index_store.methods.method import Method
from index_store.methods.presets import METHODS
from index_store.selection.budgets import Ratio, Threshold, TokenCount
from index_store.selection.mass import Mass
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import stored_dtype
from index_store.store.description.manifest import IndexEntry, Manifest
from index_store.store.listing import BrokenContext
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import context_pb2, generation_pb2

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.GenerationSummary.STOP,
    FinishReason.LENGTH: generation_pb2.GenerationSummary.LENGTH,
    FinishReason.END_OF_SEQUENCE: generation_pb2.GenerationSummary.END_OF_SEQUENCE,
}

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
        create_time=_timestamp(own.created_at),
        expire_time=None if own.expires_at is None else _timestamp(own.expires_at),
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


def describe_status(
    identity: ModelIdentity,
    template_reads: Iterable[str],
    engine: EngineStats,
    beginnings: BeginningStats,
    arena: ArenaStats,
    traffic: Traffic,
    choices: Sequence[str] = (),
) -> generation_pb2.ServerStatus:
    """What scheduler, memory and calls do, as the API shows it: figures of the first two under their own names."""
    return generation_pb2.ServerStatus(
        model=identity.name,
        max_positions=identity.max_positions,
        template_reads=sorted(template_reads),
        method_choices=choices,
        **asdict(engine),
        **asdict(beginnings),
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


def describe_upload(upload: Upload) -> context_pb2.Upload:
    """An uploaded document as the API shows it."""
    return context_pb2.Upload(
        name=f"uploads/{upload.id}",
        size_bytes=upload.nbytes,
        sha256=upload.sha256,
        expire_time=_timestamp(upload.expires_at),
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


def token_messages(
    tokens: Iterable[Token], bytes_of: Sequence[bytes]
) -> list[generation_pb2.GenerateResponse]:
    """One message for each answer that tokens are of. bytes_of: tokens; needed where probabilities are told."""
    answers: dict[int, list[Token]] = {}
    for token in tokens:
        answers.setdefault(token.answer, []).append(token)
    return [
        generation_pb2.GenerateResponse(
            token_ids=[token.token_id for token in own],
            text="".join(token.text for token in own),
            logprobs=logprob_messages([each.logprob for each in own if each.logprob is not None], bytes_of),
            index=answer,
        )
        for answer, own in answers.items()
    ]


def logprob_messages(
    logprobs: Iterable[TokenLogprob], bytes_of: Sequence[bytes]
) -> list[generation_pb2.TokenLogprob]:
    """Log probabilities as the API shows them."""
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


def summarise(
    end: Finished,
    method: Method,
    usage: generation_pb2.Usage,
    load_ns: int,
    before_ns: int,
    reason: str = "",
    context: str = "",
) -> generation_pb2.GenerationSummary:
    """An answer's summary.

    before_ns: from the arrival of the call to the submission to the engine. reason: why it is this method. context:
    name of the one that it stands on.
    """
    times, figures = end.times, end.figures
    searched = figures.sparse_available > 0
    return generation_pb2.GenerationSummary(
        finish_reason=_FINISH_REASONS[end.reason],
        usage=usage,
        timings=generation_pb2.Timings(
            load_ns=load_ns + times.load_ns,
            queue_ns=times.queue_ns,
            prompt_ns=times.prompt_ns,
            first_token_ns=before_ns + times.first_token_ns,
            search_ns=figures.search_ns,
            gather_ns=figures.gather_ns,
            attend_ns=figures.attend_ns,
            append_ns=figures.append_ns,
            decode_steps=times.decode_steps,
            decode_ns=times.decode_ns,
            total_ns=before_ns + times.total_ns,
            device_wait_for_host_ns=figures.device_wait_for_host_ns,
            host_bytes_read=figures.host_bytes_read,
            rows_reused=figures.rows_reused,
        ),
        selection=generation_pb2.SelectionFigures(
            searches=figures.searches,
            keys_kept=figures.kept,
            keys_attended=figures.sparse_attended,
            keys_available=figures.sparse_available,
            fraction_sparse=figures.sparse_fraction if searched else None,
            fraction_all=figures.fraction,
        ),
        method=method.name,
        method_reason=reason,
        seed=end.seed,
        budget="" if method.budget is None else method.budget.label,
        remainder=describe_remainder(method),
        kept_context=COLLECTION + end.kept if end.kept else "",
        context=context,
    )
