"""Spans of a queued job: how long it waited, and what a worker did with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

from index_store.cli.traces import Span, Traces, Value
from index_store.errors import SparseKVError
from index_store.jobs.job_record import JobRecord
from prefill_worker.worker.job_progress import JobCancelled


@contextmanager
def job_span(traces: Traces, record: JobRecord, now: datetime) -> Iterator[Span]:
    """The span of the work that the block does, behind one of the wait for it; both belong to the order's.

    now: by the queue's clock, as all times of the record.
    """
    order, taken_ns = record.order, time.monotonic_ns()
    told: dict[str, Value] = {
        "gen_ai.request.model": order.model_name,
        "gen_ai.usage.input_tokens": order.tokens,
        "sparsekv.context": order.context,
        "sparsekv.job": record.id,
        "sparsekv.methods": order.methods,
    }
    waited_ns = int((now - record.created_at).total_seconds() * 1e9)
    waiting = traces.begin("queue", record.traceparent, taken_ns - waited_ns)
    parent = record.traceparent or waiting.traceparent
    waiting.end({"sparsekv.job": record.id}, ended_ns=taken_ns)
    span = traces.begin(f"prefill {order.model_name}", parent, taken_ns, "consumer", told)
    error = "INTERNAL"
    try:
        yield span
        error = ""
    except JobCancelled:
        error = "CANCELLED"
        raise
    except SparseKVError as failed:
        error = failed.reason
        raise
    finally:
        span.end(error=error)
