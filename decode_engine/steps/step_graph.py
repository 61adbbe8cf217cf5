"""One decode step of a batch as CUDA graphs: all layers and the choice of the next tokens, captured once.

A step takes one copy to the device (tokens, positions, counts), one replay, and one copy back (the chosen tokens and
how many keys were kept). Nothing inside waits for the host. A step may be launched while the one before it is in
flight: the tokens that this one chooses are on the device already.

Shape legend: B rows, V vocabulary, C counts of a record, X columns of the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampler import Draws, Sampler, any_filters, choose_greedy, choose_tokens
from decode_engine.kernels import records
from decode_engine.steps.attention.step_batch import STEP_COUNTS, StepBatch
from decode_engine.steps.operator import register_batch
from index_store.errors import SparseKVError

logger = logging.getLogger(__name__)

StepModel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [B, 1], positions [B, 1] and the number of a live batch -> logits [B, V]."""

_TOKEN, _POSITION, _TOP_K, _COUNTS = 0, 1, 2, 3
_FIRST, _END, _TAIL_KEYS, _STEP = (
    _COUNTS + field - records.STEP_FIELDS[0]
    for field in (records.FIRST, records.END, records.TAIL_KEYS, records.STEP)
)
_TEMPERATURE, _TOP_P, _UNIFORM = 0, 1, 2
_WARM_UPS = 2
_CAPTURES = 3  # tries: what other threads do with the device may spoil one


