"""How tests reach a server: by its own doors, or with `--front-door` by a cluster's before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from decode_engine.gateway.serving import Gateway, HttpPort
from decode_engine.processes.cluster.front import FrontDoor
from decode_engine.rpc.routing.router import Replica
from decode_engine.rpc.server import DecodeServer

GONE = Replica("gone", "127.0.0.1:1", "http://127.0.0.1:1", store="here")
"""A replica that nobody answers for: every call may have to begin anew at another one."""


@contextmanager
def grpc_of(server: DecodeServer, config: pytest.Config) -> Iterator[str]:
    """The address of its gRPC."""
    if not config.getoption("--front-door"):
        yield server.address
        return
    with both_of(server, config) as (address, _):
        yield address


@contextmanager
def both_of(server: DecodeServer, config: pytest.Config) -> Iterator[tuple[str, HttpPort]]:
    """The address of its gRPC, and its HTTP."""
    with Gateway("127.0.0.1:0", server.grpc) as gateway:
        if not config.getoption("--front-door"):
            yield server.address, gateway
            return
        served = Replica("served", server.address, gateway.url, store="here", attended=True)
        with FrontDoor("127.0.0.1:0", "127.0.0.1:0", replicas=[GONE, served]) as front:
            yield front.address, front.http
