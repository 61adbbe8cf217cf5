"""Health, crashes, stopping and reflection of the real server."""

from __future__ import annotations

import resource
import threading

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from decode_engine.errors import NotReadyError, ShuttingDownError
from decode_engine.gateway.serving import http_door
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import SERVICES, DecodeServer
from decode_engine.rpc.transport.starting import LIVENESS, Stopping
from index_store.errors import InvalidArgumentError
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import Library, Stubs


def health_of(address: str, service: str = "") -> int:
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=60).status)


SERVING = health_pb2.HealthCheckResponse.SERVING


NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_follows_the_server(library: Library, lamp: str) -> None:
    with DecodeServer(library.config()) as server, Client(server.address) as client:
        for service in ("", *SERVICES):
            assert health_of(server.address, service) == NOT_SERVING
        assert not client.is_serving()
        with pytest.raises(NotReadyError):
            client.generate(lamp, text="x").read()
        server.load()
        for service in ("", *SERVICES):
            assert health_of(server.address, service) == SERVING
        assert client.is_serving()
    assert not client_of_nobody(server.address)


def client_of_nobody(address: str) -> bool:
    with Client(address) as client:
        return client.is_serving()


def test_a_server_that_drains_takes_nothing_new_and_says_so(library: Library, lamp: str) -> None:
    """At both doors, while what runs goes on to its end, which is the drain's; admins look on."""
    asked: list[float] = []
    config = library.config(http_port=0, grace=7.0)
    with DecodeServer(config, on_drain=asked.append) as server, Client(server.address) as client:
        server.load()
        with http_door(config, server.grpc) as gateway, Client(server.address) as late:
            http = httpx.Client(base_url=gateway.url)
            generation = client.generate(lamp, text="Who?", max_tokens=200, temperature=1.0, seed=1)
            pieces = iter(generation)
            next(pieces)
            with pytest.raises(InvalidArgumentError, match=r"limit is -1 s, expected 0 to 604800"):
                client.drain(-1.0)
            client.drain()
            client.drain(60.0)
            assert asked == [7.0, 60.0]
            assert (health_of(server.address), health_of(server.address, LIVENESS)) == (NOT_SERVING, SERVING)
            health = http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            assert (http.get("/live").status_code, http.get("/live").json()) == (200, {"status": "ok"})
            with pytest.raises(ShuttingDownError, match="draining and takes nothing new"):
                late.generate(lamp, text="Who?", max_tokens=1).read()
            refused = http.get("/v1/models")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert client.server_status().open_calls >= 2
            stopping = Stopping()
            stopping.begin(60.0)
            drained = threading.Thread(target=server.drain, args=(stopping,))
            drained.start()
            assert len(list(pieces)) >= 100
            drained.join(60)
            assert not drained.is_alive()
            http.close()


def test_of_several_limits_of_a_drain_the_first_that_is_over_counts() -> None:
    left: list[float] = []
    stopping = Stopping(left.append)
    for grace_s in (600.0, 3600.0, 5.0):
        stopping.begin(grace_s)
    assert [round(each) for each in left] == [600, 600, 5]
    assert stopping.is_set()
    assert stopping.left_s <= 5


def test_reflection_lists_the_services(stubs: Stubs) -> None:
    database = ProtoReflectionDescriptorDatabase(stubs.channel)
    services = set(database.get_services())
    assert {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= services
    # A client that knows nothing else gets every call and every field of every message.
    pool = DescriptorPool(database)
    for module in (context_pb2, generation_pb2, operations_pb2):
        for name, own in module.DESCRIPTOR.services_by_name.items():
            assert own.full_name in SERVICES
            described = pool.FindServiceByName(own.full_name)
            assert [method.name for method in described.methods] == [method.name for method in own.methods], (
                name
            )
            for method, expected in zip(described.methods, own.methods, strict=True):
                assert fields(method.input_type) == fields(expected.input_type)
                assert fields(method.output_type) == fields(expected.output_type)


def fields(message: Descriptor) -> dict[str, str]:
    """Types of all fields by their paths, those of messages inside as far as one level."""
    return {
        f"{field.name}.{inner.name}" if inner else field.name: str((inner or field).type)
        for field in message.fields
        for inner in (None, *(field.message_type.fields if field.message_type else ()))
    }


def test_the_process_has_handles_for_its_connections(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allowed: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: allowed.append(limits))
    with DecodeServer(library.config(max_connections=100)):
        assert allowed == [(1124, 4096)]
        assert "ulimit" not in caplog.text
    with DecodeServer(library.config(max_connections=5000)):
        assert allowed[1:] == [(4096, 4096)]
        assert "5000 connections need 6024" in caplog.text
