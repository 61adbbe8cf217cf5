"""Every rpc of the protos has a handler, and the client says which may be repeated."""

from __future__ import annotations

from decode_engine.rpc import service
from decode_engine.rpc.client import _SERVICE_CONFIG
from sparsekv.v1 import context_pb2, generation_pb2

CHANGING = {"DeleteContext", "Generate"}
"""Calls that change something, or whose answer is a stream: nobody repeats them unasked."""

SERVICES = [
    descriptor
    for module in (context_pb2, generation_pb2)
    for descriptor in module.DESCRIPTOR.services_by_name.values()
]


def test_every_rpc_has_a_handler() -> None:
    missing = [
        method.full_name
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in vars(getattr(service, descriptor.name))
    ]
    assert missing == [], f"no handler in {service.__file__}"


def test_every_rpc_is_repeated_or_known_to_change_something() -> None:
    config = _SERVICE_CONFIG["methodConfig"][0]["name"]
    repeated = {(entry["service"], entry["method"]) for entry in config}
    expected = {
        (descriptor.full_name, method.name)
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in CHANGING
    }
    assert repeated == expected
