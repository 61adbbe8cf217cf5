"""Errors of serving, beside those a stored context can raise (index_store/errors.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from index_store.errors import SparseKVError


class PromptTooLongError(SparseKVError):
    """Context, prompt and completion together exceed the model's positions."""

    reason = "PROMPT_TOO_LONG"


class TooManyRequestsError(SparseKVError):
    """All sessions are taken and the queue of waiting requests is full, or as full as one context may make it."""

    reason = "TOO_MANY_REQUESTS"


class SessionMemoryError(SparseKVError):
    """A request needs more memory for prompt and answer than the server has for all sessions together."""

    reason = "SESSION_MEMORY_EXCEEDED"


class NotReadyError(SparseKVError):
    """The server is still loading its model."""

    reason = "NOT_READY"


class ShuttingDownError(SparseKVError):
    """The server accepts no more requests, or its grace for running ones is over."""

    reason = "SHUTTING_DOWN"


class DeadlineExceededError(SparseKVError):
    """The request's deadline passed before its generation ended."""

    reason = "DEADLINE_EXCEEDED"


class UnfinishedCallError(SparseKVError):
    """The client opened a call and did not send its message in time."""

    reason = "CALL_UNFINISHED"


class UnreadAnswerError(SparseKVError):
    """The client did not read the answer in time."""

    reason = "ANSWER_UNREAD"


class CancelledError(SparseKVError):
    """The client ended the call."""

    reason = "CANCELLED"


class EngineCrashedError(SparseKVError):
    """The scheduler failed; the server has to be restarted."""

    reason = "ENGINE_CRASHED"


class InternalError(SparseKVError):
    """A fault of the server; its log has the details under the request id."""

    reason = "INTERNAL"


class ServerUnreachableError(SparseKVError):
    """No server answered at the address."""

    reason = "UNREACHABLE"


class AddressError(SparseKVError):
    """The server cannot listen at the address."""

    reason = "ADDRESS_UNUSABLE"

    @classmethod
    def of(cls, address: str, flag: str = "--listen") -> Self:
        """The error for a port that is taken, or a host that is another machine. flag: what chooses another one."""
        return cls(
            f"cannot listen at {address}: the port is taken or the address is not this machine's; choose another one "
            f"with {flag} (port 0 picks a free one)",
            address=address,
        )


def error_by_reason(
    reason: str, message: str, metadata: Mapping[str, str], retry_after_s: float | None = None
) -> SparseKVError:
    """The error of a reason that came over a wire, as its class; InternalError where no class here has the reason."""
    error = _classes_by_reason().get(reason, InternalError)(message)
    error.metadata = dict(metadata)
    error.retry_after_s = retry_after_s
    return error


def _classes_by_reason() -> dict[str, type[SparseKVError]]:
    classes: dict[str, type[SparseKVError]] = {}
    pending = [SparseKVError]
    while pending:
        for subclass in pending.pop().__subclasses__():
            classes.setdefault(subclass.reason, subclass)
            pending.append(subclass)
    return classes
