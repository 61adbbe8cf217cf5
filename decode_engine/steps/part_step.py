"""One step of a part of the sessions that step together, from its launch to the tokens."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from decode_engine.engine.sampler import Sampler
from decode_engine.engine.stepping import take
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
        """Starts a replay. tokens: of all who step together; None for those that the step before chooses.

        What is chosen from stays open where that needs the tokens before (`choose`).
        """
        if self.graph is None or not self.rows:
            return
        own = None if tokens is None else [tokens[self.of.numbers[place]] for place in self.rows]
        samplers = [self.samplers[place] for place in self.rows]
        replay = self.graph.launch(list(self.rows.values()), own, samplers)
        if not any(sampler.waits for sampler in samplers):
            self.graph.choose(replay, 1 if tokens is None else 0)
        self.replay = replay

    def choose(self, left: Collection[int]) -> None:
        """Starts the choice where it is open. The tokens of the step before were taken, but for who has left."""
        if self.graph is None or self.replay is None or self.replay.result_BX is not None:
            return
        replay, self.replay = self.replay, None
        gone = [row for place, row in self.rows.items() if self.of.numbers[place] in left]
        self.graph.choose(replay, left=gone)
        self.replay = replay

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
        self.choose(left)
        if self.graph is None or self.replay is None:
            return
        found = self.graph.collect(self.replay)
        for place, stepped in zip(self.rows, found, strict=True):
            session, number = self.of.sessions[place], self.of.numbers[place]
            if number in left:
                continue
            result = stepped.failed or take(self.samplers[place], stepped.token, stepped.logprob)
            results[number] = result
            if not isinstance(result, Exception):
                count_touched(session, self.of.kind, stepped)
                session.advance()


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
        for part in self._parts:
            with part.guarded(self._results):
                part.choose(self._left)
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
