"""The application on Ray Serve: engines, workers and front doors. Requests do not pass through Ray.

Ray places the replicas, watches them, starts them again and changes their number. Each is a process of Ray's that runs
one of our commands, or a front door.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve

from decode_engine.processes.cluster.cluster_config import ClusterConfig
from decode_engine.processes.cluster.front import FrontDoor
from decode_engine.processes.cluster.near import cores_near
from decode_engine.processes.cluster.roster import Roster
from decode_engine.processes.cluster.scaling import Load, replicas_wanted
from decode_engine.processes.cluster.watched import Watched
from decode_engine.rpc.client.clients import Client
from decode_engine.rpc.door.options import Certificates, Credentials
from decode_engine.rpc.routing.router import Replica
from index_store.errors import SparseKVError
from index_store.store.catalog import Store

NAME = "sparsekv"
_TELL_S = 0.5
_START_S = 900.0
_DOWN_S = 60.0
"""After which one that serves no more is made anew by Ray, perhaps elsewhere."""
_UPSCALE_S, _DOWNSCALE_S = 5.0, 120.0
_LAST_S = 10.0

logger = logging.getLogger(__name__)


def roster() -> Any:
    """The actor that has the roster, made where there is none."""
    options = {"name": "roster", "namespace": NAME, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
    return ray.remote(Roster).options(get_if_exists=True, **options).remote()


class _Member:
    """Tells the roster of itself again and again, on a thread."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex
        self._leaving = threading.Event()
        self._roster = roster()
        node = ray.get_runtime_context().get_node_id()
        Store(config.store, create=True)  # of this machine, which may have had none
        self._store = f"{node}:{Path(config.store).resolve()}"

    def _begin(self, tell: Callable[[], None]) -> None:
        def keep() -> None:
            while not self._leaving.wait(_TELL_S):
                try:
                    tell()
                except (ray.exceptions.RayError, SparseKVError) as error:
                    logger.warning("cannot tell how it is: %s", error)

        threading.Thread(target=keep, name="member", daemon=True).start()

    def _leave(self) -> None:
        self._leaving.set()
        ray.get(self._roster.leave.remote(self._incarnation), timeout=_TELL_S)


class Engine(_Member):
    """A replica: `decode-engine serve` over this machine's store."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        host = ray.util.get_node_ip_address()
        command = ["-m", "decode_engine", "serve", "--store", str(config.store), "--model", config.model]
        command += ["--listen", f"{host}:0", "--http-port", "0", "--doors", "0", "--format", "json"]
        command += ["--grace", str(config.grace), "--max-sessions", str(config.max_sessions)]
        command += [] if config.objects is None else ["--objects", config.objects]
        command += [] if config.engine_config is None else ["--config", str(config.engine_config)]
        token = None if config.token is None else config.token.read_text().strip()
        self._credentials = Credentials(token=token)
        self._watched = Watched(command, serves=True, cores=cores_near(os.environ))
        self._name, self._load = "", Load(0, 0, config.max_sessions, 0)
        if not self._watched.wait(_START_S):
            raise RuntimeError(f"the engine does not serve after {_START_S:g} s; its log says why")
        self._tell()
        self._begin(self._tell)

    def _tell(self) -> None:
        told = self._watched.told
        if told is None:  # its name is kept for it
            self._note(Replica(self._name, "", store=self._store))
            return
        with Client(told["address"], timeout_s=2.0, credentials=self._credentials) as client:
            status = client.server_status()
        limit = status.context_limit_bytes + status.context_device_limit_bytes
        used = status.context_used_bytes + status.context_device_used_bytes
        running = status.prompting + status.decoding
        sessions = self._config.max_sessions
        self._load = Load(status.waiting, running, sessions, used / max(1, limit))
        self._note(
            Replica(
                self._name,
                told["address"],
                told["url"],
                store=self._store,
                sessions=sessions,
                memory_bytes=limit,
                load=status.waiting + running,
            )
        )

    def _note(self, replica: Replica) -> None:
        self._name = ray.get(self._roster.note.remote(self._incarnation, replica), timeout=5 * _TELL_S)

    def check_health(self) -> None:
        """Raises RuntimeError where its engine has not served for a while."""
        since = self._watched.down_since
        if since is not None and time.monotonic() - since > _DOWN_S:
            raise RuntimeError(f"the engine has not served for {_DOWN_S:g} s")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas is chosen by."""
        load = self._load
        return {
            "waiting": load.waiting,
            "running": load.running,
            "sessions": load.sessions,
            "resident": load.resident,
        }

    async def __del__(self) -> None:
        """Takes nothing new, lets running requests end, and ends the engine."""
        self._leave()
        await asyncio.to_thread(self._watched.stop, self._config.grace + _LAST_S)


