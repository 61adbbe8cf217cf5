"""Drafts of sessions that step together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic

from decode_engine.engine.drafting.drafter import Plan
from decode_engine.engine.drafting.worth import Costs
from decode_engine.engine.job import Job
from decode_engine.engine.requests import Found, Runner, SessionT

_KEPT = 64  # kinds of batches whose costs are known

logger = logging.getLogger(__name__)

Batch = list[tuple[Job[SessionT], SessionT]]
"""Jobs that decode together, and their sessions."""


class Drafts(Generic[SessionT]):
    """Has drafts made before a step, and takes in what became of them."""

    def __init__(self, runner: Runner[SessionT], clock_ns: Callable[[], int]) -> None:
        self._runner = runner
        self._clock_ns = clock_ns
        self._costs: dict[object, Costs] = {}

    def make(self, batch: Batch[SessionT]) -> Sequence[Sequence[int]]:
        """Tokens that may follow the last one of each job; nothing where no job drafts."""
        if not any(job.drafter is not None for job, _ in batch):
            return ()
        costs, others = self._costs_of(batch), len(batch) - 1
        most = self._runner.draft_room([job.sampler for job, _ in batch])
        plans = [
            Plan() if job.drafter is None else job.drafter.plan(min(job.room, most), costs, others)
            for job, _ in batch
        ]
        drafts = [list(plan.tokens) for plan in plans]
        rows = [row for row, plan in enumerate(plans) if plan.by_method]
        if rows:
            some, counts = [batch[row] for row in rows], [plans[row].by_method for row in rows]
            begin = self._clock_ns()
            for row, draft in zip(rows, self._by_method(some, counts), strict=True):
                drafts[row] = draft
            costs.note_drafting((self._clock_ns() - begin) * 1e-9, sum(counts))
        return drafts if any(drafts) else ()

    def note(
        self,
        batch: Batch[SessionT],
        drafts: Sequence[Sequence[int]],
        found: Sequence[Found | None],
        seconds: float,
    ) -> None:
        """What a step found for each job, and how long it took."""
        if not any(job.drafter is not None for job, _ in batch):
            return
        self._costs_of(batch).note_step(seconds, sum(map(len, drafts)))
        for row, ((job, session), each) in enumerate(zip(batch, found, strict=True)):
            if job.drafter is None or each is None or isinstance(each, Exception):
                continue
            drafted, accepted = (
                len(drafts[row]) if drafts else 0,
                len(each) - 1 if isinstance(each, tuple) else 0,
            )
            session.figures.drafted += drafted
            job.drafter.note(drafted, accepted)

    def _by_method(self, batch: Batch[SessionT], counts: Sequence[int]) -> Sequence[list[int]]:
        """Drafts of so many tokens each; none where they fail: the step itself needs none."""
        jobs, sessions = [job for job, _ in batch], [session for _, session in batch]
        try:
            return self._runner.draft(
                sessions, [job.last_token for job in jobs], [job.sampler for job in jobs], counts
            )
        except Exception as error:
            logger.warning("drafts of %d sessions failed: %s", len(batch), error)
            return [[] for _ in batch]

    def _costs_of(self, batch: Batch[SessionT]) -> Costs:
        """Of steps of about as many sessions on these contexts."""
        key = (frozenset(job.work.context for job, _ in batch), len(batch).bit_length())
        if key not in self._costs and len(self._costs) >= _KEPT:
            self._costs.clear()
        return self._costs.setdefault(key, Costs())
