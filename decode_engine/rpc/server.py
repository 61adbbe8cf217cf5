"""The server process: binds the port, loads the model, serves until told to stop."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc
import numba
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from decode_engine.config import ServeConfig, is_loopback
from decode_engine.engine.engine import Engine
from decode_engine.engine.session_memory import SHARE
from decode_engine.errors import AddressError
from decode_engine.host_search.workers import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import prepare_for, warm_up
from decode_engine.rpc.service import BackendSlot, ContextService, GenerationService, ServiceBackend
from decode_engine.rpc.status import StatusInterceptor
from index_store.memory.arena import Arena
from index_store.memory.devices import context_device, describe_device, memory_budget, pick_device
from index_store.memory.memory_sizes import free_memory
from index_store.memory.placement import parse_placement, possible_placements
from index_store.methods.presets import DEFAULT_METHOD, get_method
from index_store.models.loading import resolve_model
from index_store.store.catalog import Store
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

logger = logging.getLogger(__name__)

SERVICES = (
    context_pb2.DESCRIPTOR.services_by_name["ContextService"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
)
_HEALTH_NAMES = ("", *SERVICES)
_MAX_REQUEST_BYTES = 32 * 2**20
_KEEPALIVE_MS = 20_000
_LAST_WORDS_S = 1.0  # after the grace, for the reason why the rest was ended to reach its clients
_PROMPT_CHUNKS = {"cpu": 256, "cuda": 512}
"""Prompt tokens per step, which other streams wait for; a GPU reads twice as many in less time."""
_SPARE_THREADS = 16  # for health checks and context calls beside the generations


class DecodeServer:
    """A gRPC server over one store and one model.

    It answers health checks from the start (NOT_SERVING until `load` has returned). Use as a context manager, or call
    `stop`. Raises StoreError or ModelUnsupportedError when store or model are not there, AddressError when the port is
    taken.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._store = Store(config.store)
        self._folder = resolve_model(config.model)
        self._slot = BackendSlot()
        self._backend: ServiceBackend | None = None
        self._health = health.HealthServicer()
        self._set_health(serving=False)
        self._stopped = False
        self._server, self.address = self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop(0.0)

    def _start(self) -> tuple[grpc.Server, str]:
        config = self._config
        server = grpc.server(
            ThreadPoolExecutor(config.max_sessions + config.max_waiting + _SPARE_THREADS, "rpc"),
            interceptors=[StatusInterceptor()],
            options=[
                ("grpc.so_reuseport", 0),  # a second server on the port is a mistake, not a replica
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
                ("grpc.keepalive_time_ms", _KEEPALIVE_MS),  # a client whose machine is gone ends its calls
                ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
            ],
        )
        context_pb2_grpc.add_ContextServiceServicer_to_server(ContextService(self._slot), server)  # type: ignore[no-untyped-call]
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationService(self._slot), server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(config.listen)
        except RuntimeError as error:
            raise AddressError(
                f"cannot listen at {config.listen}: the port is taken or the address is not this machine's; "
                "choose another one with --listen (port 0 picks a free one)",
                address=config.listen,
            ) from error
        if not is_loopback(config.listen):
            logger.warning(
                "listening at %s without encryption or authentication: anyone who reaches it can read and delete",
                config.listen,
            )
        server.start()
        return server, f"{config.listen.rpartition(':')[0]}:{port}"

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
            prefetch=config.prefetch,
        )
        loaded = time.monotonic()
        free_host = free_memory(torch.device("cpu"))
        budget = memory_budget(device, config.memory, config.device_memory, free_host)
        placement = parse_placement(config.placement)
        possible = possible_placements(placement, device.type == "cuda")
        arena = Arena(budget, device=context_device(device), placement=placement, lanes=config.lanes)
        session_memory = config.session_memory or free_memory(device) // SHARE
        methods = warm_up(runner, config.max_sessions, possible)
        default = get_method(DEFAULT_METHOD)
        prepare_for(runner, self._store.list(), default, config.max_sessions, arena.placement)
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
            on_start=self._set_threads,
            on_crash=lambda error: self._set_health(serving=False),
        )
        self._backend = ServiceBackend(self._store, arena, runner, engine)
        engine.start()
        self._slot.fill(self._backend)
        self._set_health(serving=True)

    def stop(self, grace_s: float) -> None:
        """Accepts no more calls, lets running ones finish for `grace_s` seconds, ends the rest. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        running = 0 if self._backend is None else self._backend.engine.places
        logger.info("shutting down, waiting up to %g s for running requests: %d", grace_s, running)
        self._health.enter_graceful_shutdown()
        stopped = self._server.stop(grace_s + _LAST_WORDS_S)
        in_time = stopped.wait(grace_s)
        if self._backend is not None:
            engine = self._backend.engine
            if not in_time and engine.places:
                logger.warning("%g s are over, ending unfinished requests: %d", grace_s, engine.places)
            self._backend.arena.stop_loading()  # which the engine may be waiting for
            engine.shutdown()  # tells the unfinished ones why; their calls' log lines name them
        stopped.wait()
        if self._backend is not None:
            self._backend.arena.clear()
            self._backend.runner.close()

    def _set_threads(self) -> None:
        """Sets the threads of kernels and matrix products; numba keeps the number per calling thread."""
        torch.set_num_threads(self._config.threads)
        numba.set_num_threads(min(self._config.threads, numba.config.NUMBA_NUM_THREADS))

    def _set_health(self, serving: bool) -> None:
        states = health_pb2.HealthCheckResponse
        for name in _HEALTH_NAMES:
            self._health.set(name, states.SERVING if serving else states.NOT_SERVING)
