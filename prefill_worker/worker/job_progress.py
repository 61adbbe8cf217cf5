"""A job's progress as it goes into its record, where servers see it, and the place where a job is stopped."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from index_store.cli.console import Update
from index_store.cli.traces import Span
from index_store.jobs.job_queue import Claim
from index_store.jobs.job_record import JobPhase, JobProgress

_WRITTEN_EVERY_S = 0.5

_PHASES = {"prefill": JobPhase.READING, "index": JobPhase.INDEXING, "sync": JobPhase.VERIFYING}
"""By the titles of a job's phases."""

logger = logging.getLogger(__name__)


class JobCancelled(Exception):  # noqa: N818  no error: somebody wanted it
    """The job is not wanted any more."""


class JobProgressWriter:
    """The reporter of a queued job. Called between passes and between layers, it ends a job that was cancelled."""

    def __init__(
        self,
        claim: Claim,
        writing: Path,
        span: Span | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """writing: the folder that the context is written to. span: whose parts the phases are."""
        self._span = span
        self._claim = claim
        self._writing = writing
        self._clock_s = clock_s
        self._written_s = 0.0

    def note(self, text: str) -> None:
        """Into the record and the log."""
        logger.info("job %s: %s", self._claim.record.id, text)
        self._claim.write(self._claim.record.noted(text))

    @contextmanager
    def phase(self, title: str, unit: str) -> Iterator[Update]:
        """A phase of the job; its updates raise JobCancelled once the job is to be cancelled."""
        phase = _PHASES[title]
        began = self._clock_s()
        first: int | None = None
        self._write(replace(self._progress, phase=phase, remaining=None))

        def update(done: int, total: int) -> None:
            nonlocal first, began
            now = self._clock_s()
            self._stop_if_unwanted()
            remaining = None
            if first is None:  # what another worker had done took no time
                first, began = done, now
            elif done > first:
                remaining = (now - began) / (done - first) * (total - done)
            progress = replace(self._progress, phase=phase, remaining=remaining)
            if phase is JobPhase.READING:
                progress = replace(progress, tokens_done=done)
            elif phase is JobPhase.INDEXING:
                progress = replace(progress, layers_done=done, layers_total=total)
            if now - self._written_s >= _WRITTEN_EVERY_S or done == total:
                self._write(progress)

        begun_ns = time.monotonic_ns()
        yield update
        if self._span is not None:
            self._span.child(phase.value, begun_ns, time.monotonic_ns())
        self._stop_if_unwanted()

    @property
    def _progress(self) -> JobProgress:
        return self._claim.record.progress

    def _write(self, progress: JobProgress) -> None:
        """Whoever comes further than any worker before has not been ended by the job itself."""
        self._written_s = self._clock_s()
        record, reached = self._claim.record, (progress.tokens_done, progress.layers_done)
        if reached > record.furthest:
            record = replace(record, furthest=reached, attempts=0)
        progress = replace(progress, bytes_written=_bytes_in(self._writing))
        self._claim.write(replace(record, progress=progress))

    def _stop_if_unwanted(self) -> None:
        if self._claim.unwanted():
            raise JobCancelled


def _bytes_in(folder: Path) -> int:
    """Of all files below the folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # published or given up meanwhile
                continue
    return total
