"""Errors on the wire: every reason has a code, and nothing internal leaks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

import decode_engine.errors
import index_store.errors
from decode_engine.errors import InternalError, TooManyRequestsError
from decode_engine.rpc.transport.calls import Call
from decode_engine.rpc.transport.listener import Listener
from decode_engine.rpc.transport.status import (
    Paths,
    code_of,
    error_info,
    public_error,
    retry_after,
    retry_info,
    to_status,
)
from index_store.errors import ContextCorruptError, SparseKVError, TruncatedChunkError
from sparsekv.v1 import context_pb2, context_pb2_grpc, generation_pb2, generation_pb2_grpc

# Reasons that never leave the process they arise in: a client's or a command's own, or a server's that does not start.
LOCAL = {"UNREACHABLE", "ADDRESS_UNUSABLE", "MODEL_NOT_FETCHED"}


def error_classes() -> list[type[SparseKVError]]:
    found = []
    for module in (index_store.errors, decode_engine.errors):
        found += [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, SparseKVError)]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_every_error_has_a_code_and_its_reason(cls: type[SparseKVError]) -> None:
    error = cls("what was found, what was expected", path="a/b", count=3)
    status = to_status(error)
    info = ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "sparsekv"
    assert (info.metadata["path"], info.metadata["count"]) == ("a/b", "3")
    if issubclass(cls, ContextCorruptError):
        assert info.reason == "CONTEXT_CORRUPT"
        assert info.metadata.get("cause", "CONTEXT_CORRUPT") == cls.reason
    else:
        assert info.reason == cls.reason
    internal = code_of(error) == grpc.StatusCode.INTERNAL
    assert internal == (cls.reason in {"INTERNAL", "ENGINE_CRASHED", *LOCAL})


def test_reasons_are_distinct() -> None:
    classes = [cls for cls in error_classes() if cls is not SparseKVError]
    assert len({cls.reason for cls in classes}) == len(classes)


def test_unknown_errors_are_hidden_behind_a_request_id() -> None:
    public = public_error(ValueError("the password is swordfish"), "1234")
    assert isinstance(public, InternalError)
    assert "swordfish" not in public.message
    assert "1234" in public.message
    assert public.metadata == {"request_id": "1234"}
    known = TruncatedChunkError("short")
    assert public_error(known, "1234") is known


STORE = Path("/srv/secret place/store")


class Broken(context_pb2_grpc.ContextServiceServicer, generation_pb2_grpc.GenerationServiceServicer):
    """Fails in every way: known and unknown errors, before and within a stream."""

    async def GetContext(self, request: Any, call: Call) -> Any:
        if request.name == "known":
            raise TruncatedChunkError(f"{STORE}/kv/c/0/0: 10 bytes, expected 20", path=f"{STORE}/kv/c/0/0")
        if request.name == "busy":
            error = TooManyRequestsError("come again")
            error.retry_after_s = 2.5
            raise error
        raise ValueError("the password is swordfish")

    async def Generate(self, request: Any, call: Call) -> AsyncIterator[Any]:
        yield generation_pb2.GenerateResponse(text="so far so good")
        raise KeyError("swordfish")


@pytest.fixture
def channel() -> Iterator[grpc.Channel]:
    def register(server: Any) -> None:
        context_pb2_grpc.add_ContextServiceServicer_to_server(Broken(), server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(Broken(), server)

    listener = Listener("127.0.0.1:0", (), register, paths=Paths([STORE]))
    with grpc.insecure_channel(listener.address) as channel:
        yield channel
    listener.begin_stop(0).result(60)
    listener.close()


def test_known_error_over_the_wire(channel: grpc.Channel, caplog: pytest.LogCaptureFixture) -> None:
    stub = context_pb2_grpc.ContextServiceStub(channel)
    with caplog.at_level(logging.INFO), pytest.raises(grpc.RpcError) as caught:
        stub.GetContext(context_pb2.GetContextRequest(name="known"))
    assert f"{STORE}/kv/c/0/0" in caplog.text  # the path is for the log
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    assert caught.value.details() == "kv/c/0/0: 10 bytes, expected 20"
    info = error_info(caught.value)
    assert dict(info.metadata) == {"path": "kv/c/0/0", "cause": "CHUNK_TRUNCATED"}


def test_a_refusal_says_when_to_come_again(channel: grpc.Channel) -> None:
    stub = context_pb2_grpc.ContextServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetContext(context_pb2.GetContextRequest(name="busy"))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_info(caught.value) == 2.5
    trailers: Any = caught.value
    assert ("grpc-retry-pushback-ms", "2500") in [tuple(pair) for pair in trailers.trailing_metadata()]


def test_only_what_waiting_mends_has_a_delay() -> None:
    delays = {cls.reason for cls in error_classes() if retry_after(cls("x")) is not None}
    assert delays == {
        *("CONTEXT_BUSY", "CONTEXT_FETCHING", "NOT_READY", "OBJECTS_UNAVAILABLE"),
        *("STORE_UNAVAILABLE", "STORE_UNUSABLE", "TOO_MANY_REQUESTS"),
    }


def test_paths_are_named_from_the_folders_on(tmp_path: Path) -> None:
    paths = Paths([STORE, tmp_path])
    assert paths.hide(f"{STORE}/contexts/a: no") == "contexts/a: no"
    assert paths.hide(f"{STORE} is full, {tmp_path / 'x'} too") == "store is full, x too"
    assert paths.hide("ratio 1/2, /other") == "ratio 1/2, /other"


def test_unknown_errors_over_the_wire_are_logged_under_their_id(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    contexts = context_pb2_grpc.ContextServiceStub(channel)
    generations = generation_pb2_grpc.GenerationServiceStub(channel)
    seen: list[str] = []
    calls = (
        lambda: contexts.GetContext(context_pb2.GetContextRequest()),
        lambda: seen.extend(r.text for r in generations.Generate(generation_pb2.GenerateRequest())),
    )
    for call in calls:
        caplog.clear()
        with caplog.at_level(logging.INFO), pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        assert "swordfish" not in caught.value.details()
        assert "Traceback" not in caught.value.details()
        info = error_info(caught.value)
        request_id = info.metadata["request_id"]
        failed = [record for record in caplog.records if record.exc_info]
        assert [record.request_id for record in failed] == [request_id]
        assert "swordfish" in caplog.text
    assert seen == ["so far so good"]


def test_errors_of_other_servers_have_no_info() -> None:
    with grpc.insecure_channel("127.0.0.1:1") as nowhere, pytest.raises(grpc.RpcError) as caught:
        context_pb2_grpc.ContextServiceStub(nowhere).GetContext(context_pb2.GetContextRequest())
    assert error_info(caught.value) is None
