"""Errors on the wire: gRPC status codes with google.rpc.ErrorInfo (AIP-193), and google.rpc.RetryInfo where it helps.

RetryInfo comes with TOO_MANY_REQUESTS, TOO_MANY_ATTEMPTS, QUEUE_FULL, NOT_READY, CONTEXT_BUSY, CONTEXT_FETCHING,
STORE_UNUSABLE, where a disk or an object store does not answer, with QUOTA_EXCEEDED where waiting helps, and once more
as the trailer that gRPC's own retries honour. With CONTEXT_BUSY and CONTEXT_FETCHING that trailer forbids them: that
may take minutes, and the caller, not its library, has to know. The other reasons are not mended by waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from decode_engine.errors import InternalError, error_by_reason
from index_store.errors import ContextCorruptError, SparseKVError

DOMAIN = "sparsekv"

_RETRY_PUSHBACK = "grpc-retry-pushback-ms"
_NEVER = "-1"
CALLERS_OWN = frozenset({"CONTEXT_BUSY", "CONTEXT_FETCHING"})
"""Reasons that gRPC's own retries, which nobody sees, are not to wait for."""

_REASONS = {
    "INVALID_ARGUMENT": "INVALID_ARGUMENT PROMPT_TOO_LONG METHOD_UNSUPPORTED CONTEXT_AMBIGUOUS",
    "NOT_FOUND": "CONTEXT_NOT_FOUND OPERATION_NOT_FOUND UPLOAD_NOT_FOUND",
    "UNAUTHENTICATED": "UNAUTHENTICATED",
    "PERMISSION_DENIED": "PERMISSION_DENIED",
    "ALREADY_EXISTS": "NAME_TAKEN",
    "FAILED_PRECONDITION": "CONTEXT_EXPIRED CONTEXT_HAS_CHILDREN MODEL_MISMATCH DTYPE_MISMATCH "
    "FORMAT_VERSION_UNSUPPORTED MODEL_UNSUPPORTED OPERATION_UNFINISHED CONTEXT_ELSEWHERE",
    "DATA_LOSS": "CONTEXT_CORRUPT OPERATION_CORRUPT",  # of the first `cause` in the metadata says how
    "RESOURCE_EXHAUSTED": "MEMORY_BUDGET_EXCEEDED SESSION_MEMORY_EXCEEDED TOO_MANY_REQUESTS QUEUE_FULL "
    "TOO_MANY_ATTEMPTS STORE_BOUND_REACHED STORE_FULL QUOTA_EXCEEDED",
    "UNAVAILABLE": "STORE_UNUSABLE STORE_UNAVAILABLE OBJECTS_UNAVAILABLE CONTEXT_FETCHING CONTEXT_BUSY NOT_READY "
    "SHUTTING_DOWN",
    "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED CALL_UNFINISHED ANSWER_UNREAD",
    "CANCELLED": "CANCELLED",
    "INTERNAL": "ENGINE_CRASHED",
    "ABORTED": "WORKERS_LOST",
}
CODES = {reason: grpc.StatusCode[code] for code, reasons in _REASONS.items() for reason in reasons.split()}
"""Status codes by reason; those of all others are INTERNAL."""

_RETRY_S = {
    "NOT_READY": 1.0,
    "CONTEXT_BUSY": 10.0,
    "CONTEXT_FETCHING": 5.0,
    "OBJECTS_UNAVAILABLE": 1.0,
    "STORE_UNAVAILABLE": 1.0,
    "STORE_UNUSABLE": 1.0,
    "TOO_MANY_REQUESTS": 1.0,
}
"""Seconds after which to try again where the error itself does not know."""


