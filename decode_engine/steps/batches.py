"""How sessions that step at the same time are divided into batches, and a step of each, from launch to tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import compress

from decode_engine.engine.sampler import Sampler
from decode_engine.engine.stepping import sample, take
from decode_engine.layers.session import Session
from decode_engine.steps.batch_kinds import BatchKind
from decode_engine.steps.step_graph import Replay, StepGraph, Stepped

logger = logging.getLogger(__name__)

NOT_REACHED = -1
"""What follows a draft that was wrong."""

MAX_ROWS = 64
FIXED_ROWS = 16
"""Rows of every graph that a session with a repeatable sampler steps in: products round otherwise with other numbers
of rows, but alike in all rows of one number."""


@dataclass(frozen=True, slots=True)
class Part:
    """Sessions that step in one graph of so many rows.

    numbers: of theirs among the caller's. part, lane: see `Stepper.graph`.
    """

    kind: BatchKind
    numbers: Sequence[int]
    sessions: Sequence[Session]
    rows: int
    max_keys: int
    part: int
    lane: int


def divide(
    sessions: Sequence[Session],
    repeatable: Sequence[bool],
    kinds: Sequence[BatchKind],
    lanes_of: Callable[[BatchKind], int],
) -> list[list[Part]]:
    """Batches of up to MAX_ROWS sessions of a kind, each by lane: parts as equal as can be.

    A graph for repeatable sessions is always of FIXED_ROWS rows and as long as these need for themselves; its other
    rows are for those that need as much. lanes_of: how many lanes a batch of that kind is split into.
    """
    fixed = {(kind.key, kind.max_keys) for kind in compress(kinds, repeatable)}
    groups: dict[Hashable, list[int]] = {}
    for number, kind in enumerate(kinds):
        alike = (kind.key, kind.max_keys)
        groups.setdefault(alike if alike in fixed else kind.key, []).append(number)
    batches = []
    for shared, numbers in groups.items():
        kind = kinds[numbers[0]]
        lanes = lanes_of(kind)
        most = min(MAX_ROWS, FIXED_ROWS * lanes) if shared in fixed else MAX_ROWS
        for first in range(0, len(numbers), most):
            batch = numbers[first : first + most]
            share = -(-len(batch) // lanes)
            own = [batch[begin : begin + share] for begin in range(0, len(batch), share)]
            batches.append(
                [
                    Part(
                        kind,
                        some,
                        [sessions[i] for i in some],
                        FIXED_ROWS if shared in fixed else batch_size(len(some)),
                        max(kinds[i].max_keys for i in some),
                        first // most,
                        lane,
                    )
                    for lane, some in enumerate(own)
                ]
            )
    return batches


def batch_size(count: int) -> int:
    """Rows of a batch for so many sessions."""
    return 1 << (count - 1).bit_length()


def count_touched(session: Session, kind: BatchKind, stepped: Stepped, *, follows: bool = False) -> None:
    """Notes what the step touched in all layers. follows: with another token of the session, by the same rows."""
    manifest, available, figures = session.context.manifest, session.position + 1, session.figures
    model, searching = manifest.model, kind.searching
    heads, dense = model.kv_heads, len(model.full_layers) - searching
    figures.count_dense(heads * available * dense)
    if model.window is not None:
        seen = min(available, model.window.size)
        figures.count_dense(model.window.kv_heads * seen * len(model.window.layers))
    if kind.row_bytes and not follows:
        rows = stepped.host_rows + dense * heads * manifest.token_count
        figures.host_bytes_read += rows * kind.row_bytes
        figures.rows_reused += stepped.rows_reused
        figures.device_wait_for_host_ns += stepped.waited_ns
    if searching:
        exact = available - stepped.searched
        figures.count_exact(heads * searching * exact, heads * searching * available)
        figures.count_kept(stepped.kept)
        figures.searches += searching if stepped.searched else 0


@dataclass(slots=True)
class PartStep:
    """A step of a part.

    samplers: of its sessions. fed: where there are drafts the tokens of all who step together, of a session one behind
    the other. rows: by place among the part's, without those that found no room. replay: where it was launched and not
    collected.
    """

    of: Part
    samplers: Sequence[Sampler]
    fed: Sequence[int] = ()
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
            self.graph.choose(replay, 1 if tokens is None else 0, self._rows_of(self._by_host))
        self.replay = replay

    def choose(self, left: Collection[int]) -> None:
        """Starts the choice where it is open. The tokens of the step before were taken, but for who has left."""
        if self.graph is None or self.replay is None or self.replay.result_BX is not None:
            return
        replay, self.replay = self.replay, None
        gone = self._rows_of(lambda place: self.of.numbers[place] in left or self._by_host(place))
        self.graph.choose(replay, left=gone)
        self.replay = replay

    def _rows_of(self, wanted: Callable[[int], bool]) -> Sequence[int]:
        return [row for place, row in self.rows.items() if wanted(place)]

    def _by_host(self, place: int) -> bool:
        """Whether the host chooses: what is done to logits depends on the drafts before."""
        return bool(self.fed) and self.samplers[place].edited

    def _follows(self, place: int) -> bool:
        """Whether it is fed behind another token of its session."""
        return bool(self.fed and place) and self.of.sessions[place] is self.of.sessions[place - 1]

    def following(self) -> PartStep | None:
        """The next step of the same sessions, to be launched behind this one; None where one of them found no room."""
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
            session, number, sampler = self.of.sessions[place], self.of.numbers[place], self.samplers[place]
            if number in left:
                continue
            if self._follows(place) and (results[number - 1] != self.fed[number] or sampler.ended):
                results[number] = NOT_REACHED
                continue
            if self._by_host(place):
                result = sample(sampler, self.graph.logits_BV[self.rows[place]].float())
            else:
                result = stepped.failed or take(sampler, stepped.token, stepped.logprob)
            results[number] = result
            if not isinstance(result, Exception):
                count_touched(session, self.of.kind, stepped, follows=self._follows(place))
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
