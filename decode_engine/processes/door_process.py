"""The process of a door: gRPC, and HTTP where it is wanted, in front of an engine of another process.

Its ports answer before it knows an engine.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from queue import SimpleQueue
from threading import Thread

from decode_engine.gateway.serving import http_door
from decode_engine.orders.events import Facts
from decode_engine.processes.attached import Drains, Parent, Serving, Setup, run_attached
from decode_engine.processes.link.remote import RemoteCore
from decode_engine.rpc.door.access import Sharing
from decode_engine.rpc.server import LAST_WORDS_S, GrpcDoor
from decode_engine.rpc.transport.starting import Phase
from index_store.errors import SparseKVError

logger = logging.getLogger(__name__)


class DoorProcess:
    """A gRPC door, and HTTP beside it, with an engine that comes and goes."""

    def __init__(self, parent: Parent, grpc: GrpcDoor, phase: Phase) -> None:
        self._parent = parent
        self._grpc = grpc
        self._facts: Facts | None = None
        self._prepare: Callable[[], None] = lambda: None
        self._changes: SimpleQueue[bool] = SimpleQueue()
        self._core = asyncio.run_coroutine_threadsafe(self._connect(phase), grpc.listener.loop).result()
        Thread(target=self._follow, name="readiness", daemon=True).start()

    async def _connect(self, phase: Phase) -> RemoteCore:
        return RemoteCore(self._parent.setup.link, self._changes.put, on_phase=phase.say)

    def _follow(self) -> None:
        """Opens once there is an engine, which takes a moment; after that health follows the engine."""
        try:
            while True:
                ready = self._changes.get()
                if ready:
                    facts = asyncio.run_coroutine_threadsafe(self._core.facts(), self._grpc.listener.loop)
                    self._take_in(facts.result())
                self._grpc.listener.set_serving(ready)
                if ready:
                    self._prepare()
                    self._prepare = lambda: None
        except SparseKVError as error:
            self._parent.fail(error)
        except Exception:
            logger.exception("the door cannot be opened")
        self._parent.end()

    def _take_in(self, facts: Facts) -> None:
        if self._facts is None:
            self._prepare = _open(self._grpc, self._core, facts, self._parent.setup)
        elif self._facts != facts:
            raise RuntimeError("the engine serves another model than before, which takes another door")
        self._facts = facts
        self._parent.say(Serving(facts.identity.fingerprint))

    def stop(self, grace_s: float) -> None:
        """Takes no more calls; those that run have the grace, and are told by the engine why they end."""
        stopped = self._grpc.listener.begin_stop(grace_s + 2 * LAST_WORDS_S)
        wait([stopped], grace_s + 3 * LAST_WORDS_S)
        self._grpc.listener.loop.call_soon_threadsafe(self._core.close)
        self._grpc.close()


def _open(grpc: GrpcDoor, core: RemoteCore, facts: Facts, setup: Setup) -> Callable[[], None]:
    """Returns what makes the parts that else the first request waits for that asks for them, a third of a second."""
    from decode_engine.engine.sampling.constraints import Vocabulary, VocabularySource
    from decode_engine.rpc.contexts.creation import Workshop
    from index_store.cli.quotas import QuotaFile
    from index_store.jobs.job_queue import JobQueue
    from index_store.jobs.uploads import Uploads
    from index_store.models.tokenizer import load_tokenizer
    from index_store.store.clean_up import StoreRoom

    identity, config = facts.identity, setup.config
    tokenizer = load_tokenizer(grpc.folder, identity.tokenizer_fingerprint)
    size, ends = identity.vocab_size, tokenizer.eos_ids
    vocabulary = Vocabulary(lambda: VocabularySource(tokenizer.definition(), size, ends))
    queue, uploads = JobQueue(config.store), Uploads(config.store)
    quota = partial(QuotaFile(config.quotas).limit, name="stored_bytes")
    room = StoreRoom(grpc.store, config.store_bytes, quota=quota)
    workshop = Workshop(grpc.store, queue, uploads, identity, tokenizer, facts.kv_dtype, room)
    grpc.open(core, facts, tokenizer, vocabulary, workshop)

    def prepare() -> None:
        try:
            _ = tokenizer.template_reads, vocabulary.token_bytes
        except Exception as error:
            logger.info("not prepared, a request that needs it is told why: %s", error)
        gc.freeze()

    gc.collect()
    gc.freeze()  # as in the engine: what stays is not looked through again while streams wait
    return prepare


def serve_door(parent: Parent) -> int:
    """Serves until told to stop. Returns the exit code."""
    setup, phase = parent.setup, Phase()
    sharing = Sharing(setup.config.doors, setup.config.places, setup.key)
    grpc = GrpcDoor(
        setup.config, phase, sharing=sharing, on_drain=lambda grace_s: parent.say(Drains(grace_s))
    )
    with http_door(setup.config, grpc, shared=True):
        process = DoorProcess(parent, grpc, phase)
        grace_s = parent.wait()
        process.stop(grace_s or 0.0)
    return 1 if grace_s is None else 0


def main() -> None:
    """Ends the process, whatever its threads do."""
    # A door computes nothing: from here on whoever imports these fails. transformers, which reads tokenizers, would
    # otherwise import torch because it is there, which takes seconds and most of a door's memory.
    for name in ("torch", "triton", "numba"):
        sys.modules[name] = None  # type: ignore[assignment]
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    run_attached(serve_door)
