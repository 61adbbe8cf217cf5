"""What the services serve from, and how it is loaded."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numba
import torch

from decode_engine.engine.engine import Engine
from decode_engine.engine.session_memory import SHARE
from decode_engine.host_search.workers import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.compiling import compile_beside
from decode_engine.model.continuing import Ground
from decode_engine.model.method_choice import AUTO, IdleTimer, StepCosts
from decode_engine.model.preparing import Preparation, methods_wanted
from decode_engine.model.runner import ModelRunner
from decode_engine.rpc.contexts.defaults import own_methods
from decode_engine.rpc.contexts.housekeeping import Housekeeping
from decode_engine.rpc.contexts.names import COLLECTION
from decode_engine.rpc.creation.kept_beginnings import KeepingRules, KeptBeginnings
from decode_engine.rpc.creation.operations import Operations
from decode_engine.rpc.creation.orders import Workshop
from decode_engine.rpc.messages.describe import describe_broken, describe_context
from decode_engine.rpc.transport.starting import Phase
from decode_engine.rpc.transport.status import Paths
from decode_engine.settings.config import ServeConfig
from index_store.errors import ContextNotFoundError, SparseKVError, format_bytes
from index_store.family.prefixes import longest_prefix
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.uploads import Uploads
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device, describe_device, memory_budget, pick_device
from index_store.memory.memory_sizes import free_memory
from index_store.memory.placement import SlotRoom, parse_placement
from index_store.methods.method import FittedMethod, Method
from index_store.methods.presets import METHODS, get_method
from index_store.models.files.folder import ModelFolder
from index_store.models.identity import checkpoint_dtype
from index_store.store.catalog import Store
from index_store.store.description.context_id import continued_digests, first_digest
from index_store.store.description.manifest import Manifest
from index_store.store.listing import BrokenContext
from index_store.store.room import StoreRoom
from index_store.store.tuned_defaults import TunedDefault
from sparsekv.v1 import context_pb2


@dataclass(frozen=True, slots=True)
class ServiceBackend:
    """What the services serve from.

    workshop: where contexts are ordered. housekeeping: of what has expired. preparation: of methods, before requests
    run by them. beginnings: of prompts that name no context, some of which are kept. paths: what no client is told.
    costs: of decode steps, by which a method is chosen where requests leave that to the server; auto: whether those do
    that name none.
    """

    store: Store
    arena: Arena
    runner: ModelRunner
    engine: Engine[Session]
    workshop: Workshop
    housekeeping: Housekeeping
    preparation: Preparation
    beginnings: KeptBeginnings
    paths: Paths = field(default_factory=Paths)
    costs: StepCosts = field(default_factory=StepCosts)
    auto: bool = True

    def operations(self) -> Operations:
        """The operations that follow orders."""
        return Operations(self.workshop.queue, self.describe_id, self.paths)

    def describe_id(self, id_: str) -> context_pb2.Context:
        """The context of an id as the API shows it, also where it has been deleted."""
        try:
            return self.describe(self.store.entry(id_), set(self.arena.ids()), self.children())
        except ContextNotFoundError:
            gone = context_pb2.Context.UNAVAILABLE
            message = "the context was made, and has been deleted since"
            return context_pb2.Context(name=COLLECTION + id_, state=gone, state_message=message)

    def servable(self, id_: str) -> Manifest:
        """The manifest of a context that can be decoded against by the loaded model.

        Raises what `Store.manifest` raises, ContextExpiredError, ModelMismatchError or DtypeMismatchError.
        """
        manifest = self.store.manifest(id_)
        self.store.check_expiry(manifest)
        self.runner.check(manifest)
        return manifest

    def ground(self, id_: str) -> Ground:
        """A context as `servable` gives it, and the one that it continues. Raises ParentMissingError, too."""
        return Ground.of(self.store, self.servable(id_))

    @property
    def nothing(self) -> Ground:
        """What a prompt stands on that begins with no stored context: no tokens."""
        manifest = self.runner.no_context.manifest
        return Ground(manifest, manifest)

    def beginning(self, token_ids: Sequence[int]) -> Ground:
        """The longest stored context, made without a salt, that tokens begin with, or are; `nothing` without one.

        Contexts that do not fit into memory are passed over.
        """
        first = first_digest(self.runner.identity, self.runner.kv_dtype, "")
        digests = continued_digests(first, token_ids)
        found = longest_prefix(self.store, digests, token_ids, self._may_hold)
        return self.nothing if found is None else Ground.of(self.store, found)

    def _may_hold(self, manifest: Manifest) -> bool:
        try:
            return self.arena.may_hold(Ground.of(self.store, manifest).base)
        except SparseKVError:
            return False

    def children(self) -> Counter[str]:
        """How many contexts continue each one, by its id."""
        return Counter(entry.parent.id for entry in self.store.list() if entry.parent is not None)

    def describe(
        self, entry: Manifest | BrokenContext, resident: set[str], children: Counter[str]
    ) -> context_pb2.Context:
        """A context of the store as the API shows it; `resident` are the ids in memory, `children` as above."""
        if isinstance(entry, BrokenContext):
            return self._describe_broken(entry)
        try:
            base = Ground.of(self.store, entry).base
        except SparseKVError as error:
            return self._describe_broken(BrokenContext(entry.id, error))
        tuned, problem = None, ""
        try:
            tuned = self.tuned_default(base.id)
        except SparseKVError as error:
            problem = self.paths.hide(error.message)
        return describe_context(
            base,
            tuned,
            problem,
            expired=self.store.expired(entry),
            resident=base.id in resident,
            placement=self.arena.placement(base),
            child=entry if entry.parent is not None else None,
            children=children[entry.id],
        )

    def _describe_broken(self, entry: BrokenContext) -> context_pb2.Context:
        broken = describe_broken(entry)
        broken.state_message = self.paths.hide(broken.state_message)
        return broken

    def tuned_default(self, id_: str) -> TunedDefault | None:
        """What the context was tuned to, if it was. Raises TunedDefaultError where that cannot be known any more."""
        return self.store.default_method(id_)

    def close(self, patience_s: float | None = None) -> bool:
        """Ends what is being done, tells whose requests are not finished, and lets go of everything.

        patience_s: for the step that the engine takes; None waits as long as it does. Returns whether all has ended:
        otherwise nothing may be let go of but by ending the process.
        """
        self.preparation.close()
        self.beginnings.close()
        self.housekeeping.stop()
        self.arena.stop_loading()  # which the engine may be waiting for
        return self.engine.shutdown(patience_s=patience_s)

    def release(self) -> None:
        """Gives memory back, after `close`."""
        self.arena.clear()
        self.runner.close()


_PROMPT_CHUNKS = {"cpu": 256, "cuda": 512}
"""Prompt tokens per step, which other streams wait for; a GPU reads twice as many in less time."""

logger = logging.getLogger(__name__)


def load_backend(
    config: ServeConfig,
    store: Store,
    folder: ModelFolder,
    paths: Paths,
    phase: Phase,
    on_crash: Callable[[BaseException], None],
    on_compiling: Callable[[Future[None]], None],
) -> ServiceBackend:
    """Loads the model and prepares what the store's contexts name. Raises ModelUnsupportedError.

    on_crash: of the engine. on_compiling: gets what is being compiled by other processes, which is to be cancelled when
    this one ends.
    What is to be compiled is compiled by other processes from the beginning on, while this one loads the model.
    """
    started = time.monotonic()
    set_threads(config.threads)
    device = pick_device(config.device)
    alone = [manifest for manifest in store.list() if manifest.parent is None] if config.warm_up else []
    named = {manifest.id: _named_methods(store, manifest) for manifest in alone}
    compile_named = partial(_compile, config, checkpoint_dtype(folder), phase, device, on_compiling)
    names = sorted({method.name for methods in named.values() for method in methods})
    compiling = compile_named(names) if config.warm_up else _done()
    searching = SearchThreads(config.search_threads, config.lanes, config.waves)
    try:
        runner = ModelRunner(
            folder,
            device,
            config.dtype,
            config.compilation,
            config.prompts,
            searching,
            phase.say,
            config.weights,
        )
        loaded = time.monotonic()
        compiling.result()
    except BaseException:
        compiling.cancel()
        raise
    budget = memory_budget(device, config.memory, config.device_memory, free_memory(torch.device("cpu")))
    arena = Arena(
        budget,
        device=context_device(device),
        placement=parse_placement(config.placement),
        slots=SlotRoom(config.slot_share, config.lanes),
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
        if config.warm_up:
            runner.prepare_prompts()

    costs, auto = StepCosts(on_gpu=device.type == "cuda"), config.method == AUTO
    if auto:
        for fitted, where in wanted:
            costs.want(fitted.method, where)
    timer = IdleTimer(runner, costs)

    def note_step(sessions: Sequence[Session], seconds: float) -> None:
        first = sessions[0]
        if all(each.context is first.context and each.method == first.method for each in sessions):
            tokens, where = first.context.manifest.token_count, first.context.placement
            costs.note(first.method, where, tokens, len(sessions), seconds)

    engine: Engine[Session] = Engine(
        runner,
        max_sessions=config.max_sessions,
        max_waiting=config.max_waiting,
        prompt_chunk=config.prompt_chunk or _PROMPT_CHUNKS[device.type],
        session_memory=session_memory,
        on_start=begin,
        on_crash=on_crash,
        on_idle=timer.advance,
        on_step=note_step,
    )
    queue, uploads = JobQueue(config.store), Uploads(config.store)
    room = StoreRoom(store, config.store_bytes)
    workshop = Workshop(store, queue, uploads, runner.identity, runner.tokenizer, runner.kv_dtype, room)
    housekeeping = Housekeeping(store, room, arena.leased_ids, lambda: engine.places == 0)
    rules = KeepingRules(config.keep_beginnings, config.keep_beginnings_after, config.keep_beginnings_bytes)
    beginnings = KeptBeginnings(workshop, arena, rules)
    return ServiceBackend(
        store, arena, runner, engine, workshop, housekeeping, preparation, beginnings, paths, costs, auto
    )


def set_threads(count: int) -> None:
    """Sets the threads of kernels and matrix products; numba keeps the number per calling thread."""
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


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