class Choice(Enum):
    """How the rows of a step choose tokens: the cheapest way that serves all of them."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    FILTERED = "filtered"

    @classmethod
    def of(cls, samplers: Sequence[Sampler]) -> Choice:
        """What these samplers need. Those that choose by hand do so after the step, from its logits."""
        samplers = [sampler for sampler in samplers if not sampler.by_hand]
        if any_filters(samplers):
            return cls.FILTERED
        return cls.GREEDY if all(sampler.greedy for sampler in samplers) else cls.DRAWN


class Stepped(NamedTuple):
    """What a step yields for one session. token: -1 where the logits were not finite. kept: see `StepBatch.kept_B`.

    host_rows, rows_reused: see `StepBatch.fetched_B2`. waited_ns: how long the device waited for the host, with all
    sessions of the step. searched: keys of the context that the selection was made from.
    """

    token: int
    kept: int
    host_rows: int
    rows_reused: int
    waited_ns: int
    searched: int


@dataclass(frozen=True, slots=True)
class Replay:
    """A step that was launched. searched: keys of each context that are searched. result_BX: there after `wait`."""

    rows: Sequence[int]
    searched: Sequence[int]
    result_BX: Tensor
    wait: Callable[[], None]


class Captures:
    """What the graphs of a lane share, of which only one runs at a time: memory, and streams to warm up and capture on.

    Matrix products keep scratch memory for the stream that they were captured on, so that lanes must not share one.
    """

    def __init__(self, device: torch.device, lane: int = 0) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lane = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.capturing = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the lane's captures have taken, used or not."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == self.pool)

    @contextmanager
    def beside(self, begun: torch.cuda.Event | None = None) -> Iterator[None]:
        """A stream for steps that run beside those on the current stream.

        They follow what the current stream was given before `begun` was recorded there, or before now.
        """
        if begun is None:
            self._lane.wait_stream(torch.cuda.current_stream())
        else:
            self._lane.wait_event(begun)
        with torch.cuda.stream(self._lane):
            yield


class StepGraph:
    """A batch's decode step, replayed for whichever sessions its rows hold; a graph for every way to choose tokens."""

    def __init__(
        self, model: StepModel, batch: StepBatch, captures: Captures | None, nbytes: int = 0
    ) -> None:
        """captures: None where there is no device that captures. nbytes: what the batch holds of device memory."""
        plan = batch.plan
        self.nbytes = nbytes
        """Bytes of device memory: of the batch, and by which captures made their lane's memory grow."""
        self.batch = batch
        self._model = model
        self.captures = captures
        """What further captures go into; the one of the thread that steps."""
        self._number = register_batch(batch)
        columns = _COUNTS + STEP_COUNTS
        self._inputs = np.zeros((plan.size, columns), dtype=np.int64)
        self._inputs_BX = torch.zeros(plan.size, columns, dtype=torch.int64, device=plan.device)
        self._draws = np.zeros((plan.size, 3), dtype=np.float32)
        self._draws_BX = torch.zeros(plan.size, 3, device=plan.device)
        self._result_BX = torch.zeros(plan.size, 4, dtype=torch.int64, device=plan.device)
        self._logits_BV: dict[Choice, Tensor] = {}
        self._graphs: dict[Choice, torch.cuda.CUDAGraph] = {}
        self._captures_left = dict.fromkeys(Choice, 0 if captures is None else _CAPTURES)
        self._choice = Choice.GREEDY
        # Rows of the last step, and the counts in their inputs.
        self._seating: tuple[int, tuple[int, ...]] = (-1, ())
        self._counts: dict[int, NDArray[np.int64]] = {}

    @property
    def captured(self) -> bool:
        """Whether steps of the last way to choose replay a graph."""
        return self._choice in self._graphs

    @property
    def logits_BV(self) -> Tensor:
        """Of the last step, until the next one of any graph."""
        return self._logits_BV[self._choice]

    def prepare(self, choice: Choice) -> None:
        """Captures the step with that way to choose tokens, and takes it from now on.

        Where that fails the reason is logged, steps run without a graph, and the next two calls try again. Raises
        torch.OutOfMemoryError where there is no memory for it.
        """
        self._choice = choice
        if choice not in self._graphs and self._captures_left[choice]:
            self._captures_left[choice] -= 1
            self._capture()

    def step(self, rows: Sequence[int], tokens: Sequence[int], samplers: Sequence[Sampler]) -> list[Stepped]:
        """Feeds the sessions in `rows` a token each and returns what came out. Positions do not advance here."""
        return self.collect(self.launch(rows, tokens, samplers))

    def launch(
        self, rows: Sequence[int], tokens: Sequence[int] | None, samplers: Sequence[Sampler]
    ) -> Replay:
        """Starts a step on the current stream; `collect` must follow unless this raises.

        tokens: None for those that the last step chooses, which was of the same rows and may be in flight; its
        sessions have not advanced then. Where that one finds no token the row is fed some other one.
        """
        ahead = 1 if tokens is None else 0
        number = self.batch.begin(rows, any(sampler.repeatable for sampler in samplers), ahead)
        try:
            return self._launch(rows, tokens, samplers, number, ahead)
        except Exception:
            self._end_failed()
            raise

    def collect(self, replay: Replay) -> list[Stepped]:
        """Waits for a step that `launch` started, and returns what came out."""
        try:
            replay.wait()
        except Exception:
            self._end_failed()
            raise
        waited_ns = self.batch.end()
        results = replay.result_BX.tolist()
        stepped = []
        for row, searched in zip(replay.rows, replay.searched, strict=True):
            token, kept, host_rows, rows_reused = results[row]
            stepped.append(Stepped(token, kept, host_rows, rows_reused, waited_ns, searched))
        return stepped

    def _end_failed(self) -> None:
        """Ends a step whose error is on its way already."""
        try:
            self.batch.end()
        except SparseKVError as error:
            logger.info("a step that failed has ended: %s", error)

    def _launch(
        self,
        rows: Sequence[int],
        tokens: Sequence[int] | None,
        samplers: Sequence[Sampler],
        number: int,
        ahead: int,
    ) -> Replay:
        choice, queue = Choice.of(samplers), self.batch.plan.queue
        self._fill(rows, tokens or [0] * len(rows), number, ahead)
        if choice is not Choice.GREEDY:
            self._fill_draws(rows, samplers, ahead)
        self.batch.follow_tails()
        self.batch.send()
        if choice is not self._choice:
            self.prepare(choice)
        queue.send(torch.from_numpy(self._inputs), self._inputs_BX)
        if tokens is None:
            queue.do(self._feed_chosen)
        if self._choice is not Choice.GREEDY:
            queue.send(torch.from_numpy(self._draws), self._draws_BX)
        queue.do(self.run)
        result_BX = queue.fetch(self._result_BX)
        searched = (self._inputs[rows, _END] - self._inputs[rows, _FIRST]).tolist()
        return Replay(rows, searched, result_BX, queue.mark(self.batch.plan.device))

    def _feed_chosen(self) -> None:
        """Makes the tokens that the last step has chosen those of the next; on the device. -1 is no token."""
        self._inputs_BX[:, _TOKEN].copy_(self._result_BX[:, 0].clamp(min=0))

    def run(self) -> None:
        """The step itself, over whatever was copied to the device last."""
        graph = self._graphs.get(self._choice)
        if graph is None:
            self.compute()
        else:
            graph.replay()

    def _fill(self, rows: Sequence[int], tokens: Sequence[int], number: int, ahead: int) -> None:
        """The inputs of these rows; those of others are 0."""
        seating = (self.batch.seatings, tuple(rows))
        if seating != self._seating:
            self._inputs[:] = 0
            self._counts.clear()
            self._seating = seating
        inputs = self._inputs
        # Single numbers are written faster than arrays of a few.
        for row, token in zip(rows, tokens, strict=True):
            counts, session = self.batch.counts(row, ahead), self.batch.sessions[row]
            if session is None:
                raise RuntimeError(f"row {row} of a batch holds no session")
            if self._counts.get(row) is not counts:
                inputs[row, _COUNTS:] = self._counts[row] = counts
            inputs[row, _TOKEN] = token
            inputs[row, _POSITION] = session.position + ahead
            inputs[row, _TAIL_KEYS] = session.tail_keys + ahead + 1
            inputs[row, _STEP] = number

    def _fill_draws(self, rows: Sequence[int], samplers: Sequence[Sampler], ahead: int) -> None:
        for row, sampler in zip(rows, samplers, strict=True):
            if sampler.by_hand:
                continue
            given = sampler.parameters
            self._inputs[row, _TOP_K] = given.top_k
            self._draws[row] = given.temperature, given.top_p, sampler.draw(ahead)

    @torch.inference_mode()
    def compute(self) -> None:
        """What a replay does, launched from here."""
        with self.batch.plan.lane.in_turn():
            self._compute()

    def _compute(self) -> None:
        self.batch.refresh(self._inputs_BX[:, _COUNTS:])
        logits_BV = self._model(
            self._inputs_BX[:, _TOKEN, None], self._inputs_BX[:, _POSITION, None], self._number
        )
        if self._choice is Choice.GREEDY:
            self._result_BX[:, 0] = choose_greedy(logits_BV)
        else:
            draws = Draws(
                temperature_B=self._draws_BX[:, _TEMPERATURE],
                top_p_B=self._draws_BX[:, _TOP_P],
                top_k_B=self._inputs_BX[:, _TOP_K],
                uniform_B=self._draws_BX[:, _UNIFORM],
            )
            filtered = self._choice is Choice.FILTERED
            self._result_BX[:, 0] = choose_tokens(logits_BV, draws, filtered=filtered)
        self._result_BX[:, 1] = self.batch.kept_B()
        fetched_B2 = self.batch.fetched_B2()
        if fetched_B2 is not None:
            self._result_BX[:, 2:] = fetched_B2
        self._logits_BV[self._choice] = logits_BV

    def _capture(self) -> None:
        """Runs the batch, all rows idle, until everything is compiled and allocated, then captures it."""
        if self.captures is None:
            return
        self._inputs_BX.zero_()
        here, side = torch.cuda.current_stream(), self.captures.stream
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self.compute()
        here.wait_stream(side)
        side.synchronize()
        graph, before = torch.cuda.CUDAGraph(), self.captures.nbytes
        try:
            # Other threads load contexts meanwhile: what they allocate must not spoil the capture. `torch.cuda.graph`
            # would wait for all that the device does, and give back memory that running steps then wait for.
            with torch.cuda.stream(self.captures.capturing):
                graph.capture_begin(pool=self.captures.pool, capture_error_mode="thread_local")
                try:
                    self.compute()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            self._captures_left[self._choice] += 1  # whoever can make room tries again
            raise
        except RuntimeError as error:
            logger.warning(
                "steps of %d rows run without a graph (%d more tries): %s",
                self.batch.plan.size,
                self._captures_left[self._choice],
                error,
            )
        else:
            self._graphs[self._choice] = graph
            self.nbytes += self.captures.nbytes - before
