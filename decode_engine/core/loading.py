"""How the engine's half of a server is loaded."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numba
import torch

from decode_engine.core.housekeeping import Housekeeping, KeepingRules, KeptBeginnings
from decode_engine.core.kv_events import KVEvents
from decode_engine.core.rank_process import start_ranks
from decode_engine.core.seeing import Exporter, RequestSpans, Seeing
from decode_engine.core.service import EngineService, Outboxes
from decode_engine.core.tenants import Tenants
from decode_engine.engine.engine import Engine
from decode_engine.engine.session_memory import SHARE
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.method_choice import AUTO, IdleTimer, StepCosts
from decode_engine.model.preparing import Preparation, compile_beside, methods_wanted
from decode_engine.model.ranks import Alone
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc.contexts.creation import Workshop
from decode_engine.rpc.contexts.defaults import own_methods
from decode_engine.rpc.transport.starting import Phase
from decode_engine.rpc.transport.work import SPARE, BlockingWork
from decode_engine.settings.config import ServeConfig
from index_store.cli.quotas import QuotaFile
from index_store.cli.traces import TRACEPARENT, Traces
from index_store.errors import SparseKVError, format_bytes
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.uploads import Uploads
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device, describe_device, memory_budget, pick_device
from index_store.memory.memory_sizes import free_memory
from index_store.memory.placement import Placement, parse_placement
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.loading import checkpoint_dtype
from index_store.models.model_folder import ModelFolder
from index_store.objects.courier import Courier
from index_store.objects.tier import Tier
from index_store.store.catalog import Store
from index_store.store.clean_up import StoreRoom
from index_store.store.description.manifest import Manifest

_PROMPT_CHUNKS = {"cpu": 256, "cuda": 512}
"""Prompt tokens per step, which other streams wait for; a GPU reads twice as many in less time."""

logger = logging.getLogger(__name__)


def load_service(
    config: ServeConfig,
    store: Store,
    folder: ModelFolder,
    phase: Phase,
    on_crash: Callable[[BaseException], None],
    on_compiling: Callable[[Future[None]], None],
    traces: Traces | None = None,
) -> EngineService:
    """Loads the model and prepares what the store's contexts name. Raises ModelUnsupportedError.

    on_crash: of the engine. on_compiling: gets what is being compiled by other processes, which is to be cancelled when
    this one ends. traces: where spans of requests go.
    What is to be compiled is compiled by other processes from the beginning on, while this one loads the model.
    """
    started = time.monotonic()
    set_threads(config.threads)
    device = pick_device(config.device)
    alone = [manifest for manifest in store.list() if manifest.parent is None] if config.prepares else []
    named = {manifest.id: _named_methods(store, manifest) for manifest in alone}
    compile_named = partial(_compile, config, checkpoint_dtype(folder), phase, device, on_compiling)
    names = sorted({method.name for methods in named.values() for method in methods})
    compiling = compile_named(names) if config.prepares else _done()
    searching = SearchThreads(config.search_threads)
    try:
        ranks, options = start_ranks(config, device) if config.divided else (Alone(), {})
        runner = ModelRunner(
            folder, device, config.dtype, config.prompts, searching, phase.say, config.weights, ranks, options
        )
        loaded = time.monotonic()
        compiling.result()
    except BaseException:
        compiling.cancel()
        raise
    quotas, free = QuotaFile(config.quotas), free_memory(torch.device("cpu"))
    budget = memory_budget(device, config.memory, config.device_memory, free)
    arena = Arena(
        budget,
        device=context_device(device),
        placement=Placement.DEVICE if config.divided else parse_placement(config.placement),
        slot_share=config.slot_share,
        quota=partial(quotas.limit, name="resident_bytes"),
        part=ranks.part,
    )
    session_memory = config.session_memory or free_memory(device) // SHARE
    preparation = Preparation(runner, config.max_sessions, compile_named)
    wanted = [
        (fitted, arena.placement(each)) for each in alone for fitted in _wanted(runner, each, named[each.id])
    ]
    prepared = preparation.prepare_all(wanted, phase.say)
    preparation.go_beside()
    logger.info(
        "model %s loaded on %s in %.1f s, %s of host and %s of device memory for contexts, %s for sessions, "
        "%s prepared in %.1f s",
        folder.name,
        describe_device(device),
        loaded - started,
        format_bytes(budget.host),
        format_bytes(budget.device),
        format_bytes(session_memory),
        ", ".join(prepared) or "no method",
        time.monotonic() - loaded,
    )

    def begin() -> None:
        """On the engine's thread, before its first turn: what a thread prepares for itself alone."""
        set_threads(config.threads)
        if config.prepares:
            runner.prepare_prompts()

    costs, auto = StepCosts(on_gpu=device.type == "cuda"), config.method == AUTO and not config.divided
    if auto:
        for fitted, where in wanted:
            costs.want(fitted.method, where)
    timer = IdleTimer(runner, costs)

    def note_step(sessions: Sequence[Session], seconds: float) -> None:
        first = sessions[0]
        alike = (each.context is first.context and each.method == first.method for each in sessions)
        if all(alike) and not any(each.watched for each in sessions):
            tokens, where = first.context.manifest.token_count, first.context.placement
            costs.note(first.method, where, tokens, len(sessions), seconds)

    outboxes, tenants = Outboxes(), Tenants(quotas)
    engine: Engine[Session] = Engine(
        runner,
        max_sessions=config.max_sessions,
        max_waiting=config.max_waiting,
        max_client_requests=config.max_client_requests,
        prompt_chunk=config.prompt_chunk or _PROMPT_CHUNKS[device.type],
        session_memory=session_memory,
        weight=tenants.weight,
        on_start=begin,
        on_crash=on_crash,
        on_idle=(lambda: None) if config.divided else timer.advance,  # what is timed runs on one rank alone
        on_step=note_step,
        send=outboxes.flush,
    )
    queue, uploads = JobQueue(config.store), Uploads(config.store)
    room = StoreRoom(store, config.store_bytes, quota=partial(quotas.limit, name="stored_bytes"))
    workshop = Workshop(store, queue, uploads, runner.identity, runner.tokenizer, runner.kv_dtype, room)
    housekeeping = Housekeeping(store, room, arena.leased_ids, lambda: engine.places == 0)
    beginnings = KeptBeginnings(
        workshop,
        arena,
        KeepingRules(config.keep_beginnings, config.keep_beginnings_after, config.keep_beginnings_bytes),
    )
    leave_to_stay()
    return EngineService(
        store,
        arena,
        runner,
        engine,
        workshop,
        housekeeping,
        preparation,
        beginnings,
        outboxes,
        config.max_waiting,
        # A few: what they do is Python, of which one runs at a time, and steps of the engine wait for all the others.
        BlockingWork(waiting=config.places + SPARE, threads=3, name="core"),
        tenants,
        costs,
        auto,
        Seeing(
            None if config.metrics is None else Exporter(config.metrics, config.metrics_alias),
            None if config.kv_events is None else KVEvents(config.kv_events, config.kv_events_topic),
            None
            if traces is None
            else RequestSpans(traces, runner.identity.name, partial(_prefill_of, store)),
            config.audit_share,
        ),
        None if store.beyond is None else Courier(store, Tier.of(store)),
    )


