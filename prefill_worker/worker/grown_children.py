"""Children that have outgrown what they continue: found in a store, and ordered to be made whole."""

from __future__ import annotations

import logging
import secrets
from datetime import timedelta

from index_store.errors import QueueFullError
from index_store.family.parents import outgrown
from index_store.jobs.job_queue import JobQueue
from index_store.jobs.job_record import MOST_PRIORITY, JobOrder, JobRecord, JobState
from index_store.store.catalog import Store

SETTLED = timedelta(minutes=1)
"""A child is left alone for so long: a conversation that is kept turn after turn is replaced by its next turn."""

logger = logging.getLogger(__name__)


def order_grown(store: Store, queue: JobQueue, model: str, share: float) -> None:
    """Queues a job, behind all others, for every child of the model that adds such a share to what it continues.

    One whose job has failed or was cancelled is left alone as long as the queue remembers that. model: its fingerprint.
    Raises what store and queue raise.
    """
    latest = queue.now() - SETTLED
    grown = [
        child
        for child in store.list()
        if child.model.fingerprint == model
        and outgrown(child, share)
        and child.created_at <= latest
        and not store.expired(child)
    ]
    if not grown:
        return
    tried = {
        job.order.context
        for job in queue.entries()
        if isinstance(job, JobRecord) and job.order.whole and job.state is not JobState.DONE
    }
    for child in grown:
        if child.id in tried or child.parent is None:
            continue
        order = JobOrder(
            context=child.id,
            model=model,
            model_name=child.model.name,
            name="",
            title=child.name,
            methods=child.methods,
            dtype=child.dtype,
            ttl=None,
            tokens=child.token_count,
            parent=child.parent.id,
            owner=child.owner,
            whole=True,
        )
        record = JobRecord(secrets.token_hex(16), order, queue.now(), priority=-MOST_PRIORITY)
        try:
            queue.add(record)
        except QueueFullError:
            return  # there is more to do than this
        logger.info("context %s has outgrown what it continues, and is to be made whole", child.id[:12])
