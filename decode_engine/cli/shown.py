"""Operations as JSON, as people read them, and how far they have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any

from decode_engine.rpc.client import OperationInfo
from index_store.cli.console import Reporter, Update, format_time, print_table
from index_store.cli.report import (
    context_object,
    error_object,
)
from index_store.errors import format_bytes


def operation_object(operation: OperationInfo) -> dict[str, Any]:
    """An operation as JSON."""
    plain = replace(operation, context=None, error=None)
    times = {"create_time": operation.create_time and operation.create_time.isoformat()}
    context = None if operation.context is None else context_object(operation.context)
    error = None if operation.error is None else error_object(operation.error)
    return {**asdict(plain), **times, "context": context, "error": error}


def print_operations(operations: Sequence[OperationInfo]) -> None:
    """A table of them."""
    rows = [
        [
            operation.name,
            _ending(operation),
            f"{operation.tokens_done}/{operation.tokens_total}",
            operation.context_name.removeprefix("contexts/")[:12] or "-",
            format_time(operation.create_time),
        ]
        for operation in operations
    ]
    print_table(
        ("OPERATION", "STATE", "TOKENS", "CONTEXT", "CREATED"), rows, right=("TOKENS",), optional=("CREATED",)
    )


def operation_rows(operation: OperationInfo) -> list[tuple[str, str]]:
    """All that the server says of an operation."""
    left = operation.remaining_s
    return [
        ("name", operation.name),
        ("state", _ending(operation)),
        ("context", operation.context_name.removeprefix("contexts/") or "-"),
        ("tokens", f"{operation.tokens_done} of {operation.tokens_total}"),
        ("layers", f"{operation.layers_done} of {operation.layers_total or '-'}"),
        ("written", format_bytes(operation.bytes_written)),
        *([] if left is None else [("seconds left", f"{left:.0f}")]),
        ("created", format_time(operation.create_time)),
        *([("owner", operation.owner)] if operation.owner else []),
        *([("waits", operation.waiting_reason)] if operation.waiting_reason else []),
        *(("note", note) for note in operation.notes),
        *([] if operation.error is None else [("error", operation.error.message)]),
    ]


def _ending(operation: OperationInfo) -> str:
    if not operation.done:
        ahead = f", {operation.jobs_ahead} before it" if operation.phase == "queued" else ""
        return f"{operation.phase}{ahead}"
    if operation.error is None:
        return "done"
    return "cancelled" if operation.error.reason == "CANCELLED" else "failed"


_BARS = {"reading": ("prefill", "tokens"), "indexing": ("index", "layers")}
"""Phases with something to count, as `prefill-worker run` calls them."""


@contextmanager
def operation_progress(reporter: Reporter) -> Iterator[Callable[[OperationInfo], None]]:
    """Yields what to call with the states of an operation, one after the other."""
    phase, ahead, told, reason = "", -1, 0, ""
    update: Update = _ignore
    with ExitStack() as bar:

        def show(operation: OperationInfo) -> None:
            nonlocal phase, ahead, told, reason, update
            for note in operation.notes[told:]:
                reporter.note(note)
            told = len(operation.notes)
            if operation.phase != phase:
                bar.close()
                phase, update = operation.phase, _ignore
                if phase in _BARS:
                    update = bar.enter_context(reporter.phase(*_BARS[phase]))
            if phase == "queued" and operation.jobs_ahead != ahead:
                ahead = operation.jobs_ahead
                reporter.note(f"{operation.name} waits for a worker, {ahead} before it")
            if operation.waiting_reason != reason:
                reason = operation.waiting_reason
                if reason:
                    reporter.note(reason)
            if phase == "reading":
                update(operation.tokens_done, operation.tokens_total)
            elif phase == "indexing":
                update(operation.layers_done, operation.layers_total)

        yield show


def _ignore(done: int, total: int) -> None:
    """Nothing is counted."""
