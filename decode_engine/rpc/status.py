"""Errors on the wire: gRPC status codes with google.rpc.ErrorInfo (AIP-193), and the interceptor that sends them.

| reasons | status code |
|---|---|
| INVALID_ARGUMENT, PROMPT_TOO_LONG, METHOD_UNSUPPORTED, CONTEXT_AMBIGUOUS | INVALID_ARGUMENT |
| CONTEXT_NOT_FOUND | NOT_FOUND |
| CONTEXT_EXPIRED, MODEL_MISMATCH, DTYPE_MISMATCH, FORMAT_VERSION_UNSUPPORTED, MODEL_UNSUPPORTED | FAILED_PRECONDITION |
| CONTEXT_CORRUPT (`cause` in the metadata says how) | DATA_LOSS |
| MEMORY_BUDGET_EXCEEDED, SESSION_MEMORY_EXCEEDED, TOO_MANY_REQUESTS, STORE_FULL | RESOURCE_EXHAUSTED |
| STORE_UNUSABLE, NOT_READY, SHUTTING_DOWN | UNAVAILABLE |
| DEADLINE_EXCEEDED | DEADLINE_EXCEEDED |
| CANCELLED | CANCELLED |
| ENGINE_CRASHED, INTERNAL | INTERNAL |
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from decode_engine.errors import CancelledError, InternalError
from index_store.errors import ContextCorruptError, SparseKVError

DOMAIN = "sparsekv"

logger = logging.getLogger(__name__)

_CODES = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "PROMPT_TOO_LONG": grpc.StatusCode.INVALID_ARGUMENT,
    "METHOD_UNSUPPORTED": grpc.StatusCode.INVALID_ARGUMENT,
    "CONTEXT_AMBIGUOUS": grpc.StatusCode.INVALID_ARGUMENT,
    "CONTEXT_NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "CONTEXT_EXPIRED": grpc.StatusCode.FAILED_PRECONDITION,
    "MODEL_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "DTYPE_MISMATCH": grpc.StatusCode.FAILED_PRECONDITION,
    "FORMAT_VERSION_UNSUPPORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "MODEL_UNSUPPORTED": grpc.StatusCode.FAILED_PRECONDITION,
    "CONTEXT_CORRUPT": grpc.StatusCode.DATA_LOSS,
    "MEMORY_BUDGET_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "SESSION_MEMORY_EXCEEDED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "TOO_MANY_REQUESTS": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "STORE_FULL": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "STORE_UNUSABLE": grpc.StatusCode.UNAVAILABLE,
    "NOT_READY": grpc.StatusCode.UNAVAILABLE,
    "SHUTTING_DOWN": grpc.StatusCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "CANCELLED": grpc.StatusCode.CANCELLED,
    "ENGINE_CRASHED": grpc.StatusCode.INTERNAL,
}


def public_error(error: Exception, request_id: str) -> SparseKVError:
    """The error that a client may see: our own as it is, any other without its message, named by the request id."""
    if isinstance(error, SparseKVError) and reason_of(error) in _CODES:
        return error
    return InternalError(
        f"the server failed on this request; its log has the details under request {request_id}",
        request_id=request_id,
    )


def reason_of(error: SparseKVError) -> str:
    """The reason on the wire: all kinds of damage are CONTEXT_CORRUPT."""
    return ContextCorruptError.reason if isinstance(error, ContextCorruptError) else error.reason


def code_of(error: SparseKVError) -> grpc.StatusCode:
    """The status code of an error's reason."""
    return _CODES.get(reason_of(error), grpc.StatusCode.INTERNAL)


def to_status(error: SparseKVError) -> Status:
    """The google.rpc.Status of an error, with its reason and metadata."""
    reason = reason_of(error)
    metadata = dict(error.metadata)
    if reason != error.reason:
        metadata["cause"] = error.reason
    detail = AnyMessage()
    detail.Pack(ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))
    code, _ = code_of(error).value
    return Status(code=code, message=error.message, details=[detail])


def error_info(error: grpc.RpcError) -> ErrorInfo | None:
    """The ErrorInfo that a failed call carries, if it carries one of ours."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    for detail in status.details if status is not None else ():
        info = ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


class StatusInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Logs every call, and turns the exceptions of our services' handlers into status codes."""

    def __init__(self, prefix: str = "/sparsekv.v1.") -> None:
        self._prefix = prefix

    def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        """Wraps the handler; called by grpc for every call."""
        handler = continuation(handler_call_details)
        name: str = handler_call_details.method
        if handler is None or not name.startswith(self._prefix):
            return handler
        make = _wrap_stream if handler.response_streaming else _wrap_unary
        kind = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary
        return kind(make(name, behaviour), handler.request_deserializer, handler.response_serializer)


def _wrap_unary(name: str, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(request: Any, context: grpc.ServicerContext) -> Any:
        call = _Call(name)
        try:
            response = behaviour(request, context)
        except Exception as error:
            call.fail(context, error)
        call.log("OK")
        return response

    return wrapped


def _wrap_stream(name: str, behaviour: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    def wrapped(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        call = _Call(name)
        try:
            yield from behaviour(request, context)
        except GeneratorExit:
            call.log(CancelledError.reason)
            raise
        except Exception as error:
            call.fail(context, error)
        call.log("OK")

    return wrapped


class _Call:
    """One call, for its log line."""

    def __init__(self, name: str) -> None:
        self._name = name.rpartition("/")[2]
        self._id = secrets.token_hex(8)
        self._started = time.monotonic()

    def log(self, reason: str, message: str = "") -> None:
        spent = (time.monotonic() - self._started) * 1000
        logger.info(
            "%s %s in %.1f ms%s",
            self._name,
            reason,
            spent,
            f": {message}" if message else "",
            extra={
                "rpc": self._name,
                "reason": reason,
                "milliseconds": round(spent, 3),
                "request_id": self._id,
            },
        )

    def fail(self, context: grpc.ServicerContext, error: Exception) -> NoReturn:
        """Ends the call with the error's status. Never returns."""
        public = public_error(error, self._id)
        if public is not error:
            logger.error("request %s failed", self._id, exc_info=error, extra={"request_id": self._id})
        self.log(reason_of(public), public.message)
        context.abort_with_status(rpc_status.to_status(to_status(public)))
        raise public
