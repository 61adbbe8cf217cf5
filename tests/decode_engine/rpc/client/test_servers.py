"""A client of several servers: the rule of a cluster's front doors."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

import pytest

from decode_engine.errors import (
    DeadlineExceededError,
    EngineCrashedError,
    NotReadyError,
    ServerUnreachableError,
    ShuttingDownError,
)
from decode_engine.rpc.client import Client, Keep, Servers
from decode_engine.rpc.routing.router import Replica, Wanted, order_of
from decode_engine.rpc.server import DecodeServer
from index_store.errors import InvalidArgumentError, SparseKVError
from tests.decode_engine.conftest import Library
from tests.support.serving.service import loaded


@pytest.fixture(scope="module")
def addresses(library: Library, server: DecodeServer) -> Iterator[tuple[str, str]]:
    """Of two servers on one store."""
    with loaded(library.config()) as other:
        yield server.address, other.address


def asked(servers: Servers, context: str, session: str = "") -> str:
    """The address of the server that is asked."""
    with servers.client(context, session) as client:
        client.generate(context, text="Who?", max_tokens=1, method="full").read()
        return client._address


def fail(servers: Servers, context: str, address: str, error: SparseKVError) -> None:
    """Has a request fail at the server that is asked, which has that address."""
    with servers.client(context) as client:
        assert client._address == address
        raise error


def test_a_context_is_asked_about_where_the_rule_says(
    library: Library, addresses: tuple[str, str], client: Client
) -> None:
    names = [f"contexts/{library.prefill(f'spread {number}')}" for number in range(6)]
    first = {name: order_of(name.removeprefix("contexts/"), addresses)[0] for name in names}
    with Servers(addresses) as one, Servers(addresses[::-1]) as other:
        assert {name: asked(one, name) for name in names} == first
        assert {name: asked(other, name) for name in names} == first
    assert len(set(first.values())) == 2


def test_a_child_is_asked_about_where_its_parent_is(
    addresses: tuple[str, str], lamp: str, client: Client
) -> None:
    where = set()
    for number in range(4):
        with client.generate(
            lamp, text=f"Ship {number}", method="full", max_tokens=2, keep=Keep()
        ) as generation:
            generation.read()
        with Servers(addresses) as servers:
            where |= {asked(servers, generation.summary.kept_context), asked(servers, lamp)}
    assert len(where) == 1


def test_who_tries_again_gets_another_server(addresses: tuple[str, str], lamp: str) -> None:
    key = lamp.removeprefix("contexts/")
    nobody = (f"127.0.0.1:{port}" for port in range(1, 99))
    gone = next(each for each in nobody if order_of(key, [each, addresses[0]])[0] == each)
    with Servers([gone, addresses[0]]) as servers:
        assert asked(servers, lamp) == addresses[0]  # the family was asked for at both
        servers._router._suspected.clear()
        with pytest.raises(ServerUnreachableError):
            asked(servers, lamp)
        assert asked(servers, lamp) == addresses[0]


@pytest.mark.parametrize(
    "error",
    [ShuttingDownError, NotReadyError, EngineCrashedError, DeadlineExceededError, ServerUnreachableError],
)
def test_who_takes_no_requests_now_is_not_asked_again_at_once(
    addresses: tuple[str, str], lamp: str, error: type[SparseKVError]
) -> None:
    first, second = order_of(lamp.removeprefix("contexts/"), addresses)
    with Servers(addresses) as servers:
        with pytest.raises(error):
            fail(servers, lamp, first, error("it was told so"))
        assert asked(servers, lamp) == second


def test_a_family_is_asked_for_elsewhere_where_a_server_hangs(addresses: tuple[str, str], lamp: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which accepts and says nothing
        hangs = f"127.0.0.1:{silent.getsockname()[1]}"
        with Servers([hangs, addresses[0]], timeout_s=2.0) as servers:
            replica = Replica(hangs, hangs)
            assert servers._router.take(Wanted()) == replica  # the first one is asked for the family
            servers._router.give_back(replica, Wanted())
            assert asked(servers, lamp) == addresses[0]


@pytest.mark.parametrize("addresses", [[], "127.0.0.1:50051"])
def test_what_names_no_servers_is_refused(addresses: Sequence[str]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a list of one or more, HOST:PORT each"):
        Servers(addresses)
