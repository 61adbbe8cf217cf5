"""Health, crashes, stopping and reflection of the real server."""

from __future__ import annotations

import resource

import grpc
import pytest
from google.longrunning import operations_pb2
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from decode_engine.errors import NotReadyError
from decode_engine.rpc.client import Client
from decode_engine.rpc.server import SERVICES, DecodeServer
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
