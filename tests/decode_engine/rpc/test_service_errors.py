"""What the real server says about requests and contexts that it cannot serve."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2

from decode_engine.rpc.client import Client
from decode_engine.rpc.client.connection import REPEATED
from decode_engine.rpc.context_service import ContextService, OperationsService
from decode_engine.rpc.generation_service import GenerationService
from index_store.errors import ContextCorruptError, ContextNotFoundError
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import Library, Stubs
from tests.support.serving.service import fails


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text": None, "token_ids": generation_pb2.TokenIds()}, "token_ids"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"keep_ratio": 1.5}, "keep_ratio"),
        ({"token_budget": 0}, "token_budget"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
        ({"constraint": {"choices": {"texts": ["a", "a"]}}}, "constraint"),
    ],
)
def test_bad_arguments(stubs: Stubs, lamp: str, change: dict[str, Any], field: str) -> None:
    fields = {"context": lamp, "text": "Who?", **change}
    request = generation_pb2.GenerateRequest(**fields)
    code, info, message = fails(lambda: stubs.generations.Generate(request))
    assert (code, info.reason, info.domain) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "INVALID_ARGUMENT",
        "sparsekv",
    )
    assert info.metadata["field"] == field
    assert "expected" in message


def test_unreadable_manifest(library: Library, client: Client) -> None:
    id_ = library.prefill("unreadable")
    (library.store / "contexts" / id_ / "manifest.json").write_text("{")
    context = client.get_context(f"contexts/{id_}")
    assert context.state == "CORRUPT"
    assert context.state_message
    assert context.name in [listed.name for listed in client.list_contexts()]
    with pytest.raises(ContextCorruptError):
        client.generate(context.name, text="x").read()
    client.delete_context(context.name)
    with pytest.raises(ContextNotFoundError):
        client.get_context(context.name)


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
