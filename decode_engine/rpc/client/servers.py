"""Several servers for a client of its own: requests go to them by the rule, without a front door in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Self

from decode_engine.errors import (
    DeadlineExceededError,
    EngineCrashedError,
    NotReadyError,
    ServerUnreachableError,
    ShuttingDownError,
)
from decode_engine.rpc.client.clients import Client
from decode_engine.rpc.door.options import Credentials
from decode_engine.rpc.routing.router import Replica, Router, Wanted
from index_store.errors import InvalidArgumentError

_MOST_KNOWN = 100_000
_MOVED_ON = (
    *(ServerUnreachableError, NotReadyError, ShuttingDownError, EngineCrashedError),
    DeadlineExceededError,  # all that is heard of a machine that hangs
)
"""Of a server that does not take requests now; another one may."""


class Servers:
    """Servers that have the same contexts, by their addresses: all who name the same ones ask the same one about a
    context. Usable from several threads.

        with Servers(["10.0.0.1:50051", "10.0.0.2:50051"]) as servers:
            with servers.client("contexts/...") as client:
                ...

    Raises InvalidArgumentError without addresses, and what `Client` raises.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout_s: float | None = None,
        credentials: Credentials = Credentials(),  # noqa: B008  frozen
    ) -> None:
        """As `Client`."""
        if not addresses or isinstance(addresses, str):
            given = repr(addresses) if addresses else "no address"
            raise InvalidArgumentError(f"{given} is given, expected a list of one or more, HOST:PORT each")
        self._router, self._lock = Router(), threading.Lock()
        self._router.update(Replica(address, address) for address in addresses)
        self._roots: dict[str, str] = {}
        with ExitStack() as stack:
            self._clients = {
                address: stack.enter_context(Client(address, timeout_s=timeout_s, credentials=credentials))
                for address in addresses
            }
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    @contextmanager
    def client(self, context: str = "", session: str = "") -> Iterator[Client]:
        """The server to ask about a context, for one request, which ends with the block.

        session: whose requests stay together. One that cannot be reached in the block, or ends, is not asked for a
        while, so who tries again gets another one.
        """
        with self._taken(Wanted(self._root(context) if context else "", session)) as client:
            yield client

    @contextmanager
    def _taken(self, wanted: Wanted) -> Iterator[Client]:
        with self._lock:
            replica = self._router.take(wanted)
        if replica is None:
            raise NotReadyError("no server is there to be asked")
        try:
            yield self._clients[replica.name]
        except _MOVED_ON:
            with self._lock:
                self._router.suspect(replica.name)
            raise
        finally:
            with self._lock:
                self._router.give_back(replica, wanted)

    def _root(self, context: str) -> str:
        """The id of the context that begins its family, which never changes; asked of any server that answers."""
        if (known := self._roots.get(context)) is not None:
            return known
        seen = context
        for attempt in range(len(self._clients)):
            try:
                with self._taken(Wanted()) as client:
                    while parent := client.get_context(seen).parent:
                        seen = parent
                break
            except _MOVED_ON:
                if attempt == len(self._clients) - 1:
                    raise
        if len(self._roots) >= _MOST_KNOWN:
            self._roots.clear()
        self._roots[context] = root = seen.removeprefix("contexts/")
        return root
