"""What a client's connection is made of: certificates, tokens; and a failed call as one of our errors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, cast

import grpc
from grpc_health.v1 import health_pb2

from decode_engine.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    ServerUnreachableError,
    error_by_reason,
)
from decode_engine.rpc.door.options import Credentials
from decode_engine.rpc.transport.starting import PHASE_KEY
from decode_engine.rpc.transport.status import error_info, retry_info
from index_store.errors import InvalidArgumentError, SparseKVError

HEALTH_TIMEOUT_S = 5.0

REPEATED = frozenset(
    (
        *("CreateContext", "GetContext", "ListContexts", "WarmContext", "UpdateContext"),
        *("ListMethods", "GetServerStatus", "Tokenize", "Detokenize", "CountTokens"),
        *("ListOperations", "GetOperation", "WaitOperation", "CancelOperation"),
    )
)
"""Methods with one reply that may be called twice, and are where no server took them. Of streams all are.

CreateContext always has a request_id.
"""

CHANNEL_OPTIONS: list[tuple[str, int]] = [("grpc.max_receive_message_length", -1)]

Metadata = tuple[tuple[str, str], ...]


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials | None:
    """What encrypts, None where nothing does. Raises InvalidArgumentError for a file that cannot be read."""
    if credentials.ca_file is None:
        return None
    paths = (credentials.authorities, credentials.client_key, credentials.client_cert)
    try:
        roots, key, chain = (None if path is None else path.read_bytes() for path in paths)
    except OSError as error:
        raise InvalidArgumentError(f"a certificate cannot be read: {error}") from error
    return grpc.ssl_channel_credentials(roots, key, chain)


def caller_metadata(credentials: Credentials) -> Metadata:
    """What every call shows."""
    return () if credentials.token is None else (("authorization", f"Bearer {credentials.token}"),)


def translate(error: grpc.RpcError, address: str) -> SparseKVError:
    """The error of a failed call: the server's own by its reason, else one by the status code."""
    info = error_info(error)
    call = cast(grpc.Call, error)
    code, details = call.code(), call.details() or ""
    if info is not None:
        return error_by_reason(info.reason, details, info.metadata, retry_info(error))
    if code == grpc.StatusCode.UNAVAILABLE:
        return ServerUnreachableError(
            f"no server answers at {address}; start one with `decode-engine serve`, or name another with "
            f"its address ({details})",
            address=address,
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceededError("the deadline passed before the server had finished")
    if code == grpc.StatusCode.CANCELLED:
        return CancelledError("the call was cancelled")
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:  # by gRPC itself, which knows no reasons
        return InvalidArgumentError(f"the server refused the request for its size: {details}")
    return InternalError(f"the call failed with {code.name}: {details}", code=code.name)


@dataclass(frozen=True, slots=True)
class ServerHealth:
    """Whether a server takes calls. phase: what it does while it starts; "" where it does not, or nobody answers."""

    serving: bool
    phase: str = ""

    @classmethod
    def of(cls, status: int, trailing: Iterable[tuple[str, str | bytes]] | None) -> Self:
        """From the reply of a health check and what stands behind it."""
        phase = dict(trailing or ()).get(PHASE_KEY, "")
        return cls(status == health_pb2.HealthCheckResponse.SERVING, str(phase))
