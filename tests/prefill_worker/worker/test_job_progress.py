"""Progress of queued jobs: who comes no further than another did counts as one more that the job ended."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import JobOrder, JobProgress, JobRecord
from index_store.store.catalog import Store
from prefill_worker.worker.job_progress import JobProgressWriter

TOKENS = 10
ORDER = JobOrder("a" * 64, "model", "model", "", "title", ("full",), "bfloat16", None, TOKENS)


@pytest.fixture
def queue(tmp_path: Path) -> JobQueue:
    Store(tmp_path, create=True)
    queue = JobQueue(tmp_path)
    queue.add(JobRecord("1" * 32, ORDER, datetime.now(UTC)), np.arange(TOKENS, dtype=np.uint32))
    return queue


def killed_at(queue: JobQueue, tokens: int, layers: int = 0) -> JobRecord:
    """What a worker leaves that takes the job, comes so far, and is killed."""
    with queue.claim() as claim:
        assert claim is not None
        claim.write(replace(claim.record, attempts=claim.record.attempts + 1, progress=JobProgress()))
        reporter = JobProgressWriter(claim, claim.folder / "context", clock_s=lambda: 1e9)
        with reporter.phase("prefill", "tokens") as update:
            update(tokens, tokens)
        if layers:
            with reporter.phase("index", "layers") as update:
                update(layers, layers)
    return queue.get("1" * 32)


def test_only_who_comes_further_than_all_before_is_no_attempt(queue: JobQueue) -> None:
    assert killed_at(queue, 5).attempts == 0
    assert [killed_at(queue, tokens).attempts for tokens in (5, 4, 5)] == [1, 2, 3]
    assert killed_at(queue, 10).attempts == 0
    assert killed_at(queue, 10).attempts == 1
    assert killed_at(queue, 10, 2).attempts == 0
    last = killed_at(queue, 10, 2)
    assert (last.attempts, last.furthest, last.progress.layers_done) == (1, (10, 2), 2)
