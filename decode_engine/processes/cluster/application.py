"""What runs on Ray: engines, workers and front doors, each an actor that Ray starts again wherever it ends.

Requests do not pass through Ray. Each actor runs one of our commands, or a front door. Ray Serve is not used: it opens
a port of every replica at all addresses, which unpickles what anybody sends there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray

from decode_engine.processes.cluster.cluster_config import ClusterConfig
from decode_engine.processes.cluster.front import FrontDoor
from decode_engine.processes.cluster.near import cores_near
from decode_engine.processes.cluster.roster import Load, Roster, Scale
from decode_engine.processes.cluster.watched import Watched
from decode_engine.rpc.client.clients import Client
from decode_engine.rpc.door.options import Certificates, Credentials
from decode_engine.rpc.routing.router import Replica
from index_store.errors import SparseKVError
from index_store.store.catalog import Store

NAMESPACE = "sparsekv"
_TELL_S = 0.5
_ANSWER_S = 5.0
_DOWN_S = 60.0
"""After which an engine that runs and does not answer is ended, and so started again."""
_LAST_S = 10.0
_ACTOR = {"namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1}

logger = logging.getLogger(__name__)


def roster() -> Any:
    """The actor that has the roster, made where there is none."""
    options = {"name": "roster", "get_if_exists": True, "num_cpus": 0, **_ACTOR}
    return ray.remote(Roster).options(**options).remote()


class _Member:
    """Runs a command, and tells the roster of it again and again, on a thread."""

    def __init__(
        self,
        name: str,
        config: ClusterConfig,
        command: list[str],
        *,
        serves: bool,
        cores: Collection[int] | None = None,
    ) -> None:
        self._name, self._config = name, config
        self._leaving = threading.Event()
        self._roster = roster()
        node = ray.get_runtime_context().get_node_id()
        Store(config.store, create=True)  # of this machine, which may have had none
        self._store = f"{node}:{Path(config.store).resolve()}"
        given = ["--store", str(config.store), "--model", config.model]
        given += [] if config.objects is None else ["--objects", config.objects]
        self._watched = Watched(["-m", *command, *given], serves=serves, cores=cores)
        threading.Thread(target=self._keep, name="member", daemon=True).start()

    def end(self) -> None:
        """Takes nothing new, lets running requests end, and ends command and actor."""
        self._leaving.set()
        ray.get(self._roster.leave.remote(self._name), timeout=_ANSWER_S)
        self._watched.stop(self._config.grace + _LAST_S)
        ray.actor.exit_actor()

    def _keep(self) -> None:
        told = time.monotonic()
        while not self._leaving.wait(_TELL_S):
            try:
                self._tell()
                told = time.monotonic()
            except (ray.exceptions.RayError, SparseKVError) as error:
                logger.warning("cannot tell how it is: %s", error)
            if time.monotonic() - told > _DOWN_S:
                logger.warning("it has not answered for %g s; starting it again", _DOWN_S)
                self._watched.kill()
                told = time.monotonic()

    def _tell(self) -> None:
        raise NotImplementedError


class Engine(_Member):
    """`decode-engine serve` over this machine's store."""

    def __init__(self, name: str, config: ClusterConfig) -> None:
        host = ray.util.get_node_ip_address()
        command = ["decode_engine", "serve"]
        command += ["--listen", f"{host}:0", "--http-port", "0", "--doors", "0", "--format", "json"]
        command += ["--grace", str(config.grace), "--max-sessions", str(config.max_sessions)]
        command += [] if config.engine_config is None else ["--config", str(config.engine_config)]
        token = None if config.token is None else config.token.read_text().strip()
        self._credentials = Credentials(token=token)
        super().__init__(name, config, command, serves=True, cores=cores_near(os.environ))

    def _tell(self) -> None:
        told = self._watched.told
        if told is None:
            return
        with Client(told["address"], timeout_s=2.0, credentials=self._credentials) as client:
            status = client.server_status()
        limit = status.context_limit_bytes + status.context_device_limit_bytes
        used = status.context_used_bytes + status.context_device_used_bytes
        running = status.prompting + status.decoding
        sessions = self._config.max_sessions
        replica = Replica(
            self._name,
            told["address"],
            told["url"],
            store=self._store,
            sessions=sessions,
            memory_bytes=limit,
            load=status.waiting + running,
        )
        load = Load(status.waiting, running, sessions, used / max(1, limit))
        ray.get(self._roster.note.remote(replica, load), timeout=_ANSWER_S)


