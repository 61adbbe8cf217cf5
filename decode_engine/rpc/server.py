"""The server process: binds the port, loads the model, serves until told to stop."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numba
import torch
from google.longrunning import operations_pb2, operations_pb2_grpc
from grpc import aio

from decode_engine.engine.engine import Engine
from decode_engine.engine.session_memory import SHARE
from decode_engine.host_search.workers import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.method_choice import AUTO, StepCosts, measure_steps
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import prepare_for, warm_up
from decode_engine.rpc.backend import BackendSlot, ServiceBackend
from decode_engine.rpc.context_service import ContextService, OperationsService
from decode_engine.rpc.contexts.defaults import own_methods
from decode_engine.rpc.creation.orders import Workshop
from decode_engine.rpc.creation.own_worker import OwnWorker, worker_command
from decode_engine.rpc.door.options import certificates_of, warn_of_exposure
from decode_engine.rpc.door.rules import Door
from decode_engine.rpc.generation_service import GenerationService
from decode_engine.rpc.transport.calls import Limits
from decode_engine.rpc.transport.listener import Listener
from decode_engine.rpc.transport.status import Paths
from decode_engine.settings.config import ServeConfig
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.uploads import Uploads
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device, describe_device, memory_budget, pick_device
from index_store.memory.memory_sizes import free_memory
from index_store.memory.placement import SlotRoom, parse_placement, possible_placements
from index_store.methods.default import DEFAULT_METHOD
from index_store.methods.presets import get_method
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

logger = logging.getLogger(__name__)

SERVICES = (
    context_pb2.DESCRIPTOR.services_by_name["ContextService"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name,
)
_LAST_WORDS_S = 1.0  # after the grace, for the reason why the rest was ended to reach its clients
_PROMPT_CHUNKS = {"cpu": 256, "cuda": 512}
"""Prompt tokens per step, which other streams wait for; a GPU reads twice as many in less time."""
_OTHER_HANDLES = 1024  # files that are open beside the connections, mostly of contexts that are being loaded


class DecodeServer:
    """A gRPC server over one store and one model.

    It answers health checks from the start (NOT_SERVING until `load` has returned). Use as a context manager, or call
    `stop`. Raises StoreError or ModelUnsupportedError when store or model are not there, AddressError when the port is
    taken.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        door: Door | None = None,
        inside: Path | None = None,
        log_json: bool = False,
    ) -> None:
        """door: who may call; by the configuration's tokens if not given. inside: a socket beside the port, for this
        process's own gateway. log_json: how a worker of the server's own logs."""
        self._config = config
        self._log_json = log_json
        self._worker: OwnWorker | None = None
        self._store = Store(config.store, create=config.prefill)
        if config.prefill:
            self._store.folders.check_writable()
        self._folder = resolve_model(config.model)
        self._slot = BackendSlot()
        self._backend: ServiceBackend | None = None
        self._stopped = False
        self._paths = Paths((config.store, self._folder.path))
        _provide_handles(config.max_connections)
        limits = Limits(
            connections=config.max_connections,
            streams=config.max_streams,
            idle_s=config.idle_timeout,
            unread_s=config.unread_timeout,
        )
        certificates = certificates_of(config)
        self._door = door or Door(config.tokens)
        try:
            self._listener = Listener(
                config.listen, SERVICES, self._register, limits, self._paths, self._door, certificates, inside
            )
        except BaseException:
            self._door.close()
            raise
        self.address = self._listener.address
        warn_of_exposure(config, config.listen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(0.0)

    def _register(self, server: aio.Server) -> None:
        config = self._config
        most = config.max_sessions + config.max_waiting - config.max_waiting // 4
        generations = GenerationService(self._slot, config.max_client_requests or most)
        context_pb2_grpc.add_ContextServiceServicer_to_server(ContextService(self._slot), server)  # type: ignore[no-untyped-call]
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generations, server)  # type: ignore[no-untyped-call]
        operations_pb2_grpc.add_OperationsServicer_to_server(OperationsService(self._slot), server)

    @property
    def backend(self) -> ServiceBackend:
        """What is served from. Raises NotReadyError before `load` has returned."""
        return self._slot.get()

    def load(self) -> None:
        """Loads and warms up the model, then accepts calls. Raises ModelUnsupportedError."""
        started = time.monotonic()
        self._set_threads()
        config = self._config
        device = pick_device(config.device)
        runner = ModelRunner(
            self._folder,
            device,
            config.dtype,
            config.compilation,
            config.prompts,
            SearchThreads(config.search_threads, config.lanes, config.waves),
            weights=config.weights,
        )
        loaded = time.monotonic()
        free_host = free_memory(torch.device("cpu"))
        budget = memory_budget(device, config.memory, config.device_memory, free_host)
        placement = parse_placement(config.placement)
        possible = possible_placements(placement, device.type == "cuda")
        slots = SlotRoom(config.slot_share, config.lanes)
        arena = Arena(budget, device=context_device(device), placement=placement, slots=slots)
        session_memory = config.session_memory or free_memory(device) // SHARE
        methods: Sequence[str] = ()
        costs = StepCosts()
        if config.warm_up:
            methods = warm_up(runner, config.max_sessions, possible)
            default = get_method(DEFAULT_METHOD)
            alone = [manifest for manifest in self._store.list() if manifest.parent is None]
            prepare_for(runner, alone, default, config.max_sessions, arena.placement)
            if config.method == AUTO:
                costs = measure_steps(runner, [default, *own_methods(self._store, alone)], possible)
        logger.info(
            "model %s loaded on %s in %.1f s, %d bytes of host and %d of device memory for contexts, %d for sessions, "
            "%s warmed up in %.1f s",
            self._folder.name,
            describe_device(device),
            loaded - started,
            budget.host,
            budget.device,
            session_memory,
            ", ".join(methods) or "no method",
            time.monotonic() - loaded,
        )
        engine: Engine[Session] = Engine(
            runner,
            max_sessions=config.max_sessions,
            max_waiting=config.max_waiting,
            prompt_chunk=config.prompt_chunk or _PROMPT_CHUNKS[device.type],
            session_memory=session_memory,
            on_start=partial(self._begin, runner),
            on_crash=lambda error: self._listener.set_serving(False),
        )
        workshop = Workshop(
            self._store,
            JobQueue(config.store),
            Uploads(config.store),
            runner.identity,
            runner.tokenizer,
            runner.kv_dtype,
        )
        self._backend = ServiceBackend(
            self._store, arena, runner, engine, workshop, self._paths, costs, config.method == AUTO
        )
        engine.start()
        if config.prefill:
            level = logging.getLevelName(logger.getEffectiveLevel()).lower()
            command = worker_command(
                str(config.store),
                config.model,
                grown_share=config.grown_share,
                as_json=self._log_json,
                log_level=level,
            )
            self._worker = OwnWorker(command, max(1, config.threads // 2))
            self._worker.start()
        self._slot.fill(self._backend)
        self._listener.set_serving(True)

    def stop(self, grace_s: float) -> None:
        """Accepts no more calls, lets running ones finish for `grace_s` seconds, ends the rest. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        running = 0 if self._backend is None else self._backend.engine.places
        logger.info("shutting down, waiting up to %g s for running requests: %d", grace_s, running)
        stopped = self._listener.begin_stop(grace_s + _LAST_WORDS_S)
        in_time = bool(wait([stopped], grace_s).done)
        if self._backend is not None:
            engine = self._backend.engine
            if not in_time and engine.places:
                logger.warning("%g s are over, ending unfinished requests: %d", grace_s, engine.places)
            self._backend.arena.stop_loading()  # which the engine may be waiting for
            engine.shutdown()  # tells the unfinished ones why; their calls' log lines name them
        if self._worker is not None:
            self._worker.stop()
        stopped.result()
        self._listener.close()
        self._door.close()
        if self._backend is not None:
            self._backend.arena.clear()
            self._backend.runner.close()

    def _begin(self, runner: ModelRunner) -> None:
        """On the engine's thread, before its first turn: what a thread prepares for itself alone."""
        self._set_threads()
        if self._config.warm_up:
            runner.prepare_prompts()

    def _set_threads(self) -> None:
        """Sets the threads of kernels and matrix products; numba keeps the number per calling thread."""
        torch.set_num_threads(self._config.threads)
        numba.set_num_threads(min(self._config.threads, numba.config.NUMBA_NUM_THREADS))


def _provide_handles(connections: int) -> None:
    """Lets the process have a handle for every connection beside its files, as far as the system allows."""
    needed = connections + _OTHER_HANDLES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
    if allowed < needed:
        logger.warning(
            "the system allows %d open files, %d connections need %d: lower --max-connections or raise ulimit -n",
            allowed,
            connections,
            needed,
        )
