"""A front door over engines that are given by their addresses: more than one server without Ray.

Nobody starts the engines here, or starts them again. Who answers is asked for its load; who does not, is left out until
it does.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from decode_engine.errors import NotReadyError
from decode_engine.processes.attached import stop_signals
from decode_engine.processes.cluster.cluster_config import FrontConfig
from decode_engine.processes.cluster.front import FrontDoor
from decode_engine.rpc.client.clients import Client
from decode_engine.rpc.door.access import UnauthenticatedError
from decode_engine.rpc.door.options import Certificates, Credentials
from decode_engine.rpc.routing.router import Replica
from index_store.errors import InvalidArgumentError, PermissionDeniedError, SparseKVError

_ASK_S = 0.5
_PATIENCE_S = 2.0
_ONE_STORE = "one"
_SERVES = "serves"
_ENGINE = re.compile(r"(?:([\w.-]+)=)?((\[[0-9A-Fa-f:.]+\]|[^\s:/=\[\]]+):\d{1,5})/(\d{1,5})")

logger = logging.getLogger(__name__)


def parse_engines(texts: Sequence[str], sessions: int, one_store: bool) -> list[Replica]:
    """Engines by [NAME=]HOST:PORT/HTTP-PORT; names are `engine-0` and on unless given.

    Raises InvalidArgumentError for other texts, and for a name or an address that comes twice.
    """
    found = []
    for number, text in enumerate(texts):
        match = _ENGINE.fullmatch(text)
        if match is None:
            raise InvalidArgumentError(
                f"--engine is {text!r}, expected [NAME=]HOST:PORT/HTTP-PORT, such as 127.0.0.1:50051/8000"
            )
        name, grpc, host, port = match.groups()
        if not all(1 <= int(each) <= 65535 for each in (grpc.rpartition(":")[2], port)):
            raise InvalidArgumentError(f"--engine is {text!r}, expected ports of 1 to 65535")
        store = _ONE_STORE if one_store else grpc
        http = f"http://{host}:{port}"
        found.append(Replica(name or f"engine-{number}", grpc, http, store=store, sessions=sessions))
    for what in ("name", "grpc"):
        if len({getattr(each, what) for each in found}) < len(found):
            raise InvalidArgumentError(
                f"--engine names an engine twice: {', '.join(texts)}; give each engine once"
            )
    return found


class Engines:
    """Asks engines again and again how they are, each on a thread of its own, and tells a front door who serves."""

    def __init__(self, engines: Sequence[Replica], credentials: Credentials) -> None:
        self._engines, self._credentials = engines, credentials
        self._told: dict[str, str] = {}
        self._models: list[str] = []
        self._leaving = threading.Event()
        self._pool = ThreadPoolExecutor(len(engines), thread_name_prefix="ask-engine")

    def ask(self) -> list[Replica]:
        asked = list(self._pool.map(self._ask_one, self._engines))
        for engine, (_, said) in zip(self._engines, asked, strict=True):
            if said != self._told.get(engine.name):
                log = logger.info if said.startswith(_SERVES) else logger.warning
                log("%s at %s %s", engine.name, engine.grpc, said)
            self._told[engine.name] = said
        models = sorted({said for found, said in asked if found is not None})
        if len(models) > 1 and models != self._models:
            logger.warning(
                "engines serve different models, and any of them may get any request: %s", "; ".join(models)
            )
        self._models = models
        return [found for found, _ in asked if found is not None]

    def keep(self, door: FrontDoor) -> None:
        """Tells the front door until `leave`."""
        while not self._leaving.wait(_ASK_S):
            door.update(self.ask())

    def leave(self) -> None:
        """Ends `keep` soon. To be called when nobody asks any more, or with `keep` on another thread."""
        self._leaving.set()

    def _ask_one(self, engine: Replica) -> tuple[Replica | None, str]:
        """The engine, None where it cannot be asked, and what is to be said of it."""
        try:
            with Client(engine.grpc, timeout_s=_PATIENCE_S, credentials=self._credentials) as client:
                status = client.server_status()
        except (UnauthenticatedError, PermissionDeniedError) as error:
            return (
                None,
                f"does not tell how it is, and is left out: {error.message}; give --token with the right admin",
            )
        except NotReadyError:
            return None, "starts, and is left out until it serves"
        except SparseKVError as error:
            logger.debug("%s: %s", engine.name, error)
            return None, "does not answer, and is left out"
        memory_bytes = status.context_limit_bytes + status.context_device_limit_bytes
        load = status.waiting + status.prompting + status.decoding
        return replace(engine, memory_bytes=memory_bytes, load=load), f"{_SERVES} {status.model}"


def serve_front(config: FrontConfig) -> None:
    """Serves until it is told to end, and then lets running calls end."""
    engines = parse_engines(config.engine, config.max_sessions, config.one_store)
    if not engines:
        raise InvalidArgumentError("no engine is given; name each with --engine HOST:PORT/HTTP-PORT")
    certificates = Certificates.given(config.tls_cert, config.tls_key)
    token = None if config.token is None else config.token.read_text().strip()
    http = f"{config.listen.rpartition(':')[0]}:{config.http_port}"
    with stop_signals(config.grace) as stopping:
        asking = Engines(engines, Credentials(token=token))
        door = FrontDoor(config.listen, http, replicas=asking.ask(), certificates=certificates)
        keeping = threading.Thread(target=asking.keep, args=(door,), name="engines", daemon=True)
        keeping.start()
        logger.info("front door at %s and %s", door.address, door.url)
        stopping.wait()
        asking.leave()
        keeping.join()
        door.stop(stopping.left_s)