def leave_to_stay() -> None:
    """Has the garbage collector leave alone what is there now, and stays: libraries, the model, captured steps.

    It would look at all of it now and then, which takes a third of a second in which no stream gets a token.
    """
    gc.collect()
    gc.freeze()


def set_threads(count: int) -> None:
    """Sets the threads of kernels and matrix products; numba keeps the number per calling thread."""
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


def _prefill_of(store: Store, context: str) -> str:
    """The span in which a context was made, as its manifest notes it."""
    try:
        return str(store.manifest(context).prefill.get(TRACEPARENT, ""))
    except SparseKVError:  # it was deleted meanwhile
        return ""


def _named_methods(store: Store, manifest: Manifest) -> list[Method]:
    """What the context was prefilled for, and what its requests get that name nothing."""
    known = [get_method(name) for name in manifest.methods if name in METHODS]
    return [*own_methods(store, [manifest]), *known]


def _wanted(runner: ModelRunner, manifest: Manifest, named: Sequence[Method]) -> list[FittedMethod]:
    """What is prepared for a context; nothing for one of another model."""
    try:
        runner.check(manifest)
    except SparseKVError as error:
        logger.info("nothing is prepared for context %s: %s", manifest.id[:12], error)
        return []
    return list(methods_wanted(manifest, *named))


def _compile(
    config: ServeConfig,
    checkpoint: str,
    phase: Phase,
    device: torch.device,
    on_compiling: Callable[[Future[None]], None],
    methods: Sequence[str],
) -> Future[None]:
    if device.type != "cpu":
        return _done()
    told = partial(phase.say, "compile loops")
    compiling = compile_beside(config.weights, checkpoint, methods, processes=config.threads, told=told)
    on_compiling(compiling)
    return compiling


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done