class Paths:
    """Folders of this machine, and object stores, that clients are not told of: what lies in them is named from there
    on."""

    def __init__(self, folders: Iterable[Path] = (), urls: Iterable[str] = ()) -> None:
        names = {str(path) for folder in folders for path in (folder, folder.resolve()) if path.is_absolute()}
        names |= {url.rstrip("/") for url in urls}
        self._names = sorted(names - {"/"}, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """The text with `/srv/store/contexts/...` as `contexts/...`."""
        for name in self._names:
            text = text.replace(f"{name}/", "").replace(name, Path(name).name)
        return text


def public_error(error: Exception, request_id: str, paths: Paths | None = None) -> SparseKVError:
    """The error that a client may see: our own without paths, any other only by the request id."""
    if not isinstance(error, SparseKVError) or reason_of(error) not in CODES:
        return InternalError(
            f"the server failed on this request; its log has the details under request {request_id}",
            request_id=request_id,
        )
    told = str((error.message, error.metadata))
    if paths is None or paths.hide(told) == told:
        return error
    public = type(error)(paths.hide(error.message))
    public.metadata = {key: paths.hide(value) for key, value in error.metadata.items()}
    public.retry_after_s = error.retry_after_s
    return public


def reason_of(error: SparseKVError) -> str:
    """The reason on the wire: all kinds of damage are CONTEXT_CORRUPT."""
    return ContextCorruptError.reason if isinstance(error, ContextCorruptError) else error.reason


def code_of(error: SparseKVError) -> grpc.StatusCode:
    return CODES.get(reason_of(error), grpc.StatusCode.INTERNAL)


def retry_after(error: SparseKVError) -> float | None:
    """Seconds after which the same call may succeed; None where waiting does not help, or nobody knows."""
    return _RETRY_S.get(error.reason) if error.retry_after_s is None else error.retry_after_s


def to_status(error: SparseKVError) -> Status:
    """The google.rpc.Status of an error, with its reason, its metadata and when to try again."""
    reason = reason_of(error)
    metadata = dict(error.metadata)
    if reason != error.reason:
        metadata["cause"] = error.reason
    status = status_of(reason, error.message, metadata)
    delay_s = retry_after(error)
    if delay_s is not None:
        delay = timedelta(milliseconds=_milliseconds(delay_s))
        status.details.append(_packed(RetryInfo(retry_delay=delay)))
    return status


def status_of(reason: str, message: str, metadata: Mapping[str, str]) -> Status:
    code, _ = CODES.get(reason, grpc.StatusCode.INTERNAL).value
    info = ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    return Status(code=code, message=message, details=[_packed(info)])


def error_of(status: Status) -> SparseKVError:
    """The error that a google.rpc.Status tells of, as the class of its reason; InternalError where that is not ours."""
    info = status_info(status)
    if info is None:
        return InternalError(f"the server answered with code {status.code}: {status.message}")
    return error_by_reason(info.reason, status.message, info.metadata)


def to_trailers(error: SparseKVError) -> tuple[tuple[str, str | bytes], ...]:
    """The trailing metadata that carries the status of an error."""
    trailers: tuple[tuple[str, str | bytes], ...] = rpc_status.to_status(to_status(error)).trailing_metadata
    delay_s = retry_after(error)
    if delay_s is None:
        return trailers
    pushback = _NEVER if error.reason in CALLERS_OWN else str(_milliseconds(delay_s))
    return (*trailers, (_RETRY_PUSHBACK, pushback))


def error_info(error: grpc.RpcError) -> ErrorInfo | None:
    """The ErrorInfo that a failed call carries, if it carries one of ours."""
    return status_info(rpc_status.from_call(cast(grpc.Call, error)))


def status_info(status: Status | None) -> ErrorInfo | None:
    """The ErrorInfo in a status, if it is one of ours."""
    for detail in status.details if status is not None else ():
        info = ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info
    return None


def retry_info(error: grpc.RpcError) -> float | None:
    """Seconds after which a failed call may be repeated, if it says so."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    for detail in status.details if status is not None else ():
        info = RetryInfo()
        if detail.Unpack(info):
            return float(info.retry_delay.ToMilliseconds()) / 1000
    return None


def _packed(detail: ErrorInfo | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))
