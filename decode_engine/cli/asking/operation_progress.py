"""How far the making of a context has come, as long commands show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from decode_engine.rpc.client import OperationInfo
from index_store.cli.console import Reporter, Update

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
