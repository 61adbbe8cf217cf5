"""One step of a part of the sessions that step together, from its launch to the tokens."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from decode_engine.engine.sampler import Sampler
from decode_engine.engine.stepping import choose_together, take
from decode_engine.steps.batches import Part, count_touched
from decode_engine.steps.step_graph import Replay, StepGraph

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PartStep:
    """A step of a part.

    samplers: of its sessions. rows: by place among these, without those that found no room. replay: where it was
    launched and not collected.
    """

    of: Part
    samplers: Sequence[Sampler]
    rows: dict[int, int] = field(default_factory=dict)
    graph: StepGraph | None = None
    replay: Replay | None = None

    @contextmanager
    def guarded(self, results: list[int | Exception]) -> Iterator[None]:
        """What is raised becomes the result of the part's sessions alone: others may have advanced."""
        try:
            yield
        except Exception as error:
            logger.exception("a batch of %d sessions failed", len(self.of.sessions))
            for number in self.of.numbers:
                results[number] = error

    def launch(self, tokens: Sequence[int] | None) -> None:
        """Starts a replay. tokens: of all who step together; None for those that the step before chooses."""
        if self.graph is None or not self.rows:
            return
        own = None if tokens is None else [tokens[self.of.numbers[place]] for place in self.rows]
        samplers = [self.samplers[place] for place in self.rows]
        self.replay = self.graph.launch(list(self.rows.values()), own, samplers)

    def following(self) -> PartStep | None:
        """The next step of the same sessions, to be launched behind this one; None where it has to be made ready.

        That is where a session found no room, or the tail of one has to grow.
        """
        whole = self.replay is not None and len(self.rows) == len(self.of.sessions)
        if not whole or self.graph is None or not self.graph.batch.can_follow(list(self.rows.values())):
            return None
        return replace(self, replay=None)

    def wait(self) -> None:
        """Returns when the device is done with the step, or lost."""
        if self.replay is not None:
            try:
                self.replay.wait()
            except Exception as error:
                logger.info("a step that was waited for failed: %s", error)

    def collect(self, results: list[int | Exception], left: Collection[int]) -> None:
        """Waits for the replay, and advances the sessions but for those of these numbers, which have left."""
        if self.graph is None or self.replay is None:
            return
        found = self.graph.collect(self.replay)
        by_hand = self._choose_by_hand(self.graph)
        for place, stepped in zip(self.rows, found, strict=True):
            session, number = self.of.sessions[place], self.of.numbers[place]
            if number in left:
                continue
            chosen = by_hand.get(place)
            result = take(self.samplers[place], stepped.token) if chosen is None else chosen
            results[number] = result
            if not isinstance(result, Exception):
                count_touched(session, self.of.kind, stepped)
                session.advance()

    def _choose_by_hand(self, graph: StepGraph) -> dict[int, int | Exception]:
        """By place, tokens that the captured step cannot choose: from its logits, after it."""
        places = [place for place in self.rows if self.samplers[place].by_hand]
        if not places:
            return {}
        rows = torch.tensor([self.rows[place] for place in places], device=graph.batch.plan.device)
        chosen = choose_together(graph.logits_BV[rows], [self.samplers[place] for place in places])
        return dict(zip(places, chosen, strict=True))


class LaunchedStep:
    """A step of sessions in one or more parts (`requests.Step`)."""

    def __init__(self, parts: Sequence[PartStep], results: list[int | Exception], flies: bool) -> None:
        """results: of sessions that are not in any part. flies: whether the next step may be launched behind it."""
        self._parts = parts
        self._results = results
        self._flies = flies
        self._left: set[int] = set()

    def follow(self) -> LaunchedStep | None:
        """See `Step.follow`."""
        following = [part.following() for part in self._parts] if self._flies else []
        parts = [part for part in following if part is not None]
        if not parts or len(parts) < len(self._parts):
            return None
        results = list(self._results)
        for part in parts:
            with part.guarded(results):
                part.launch(None)
        return LaunchedStep(parts, results, self._flies)

    def leave(self, number: int) -> None:
        """See `Step.leave`."""
        self._left.add(number)
        for part in self._parts:
            part.wait()

    def tokens(self) -> list[int | Exception]:
        """See `Step.tokens`."""
        for part in self._parts:
            with part.guarded(self._results):
                part.collect(self._results, self._left)
        return self._results
