"""The gRPC door, and a server of one process: binds the port, loads the model, serves until told to stop.

What takes seconds to import is imported when it loads: the port answers before.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from google.longrunning import operations_pb2, operations_pb2_grpc

from decode_engine.rpc.contexts.own_worker import OwnWorker
from decode_engine.rpc.door.access import Door, FailedAttempts, Sharing
from decode_engine.rpc.door.audit import AuditLog
from decode_engine.rpc.transport.calls import Limits
from decode_engine.rpc.transport.listener import Listener
from decode_engine.rpc.transport.starting import Phase, Services, Stopping
from decode_engine.rpc.transport.status import Paths
from decode_engine.settings.config import ServeConfig
from index_store.cli.traces import open_traces
from index_store.jobs.job_queue import JobQueue
from index_store.models.resolve import resolve_model
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from decode_engine.core.service import EngineService
    from decode_engine.engine.sampling.constraints import Vocabulary
    from decode_engine.orders.events import Core, Facts
    from decode_engine.rpc.answers.answering import Answering
    from decode_engine.rpc.contexts.creation import Workshop
    from index_store.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SERVICES = (
    context_pb2.DESCRIPTOR.services_by_name["ContextService"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    operations_pb2.DESCRIPTOR.services_by_name["Operations"].full_name,
)
LAST_WORDS_S = 1.0
"""After the grace, for the reason why the rest was ended to reach its clients."""
_STEP_S = 1.0
"""Then, for the step that the engine takes: what compiles or waits for a device cannot be interrupted."""
_LOOK_S = 0.1  # whether somebody has shortened the time of running calls
_OTHER_HANDLES = 1024  # files that are open beside the connections, mostly of contexts that are being loaded


@dataclass(frozen=True, slots=True)
class Served:
    """What answers in this process, at whichever port it is asked. services: whose methods are handlers, by name."""

    answering: Answering
    services: Mapping[str, Any]


class GrpcDoor:
    """A port for gRPC, and its services once there is an engine.

    It answers from the start: health checks with NOT_SERVING, and all else with NOT_READY and the phase, until `open`
    is called. Raises StoreError or ModelUnsupportedError when store or model are not there, AddressError when the port
    is taken, InvalidArgumentError when spans cannot be sent where the environment wants them.
    """

    def __init__(
        self,
        config: ServeConfig,
        phase: Phase,
        *,
        sharing: Sharing | None = None,
        on_drain: Callable[[float], None] = lambda grace_s: None,
    ) -> None:
        """sharing: where other processes listen at the port, too. on_drain: told that a client has the server drain,
        and how long calls may go on; the door drains already."""
        self._on_drain = on_drain
        self._sharing = sharing or Sharing(places=config.places)
        self._phase = phase
        self._grace = config.grace
        self._served: Served | None = None
        self.store = config.open_store()
        if config.prefill:
            self.store.folders.check_writable()
        self.folder = resolve_model(config.model)
        self._services = Services(SERVICES, phase.refusal)
        self.paths = Paths((config.store, self.folder.path), filter(None, [config.objects]))
        self.certificates = config.certificates()
        self.traces = open_traces()
        _provide_handles(config.max_connections)
        limits = Limits(
            connections=config.max_connections,
            streams=config.max_streams,
            idle_s=config.idle_timeout,
            unread_s=config.unread_timeout,
        ).of_one(self._sharing)
        self.audit = None if config.audit_log is None else AuditLog(config.audit_log)
        attempts = FailedAttempts().of_one(self._sharing)
        self.door = Door(config.tokens, attempts, config.jwt_rules(), config.tls_names)
        try:
            self.listener = Listener(
                config.listen,
                SERVICES,
                lambda server: server.add_generic_rpc_handlers((self._services,)),
                limits,
                self.paths,
                self.door,
                self.certificates,
                phase=lambda: phase.text,
                shared=sharing is not None,
                traces=self.traces,
                audit=self.audit,
            )
        except BaseException:
            self.door.close()
            raise

    @property
    def served(self) -> Served:
        """What answers. Raises NotReadyError before `open`."""
        if self._served is None:
            raise self._phase.refusal()
        return self._served

    def open(
        self, core: Core, facts: Facts, tokenizer: Tokenizer, vocabulary: Vocabulary, workshop: Workshop
    ) -> None:
        """From here on calls are served."""
        from decode_engine.rpc.answers.answering import Answering
        from decode_engine.rpc.context_service import ContextService, Library, OperationsService
        from decode_engine.rpc.contexts.listing import Pager
        from decode_engine.rpc.generation_service import GenerationService

        sharing = self._sharing
        loop = self.listener.loop

        def allow(tenant: str, tokens: int) -> None:
            asyncio.run_coroutine_threadsafe(core.allow(tenant, tokens), loop).result()

        workshop = replace(workshop, allow=allow)
        library = Library(self.store, workshop, core, self.listener.loop, self.paths, Pager(sharing.key))
        answering = Answering(core, facts, self.store, tokenizer, vocabulary, sharing)
        contexts = ContextService(library, facts.identity.fingerprint, sharing)
        generations = GenerationService(answering, self.paths, sharing, self._drain)
        operations = OperationsService(library, sharing)
        services = self._services
        context_pb2_grpc.add_ContextServiceServicer_to_server(contexts, services)  # type: ignore[no-untyped-call]
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(generations, services)  # type: ignore[no-untyped-call]
        operations_pb2_grpc.add_OperationsServicer_to_server(operations, services)
        by_name = dict(zip(SERVICES, (contexts, generations, operations), strict=True))
        self._served = Served(answering, by_name)
        services.open()
        self.listener.set_serving(True)

    def _drain(self, limit_s: float | None) -> None:
        grace_s = self._grace if limit_s is None else limit_s
        self.listener.begin_drain(grace_s)
        self._on_drain(grace_s)

    def close(self) -> None:
        """Ends the port, after `listener.begin_stop`. Idempotent."""
        self.listener.close()
        self.door.close()
        if self.audit is not None:
            self.audit.close()
        if self.traces is not None:
            self.traces.close(LAST_WORDS_S)


class DecodeServer:
    """A gRPC server over one store and one model, with its engine in the same process.

    Use as a context manager, or call `stop`. Raises what `GrpcDoor` raises, which answers from the start.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        log_json: bool = False,
        on_drain: Callable[[float], None] = lambda grace_s: None,
    ) -> None:
        """log_json: how a worker of the server's own logs. on_drain: see `GrpcDoor`."""
        self._config = config
        self._log_json = log_json
        self._worker: OwnWorker | None = None
        self.phase = Phase()
        self._backend: EngineService | None = None
        self._stopped = False
        self._compiling: list[Future[None]] = []
        self.grpc = GrpcDoor(config, self.phase, on_drain=on_drain)
        self._listener = self.grpc.listener
        self.address = self._listener.address
        config.warn_of_exposure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop(0.0)

    @property
    def backend(self) -> EngineService:
        """What is served from. Raises NotReadyError before `load` has returned."""
        if self._backend is None:
            raise self.phase.refusal()
        return self._backend

    def load(self) -> None:
        """Loads the model and prepares methods, then accepts calls. Raises ModelUnsupportedError."""
        self.phase.say("import libraries")
        from decode_engine.core.loading import load_service
        from decode_engine.core.local import LocalCore

        backend = load_service(
            self._config,
            self.grpc.store,
            self.grpc.folder,
            self.phase,
            on_crash=lambda error: self._listener.set_serving(False),
            on_compiling=self._note_compiling,
            traces=self.grpc.traces,
        )
        self._backend = backend
        backend.start()
        if self._config.prefill:
            queue, fingerprint = backend.workshop.queue, backend.runner.identity.fingerprint
            self._worker = start_worker(self._config, self._log_json, queue, fingerprint)
        runner = backend.runner
        self.grpc.open(
            LocalCore(backend), backend.facts(), runner.tokenizer, runner.vocabulary, backend.workshop
        )

    def _note_compiling(self, compiling: Future[None]) -> None:
        self._compiling = [each for each in self._compiling if not each.done()] + [compiling]
        if self._stopped:
            compiling.cancel()

    def drain(self, stopping: Stopping) -> None:
        """Takes no new calls, and returns when none runs any more, or they have no time left."""
        drained = self._listener.begin_drain(stopping.left_s)
        while not drained.done() and stopping.left_s:
            wait([drained], min(stopping.left_s, _LOOK_S))

    def stop(self, grace_s: float) -> None:
        """Accepts no more calls, lets running ones finish for `grace_s` seconds, ends the rest. Idempotent.

        Where the engine's step does not end soon after that, as one that compiles, its clients are told all the same,
        and memory stays taken until the process ends.
        """
        if self._stopped:
            return
        self._stopped = True
        for compiling in self._compiling:
            compiling.cancel()
        backend = self._backend
        running = 0 if backend is None else backend.engine.places
        logger.info("shutting down, waiting up to %g s for running requests: %d", grace_s, running)
        stopped = self._listener.begin_stop(grace_s + LAST_WORDS_S + _STEP_S)
        in_time = bool(wait([stopped], grace_s).done)
        ended = True
        if backend is not None:
            if not in_time and backend.engine.places:
                logger.warning(
                    "%g s are over, ending unfinished requests: %d", grace_s, backend.engine.places
                )
            ended = backend.close(_STEP_S)  # tells the unfinished ones why; their calls' log lines name them
        if self._worker is not None:
            self._worker.stop()
        wait([stopped], 2 * LAST_WORDS_S)
        self.grpc.close()
        if backend is not None and ended:
            backend.release()


def start_worker(config: ServeConfig, log_json: bool, queue: JobQueue, fingerprint: str) -> OwnWorker:
    """Begins to make contexts that are ordered for the model of that fingerprint, in a process beside this one."""
    command = [sys.executable, "-m", "prefill_worker", "serve", "--store", str(config.store)]
    command += ["--model", config.model, "--grown-share", f"{config.grown_share:g}"]
    command += [] if config.store_bytes is None else ["--store-bytes", str(config.store_bytes)]
    command += [] if config.objects is None else ["--objects", config.objects]
    command += [] if config.quotas is None else ["--quotas", str(config.quotas)]
    level = logging.getLevelName(logger.getEffectiveLevel()).lower()
    command += ["--device", "cpu", "--attached", "--log-level", level]
    command += ["--format", "json" if log_json else "text"]
    worker = OwnWorker(command, max(1, config.threads // 2), partial(queue.attending, fingerprint))
    worker.start()
    return worker


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
