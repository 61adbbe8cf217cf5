"""What the real server says about requests and contexts that it cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from decode_engine.rpc.client import Client
from decode_engine.rpc.transport.status import error_info
from index_store.errors import (
    ContextCorruptError,
    ContextExpiredError,
    ContextNotFoundError,
    DtypeMismatchError,
    ModelMismatchError,
)
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import Library, Stubs
from tests.support.models import write_model_folder
from tests.support.serving.service import ABSENT, fails, wait_until


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context": "lamp"}, "context"),
        ({"context": "contexts/../../etc/passwd"}, "context"),
        ({"text": ""}, "text"),
        ({"text": None}, "prompt"),
        ({"text": None, "token_ids": generation_pb2.TokenIds()}, "token_ids"),
        ({"text": None, "token_ids": generation_pb2.TokenIds(ids=[5, 99999])}, "token_ids"),
        ({"text": None, "question": ""}, "question"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"keep_ratio": 0.0}, "keep_ratio"),
        ({"keep_ratio": 1.5}, "keep_ratio"),
        ({"keep_ratio": float("nan")}, "keep_ratio"),
        ({"target_mass": 0.0}, "target_mass"),
        ({"target_mass": 1.01}, "target_mass"),
        ({"target_mass": float("nan")}, "target_mass"),
        ({"token_budget": 0}, "token_budget"),
        ({"token_budget": -5}, "token_budget"),
        ({"method": "x" * 129}, "method"),
        ({"method": "pq@period=65"}, "method"),
        ({"search_period": -1}, "search_period"),
        ({"search_period": 65}, "search_period"),
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


def test_unknown_context(client: Client, stubs: Stubs) -> None:
    for call in (client.get_context, client.delete_context, client.warm_context):
        with pytest.raises(ContextNotFoundError):
            call(ABSENT)
    code, info, _ = fails(
        lambda: stubs.generations.Generate(generation_pb2.GenerateRequest(context=ABSENT, text="x"))
    )
    assert (code, info.reason) == (grpc.StatusCode.NOT_FOUND, "CONTEXT_NOT_FOUND")
    client.delete_context(ABSENT, allow_missing=True)


@pytest.mark.parametrize("call", ["GetContext", "DeleteContext", "WarmContext"])
def test_malformed_names(stubs: Stubs, call: str) -> None:
    request = getattr(context_pb2, f"{call}Request")(name="contexts/ABC")
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stubs.contexts, call)(request)
    info = error_info(caught.value)
    assert info is not None
    assert (info.reason, info.metadata["field"]) == ("INVALID_ARGUMENT", "name")


def test_expired_context(library: Library, client: Client, stubs: Stubs) -> None:
    name = "contexts/" + library.prefill("short-lived", ttl="1s")
    wait_until(lambda: client.get_context(name).state == "EXPIRED")
    code, info, _ = fails(
        lambda: stubs.generations.Generate(generation_pb2.GenerateRequest(context=name, text="x"))
    )
    assert (code, info.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONTEXT_EXPIRED")
    with pytest.raises(ContextExpiredError):
        client.warm_context(name)


def test_flipped_byte(library: Library, client: Client, stubs: Stubs) -> None:
    id_ = library.prefill("flipped")
    chunk = library.chunk(id_)
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)
    code, info, message = fails(
        lambda: stubs.generations.Generate(
            generation_pb2.GenerateRequest(context=f"contexts/{id_}", text="x")
        )
    )
    assert (code, info.reason) == (grpc.StatusCode.DATA_LOSS, "CONTEXT_CORRUPT")
    assert info.metadata["cause"] == "CHECKSUM_MISMATCH"
    assert "kv" in message
    with pytest.raises(ContextCorruptError):
        client.warm_context(f"contexts/{id_}")


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


def test_context_of_another_model_or_dtype(library: Library, client: Client, tmp_path: Path) -> None:
    other = write_model_folder(tmp_path / "other", head_dim=32, seed=1)
    foreign = "contexts/" + library.prefill("foreign", model=other)
    half = "contexts/" + library.prefill("half", dtype="float16")
    for name, error in ((foreign, ModelMismatchError), (half, DtypeMismatchError)):
        with pytest.raises(error):
            client.generate(name, text="x").read()
        with pytest.raises(error):
            client.warm_context(name)
