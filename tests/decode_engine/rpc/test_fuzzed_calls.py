"""Changed messages through a real door: every one is answered or refused by name, and the server goes on."""

from __future__ import annotations

import logging
import random
from typing import Any

import grpc
import pytest

from decode_engine.rpc.client.verbs import METHODS, generate_request
from sparsekv.v1 import context_pb2, generation_pb2
from tests.decode_engine.conftest import Stubs
from tests.fuzz.inputs import changed, input_of

LONGEST_S = 60.0
BAD = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)


def examples(context: str) -> dict[str, bytes]:
    """A message for every method that takes one and begins nothing that goes on."""
    made = {
        "Generate": generate_request(
            context, {"text": "q", "max_tokens": 2, "method": "full", "stop": ["a"]}
        ),
        "GetContext": context_pb2.GetContextRequest(name=context),
        "ListContexts": context_pb2.ListContextsRequest(
            filter="token_count > 3", order_by="name", page_size=3
        ),
        "Tokenize": generation_pb2.TokenizeRequest(text="a text"),
        "Detokenize": generation_pb2.DetokenizeRequest(ids=[1, 2, 300]),
    }
    return {name: message.SerializeToString() for name, message in made.items() if name in METHODS}


def refusal(call: Any, given: bytes, *, streams: bool) -> str:
    """How a call was refused, where it should have been otherwise."""
    try:
        reply = call(given, timeout=LONGEST_S)
        _ = list(reply) if streams else reply
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.INTERNAL and "deserializ" in str(error.details()):
            return ""  # what is no message, gRPC says itself
        if error.code() in BAD:
            return f"{error.code()}: {error.details()}"
    return ""


@pytest.mark.parametrize("count", [15, pytest.param(2_000, marks=pytest.mark.nightly)])
def test_changed_messages_are_answered_or_refused(
    stubs: Stubs, lamp: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    sent = examples(lamp)
    assert len(sent) == 5
    for name, data in sent.items():
        method = METHODS[name]
        path = f"/{method.containing_service.full_name}/{name}"
        streams = method.server_streaming
        call = (stubs.channel.unary_stream if streams else stubs.channel.unary_unary)(path, bytes, bytes)

        def make(draws: random.Random, data: bytes = data) -> bytes:
            return changed(data, [*sent.values()], draws)

        for number in range(count):
            given = input_of(name, number, make)
            wrong = refusal(call, given, streams=streams)
            assert not wrong, (name, number, given, wrong)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR and each.exc_info]
