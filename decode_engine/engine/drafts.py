"""Drafts of sessions that step together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Generic

from decode_engine.engine.drafting.drafter import Plan
from decode_engine.engine.drafting.worth import MOST, Allowance, Costs
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
        self._allowance = Allowance()
        self._by_method_s: float | None = None  # what drafts by methods took for the step to come

    def make(self, batch: Batch[SessionT]) -> Sequence[Sequence[int]]:
        """Tokens that may follow the last one of each job; nothing where no job drafts."""
        if not any(job.drafter is not None for job, _ in batch):
            return ()
        costs, others = self._costs_of(batch), len(batch) - 1
        most = self._runner.draft_room([job.sampler for job, _ in batch])
        rooms = [min(job.room, most, MOST) for job, _ in batch]
        by_method = [job.drafter is not None and job.drafter.by_method for job, _ in batch]
        worth = (0, 1.0)
        if any(by_method):
            longest = max(compress(rooms, by_method))
            worth = costs.worth_by_method(longest, others, self._allowance)
        plans = [
            Plan() if job.drafter is None else job.drafter.plan(room, costs, others, worth)
            for (job, _), room in zip(batch, rooms, strict=True)
        ]
        drafts = [list(plan.tokens) for plan in plans]
        rows = [row for row, plan in enumerate(plans) if plan.by_method]
        if rows:
            some, counts = [batch[row] for row in rows], [plans[row].by_method for row in rows]
            begin = self._clock_ns()
            for row, draft in zip(rows, self._by_method(some, counts), strict=True):
                drafts[row] = draft
            self._by_method_s = (self._clock_ns() - begin) * 1e-9
            costs.note_drafting(self._by_method_s, sum(counts))
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
        costs, won = self._costs_of(batch), 0.0
        costs.note_step(seconds, sum(map(len, drafts)))
        if self._by_method_s is not None and costs.plain_s:
            tokens = sum(len(each) - 1 for each in found if isinstance(each, tuple))
            won = tokens / len(batch) - (self._by_method_s + seconds) / costs.plain_s + 1
        self._by_method_s = None
        self._allowance.note(won)
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
