"""Errors in OpenAI's shape, with the HTTP status that belongs to each reason."""

from __future__ import annotations

import math
from collections.abc import Mapping

from decode_engine.errors import PromptTooLongError
from decode_engine.gateway.wire.reply_structs import ErrorDetails, ErrorReply
from decode_engine.gateway.wire.sent_events import JsonReply
from decode_engine.rpc.door.refusals import UnauthenticatedError
from decode_engine.rpc.transport.status import CODES, reason_of, retry_after
from index_store.errors import ContextNotFoundError, SparseKVError

_STATUSES = {
    "INVALID_ARGUMENT": 400,
    "FAILED_PRECONDITION": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "DATA_LOSS": 500,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
_REPEATABLE = frozenset({"SHUTTING_DOWN"})
"""Reasons that waiting may mend, although nobody says how long. OpenAI's clients repeat others, too, unless told."""
_PARTICULAR = {"STORE_FULL": 507, "STORE_BOUND_REACHED": 507}
"""Reasons that HTTP has a better word for than for their code."""


class HttpError(Exception):
    """A request that HTTP itself refuses. headers: of the response."""

    def __init__(
        self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers or {}


def status_of_reason(reason: str) -> int:
    """The HTTP status of a reason; 500 for one that is unknown."""
    code = CODES.get(reason)
    return _PARTICULAR.get(reason) or (500 if code is None else _STATUSES[code.name])


def failure(error: SparseKVError | HttpError) -> tuple[int, ErrorReply]:
    """The HTTP status of an error, and its body."""
    if isinstance(error, HttpError):
        return error.status, _body(error.status, error.message, None, error.code)
    status = status_of_reason(reason_of(error))
    code = reason_of(error).lower()
    if isinstance(error, PromptTooLongError):
        code = "context_length_exceeded"
    elif isinstance(error, UnauthenticatedError):
        code = "invalid_api_key"
    message, param = error.message, error.metadata.get("field")
    if isinstance(error, ContextNotFoundError):
        param = "context"
    return status, _body(status, message, param, code)


def refusal(error: SparseKVError | HttpError) -> JsonReply:
    """The response that tells of an error."""
    status, body = failure(error)
    headers = {"x-should-retry": "false"}
    if isinstance(error, SparseKVError):
        delay = retry_after(error)
        if delay is not None:
            headers["retry-after"] = str(math.ceil(delay))
            headers["retry-after-ms"] = str(math.ceil(delay * 1000))
        if delay is not None or error.reason in _REPEATABLE:
            headers["x-should-retry"] = "true"
    else:
        headers |= error.headers
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return JsonReply(body, status_code=status, headers=headers)


def _body(status: int, message: str, param: str | None, code: str) -> ErrorReply:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorReply(ErrorDetails(message, kind, param, code))
