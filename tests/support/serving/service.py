"""What the tests of the service share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from decode_engine.rpc.client import Client, Summary
from decode_engine.rpc.server import DecodeServer
from decode_engine.rpc.transport.status import error_info
from decode_engine.settings.config import ServeConfig
from tests.support.waiting import wait_until

__all__ = ["ABSENT", "LONG", "answered", "fails", "leases", "loaded", "wait_until"]

ABSENT = "contexts/" + "0" * 64


LONG = 3000  # tokens: seconds of work


@contextmanager
def loaded(config: ServeConfig, **options: Any) -> Iterator[DecodeServer]:
    """A server that takes requests."""
    with DecodeServer(config, **options) as server:
        server.load()
        yield server


def answered(client: Client, context: str = "", **options: Any) -> tuple[list[int], Summary]:
    """The tokens of an answer, and its summary."""
    with client.generate(context, **options) as generation:
        tokens = [token for piece in generation for token in piece.token_ids]
    return tokens, generation.summary


def leases(server: DecodeServer) -> int:
    return server.backend.arena.stats().leases


def fails(call: Any) -> tuple[grpc.StatusCode, ErrorInfo, str]:
    """Code, ErrorInfo and message of a call that fails; the message is a sentence, not a stack trace."""
    with pytest.raises(grpc.RpcError) as caught:
        list(call())
    error: Any = caught.value
    info = error_info(error)
    assert info is not None
    assert "Traceback" not in error.details()
    assert ".py" not in error.details()
    return error.code(), info, error.details()
