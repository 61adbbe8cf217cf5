"""What the real server says about requests and contexts that it cannot serve."""

from __future__ import annotations

from google.longrunning import operations_pb2

from decode_engine.rpc.client.connection import REPEATED
from decode_engine.rpc.context_service import ContextService, OperationsService
from decode_engine.rpc.generation_service import GenerationService
from sparsekv.v1 import context_pb2, generation_pb2

CHANGING = {"DeleteContext", "UploadDocument", "DeleteOperation"}
"""Calls that change something: nobody repeats them unasked."""

HANDLERS = {
    "ContextService": ContextService,
    "GenerationService": GenerationService,
    "Operations": OperationsService,
}
"""The class that answers the calls of each service."""

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
        if method.name not in vars(HANDLERS[descriptor.name])
    ]
    assert missing == []


def test_every_rpc_is_repeated_or_known_to_change_something() -> None:
    expected = {
        method.name
        for descriptor in SERVICES
        for method in descriptor.methods
        if method.name not in CHANGING and not method.server_streaming
    }
    assert expected == REPEATED