class Worker(_Member):
    """`prefill-worker serve` on this machine's store."""

    def __init__(self, name: str, config: ClusterConfig) -> None:
        command = ["prefill_worker", "serve"]
        command += [] if config.worker_config is None else ["--config", str(config.worker_config)]
        super().__init__(name, config, command, serves=False)

    def _tell(self) -> None:
        if self._watched.told is not None:
            ray.get(self._roster.note_worker.remote(self._name, self._store), timeout=_ANSWER_S)


class Door:
    """A front door on the machine of the cluster's address."""

    def __init__(self, name: str, config: ClusterConfig) -> None:
        self._config, self._roster = config, roster()
        certificates = Certificates.given(config.tls_cert, config.tls_key)
        http = f"{config.listen.rpartition(':')[0]}:{config.http_port}"
        replicas = ray.get(self._roster.replicas.remote())
        self._front = FrontDoor(
            config.listen, http, replicas=replicas, certificates=certificates, shared=config.doors > 1
        )
        self._ending = threading.Event()
        threading.Thread(target=self._follow, name="roster", daemon=True).start()

    def _follow(self) -> None:
        while not self._ending.wait(_TELL_S / 2):
            try:
                self._front.update(ray.get(self._roster.replicas.remote(), timeout=_ANSWER_S))
            except ray.exceptions.RayError as error:  # who was there last is asked meanwhile
                logger.warning("the roster does not answer: %s", error)

    def serves(self) -> bool:
        return True

    def end(self) -> None:
        """Takes no more connections, lets running calls end, and ends the actor."""
        self._ending.set()
        self._front.stop(self._config.grace)
        ray.actor.exit_actor()


_KINDS: Mapping[str, type] = {"door": Door, "engine": Engine, "worker": Worker}


def keep(config: ClusterConfig, stopping: Callable[[], bool], on_serving: Callable[[], None]) -> None:
    """Has all of it run until told to stop, and ends it then. Ray is connected to. on_serving: called once all serve.

    Who is called so a second time, since who was called before has ended, goes on with what it finds. Raises what keeps
    a front door from its ports.
    """
    scale = Scale(config.replicas, max(config.replicas, config.most_replicas), config.down_after)
    serving = False
    while not stopping():
        time.sleep(_TELL_S)
        wanted = {"engine": scale.number, "worker": config.workers, "door": config.doors}
        _have(config, {f"{kind}-{number}": kind for kind in wanted for number in range(wanted[kind])})
        try:
            told = ray.get(roster().loads.remote(), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            logger.warning("the roster does not answer: %s", error)
            continue
        if not serving and len(told) >= config.replicas:
            doors = [ray.get_actor(f"door-{number}", NAMESPACE) for number in range(config.doors)]
            ray.get([door.serves.remote() for door in doors])
            serving = True
            on_serving()
        scale.note(told)
    for kinds in (("door",), ("engine", "worker")):
        ends = [ray.get_actor(name, NAMESPACE).end.remote() for name in _names() if name.startswith(kinds)]
        ray.wait(ends, num_returns=max(1, len(ends)), timeout=config.grace + 2 * _LAST_S) if ends else None


def _names() -> list[str]:
    return [name for name in ray.util.list_named_actors() if name.partition("-")[0] in _KINDS]


def _have(config: ClusterConfig, wanted: Mapping[str, str]) -> None:
    """Begins what is wanted and not there, and ends what is not wanted; its name is free when it has ended."""
    there = _names()
    for name in there:
        if name not in wanted:
            ray.get_actor(name, NAMESPACE).end.remote()
    for name in wanted.keys() - set(there):
        kind = wanted[name]
        of_kind: dict[str, Any] = {
            "engine": {"num_cpus": config.cpus, "num_gpus": config.gpus, "scheduling_strategy": "SPREAD"},
            "worker": {"num_cpus": 0, "scheduling_strategy": "SPREAD"},
            "door": {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        }
        ray.remote(_KINDS[kind]).options(name=name, **of_kind[kind], **_ACTOR).remote(name, config)
