"""Errors of serving, beside those a stored context can raise (index_store/errors.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from index_store.errors import SparseKVError


class PromptTooLongError(SparseKVError, reason="PROMPT_TOO_LONG"):
    """Context, prompt and completion together exceed the model's positions."""


class TooManyRequestsError(SparseKVError, reason="TOO_MANY_REQUESTS"):
    """All sessions are taken and the queue of waiting requests is full, or as full as one context may make it."""


class SessionMemoryError(SparseKVError, reason="SESSION_MEMORY_EXCEEDED"):
    """A request needs more memory for prompt and answer than the server has for all sessions together."""


class NotReadyError(SparseKVError, reason="NOT_READY"):
    """The server is still loading its model."""


class ShuttingDownError(SparseKVError, reason="SHUTTING_DOWN"):
    """The server accepts no more requests, or its grace for running ones is over."""


class DeadlineExceededError(SparseKVError, reason="DEADLINE_EXCEEDED"):
    """The request's deadline passed before its generation ended."""


class UnfinishedCallError(SparseKVError, reason="CALL_UNFINISHED"):
    """The client opened a call and did not send its message in time."""


class UnreadAnswerError(SparseKVError, reason="ANSWER_UNREAD"):
    """The client did not read the answer in time."""


class CancelledError(SparseKVError, reason="CANCELLED"):
    """The client ended the call."""


class EngineCrashedError(SparseKVError, reason="ENGINE_CRASHED"):
    """The scheduler failed; the server has to be restarted."""


class InternalError(SparseKVError, reason="INTERNAL"):
    """A fault of the server; its log has the details under the request id."""


class ServerUnreachableError(SparseKVError, reason="UNREACHABLE"):
    """No server answered at the address."""


class AddressError(SparseKVError, reason="ADDRESS_UNUSABLE"):
    """The server cannot listen at the address."""

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
