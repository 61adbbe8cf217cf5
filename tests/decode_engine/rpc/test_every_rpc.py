"""Every rpc of the protos has a handler, and the client says which may be repeated."""

from __future__ import annotations

from google.longrunning import operations_pb2

from decode_engine.rpc import service
from decode_engine.rpc.client.connection import SERVICE_CONFIG
from sparsekv.v1 import context_pb2, generation_pb2

CHANGING = {"DeleteContext", "UploadDocument", "DeleteOperation"}
"""Calls that change something: nobody repeats them unasked."""

HANDLERS = {"Operations": "OperationsService"}
"""Of services that are not our own, the class that answers them."""

SERVICES = [
    descriptor
    for module in (context_pb2, generation_pb2, operations_pb2)
    for descriptor in module.DESCRIPTOR.services_by_name.values()
]


def test_every_rpc_has_a_handler() -> None:
    missing = [
        method.full_name
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in vars(getattr(service, HANDLERS.get(descriptor.name, descriptor.name)))
    ]
    assert missing == [], f"no handler in {service.__file__}"


def test_every_rpc_is_repeated_or_known_to_change_something() -> None:
    """Streams are not left to gRPC's retries: with a server that dies meanwhile they may never end."""
    config = SERVICE_CONFIG["methodConfig"][0]["name"]
    repeated = {(entry["service"], entry["method"]) for entry in config}
    expected = {
        (descriptor.full_name, method.name)
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in CHANGING and not method.server_streaming
    }
    assert repeated == expected