class Worker(_Member):
    """A replica: `prefill-worker serve` on this machine's store."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        command = ["-m", "prefill_worker", "serve", "--store", str(config.store), "--model", config.model]
        command += [] if config.objects is None else ["--objects", config.objects]
        command += [] if config.worker_config is None else ["--config", str(config.worker_config)]
        self._watched = Watched(command, serves=False)
        self._begin(lambda: ray.get(self._roster.note_worker.remote(self._incarnation, self._store)))

    def check_health(self) -> None:
        """Raises RuntimeError where it does not run."""
        since = self._watched.down_since
        if since is not None and time.monotonic() - since > _DOWN_S:
            raise RuntimeError(f"the worker has not run for {_DOWN_S:g} s")

    async def __del__(self) -> None:
        """Ends the worker; who comes next goes on with its job."""
        self._leave()
        await asyncio.to_thread(self._watched.stop, _LAST_S)


class Door:
    """A replica: a front door on the machine of the cluster's address."""

    def __init__(self, config: ClusterConfig, *others: object) -> None:
        """others: deployments that belong to the application."""
        self._config, self._roster = config, roster()
        certificates = None
        if config.tls_cert is not None and config.tls_key is not None:
            certificates = Certificates(config.tls_cert, config.tls_key)
            certificates.check()
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
                self._front.update(ray.get(self._roster.replicas.remote(), timeout=5 * _TELL_S))
            except ray.exceptions.RayError as error:  # who was there last is asked meanwhile
                logger.warning("the roster does not answer: %s", error)

    async def __del__(self) -> None:
        """Takes no more connections, and lets running calls end."""
        self._ending.set()
        await asyncio.to_thread(self._front.stop, self._config.grace)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's way to ask how many engines are wanted."""
    told = context.aggregated_metrics or {}
    names = ("waiting", "running", "sessions", "resident")
    replicas = set.intersection(*(set(told.get(name, {})) for name in names))
    loads = [Load(*(float(told[name][replica]) for name in names)) for replica in replicas]
    if len(loads) < context.current_num_replicas:  # some have not told yet
        return context.target_num_replicas, {}
    return replicas_wanted(loads), {}


def deploy(config: ClusterConfig) -> None:
    """Has the application run, and returns when all of it does. Ray is connected to."""
    serve.start(http_options={"location": "NoServer"})
    resources = {"num_cpus": config.cpus, "num_gpus": config.gpus}
    most = max(config.replicas, config.most_replicas)
    scaling: dict[str, Any] = {"num_replicas": config.replicas}
    if most > config.replicas:
        chosen = {"policy_function": f"{__name__}:policy"}
        scaling = {
            "autoscaling_config": {
                "min_replicas": config.replicas,
                "max_replicas": most,
                "upscale_delay_s": _UPSCALE_S,
                "downscale_delay_s": _DOWNSCALE_S,
                "metrics_interval_s": 1.0,
                "look_back_period_s": 2.0,
                "policy": chosen,
            }
        }
    often = {"health_check_period_s": 2.0, "health_check_timeout_s": 30.0}
    ends = {"graceful_shutdown_timeout_s": config.grace + 2 * _LAST_S}
    engine = serve.deployment(name="engine", ray_actor_options=resources, **scaling, **often, **ends)(Engine)
    others = [engine.bind(config)]
    if config.workers:
        worker = serve.deployment(
            name="worker", num_replicas=config.workers, ray_actor_options={"num_cpus": 0}, **often, **ends
        )(Worker)
        others.append(worker.bind(config))
    door = serve.deployment(
        name="door", num_replicas=config.doors, ray_actor_options={"num_cpus": 0}, **often, **ends
    )(Door)
    serve.run(door.bind(config, *others), name=NAME, route_prefix=None)
