"""One decode step of a batch as two CUDA graphs: all layers, and behind them the choice of the next tokens.

A step takes one copy to the device (tokens, positions, counts), two replays, and one copy back (the chosen tokens, what
is told of them, and how many keys were kept); choices that are not greedy take small copies of their own. Nothing
inside waits for the host. A step may be launched while the one before it is in flight: the tokens that this one chooses
are on the device already. Where the choice needs what the host makes of the token before (`Sampler.waits`), it is
launched once that is there: the device computes the layers meanwhile.

Shape legend: B rows, V vocabulary, C counts of a record, X columns of the inputs, of the table or of the results.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampler import (
    DRAW_COLUMNS,
    Draws,
    Sampler,
    any_filters,
    choose_greedy,
    choose_tokens,
)
from decode_engine.engine.sampling.edits_triton import (
    RESULT_COLUMNS,
    TABLE_COLUMNS,
    TOKEN,
    EditBuffers,
    edit_logits,
    read_logprob,
    tell_tokens,
    write_edits,
)
from decode_engine.kernels import records
from decode_engine.orders.events import TokenLogprob
from decode_engine.steps.attention.step_batch import STEP_COUNTS, StepBatch
from index_store.errors import SparseKVError
from index_store.models.state_cache import passing

logger = logging.getLogger(__name__)

StepModel = Callable[[Tensor, Tensor, StepBatch], Tensor]
"""Tokens [B, 1], positions [B, 1] and their batch -> logits [B, V]."""


def step_model(model: Any) -> StepModel:
    """The model's part of a decode step."""

    def run(tokens: Tensor, positions: Tensor, batch: StepBatch) -> Tensor:
        more = {} if batch.cache is None else {"cache": batch.cache}
        batch.calls = itertools.count()
        with passing(batch):
            out = model(
                input_ids=tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                step_batch=batch,
                **more,
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    return run


_FED, _POSITION, _COUNTS = 0, 1, 2
_STATES = _COUNTS + STEP_COUNTS  # of models with states alone
_FIRST, _END, _TAIL_KEYS, _STEP = (
    _COUNTS + field - records.STEP_FIELDS[0]
    for field in (records.FIRST, records.END, records.TAIL_KEYS, records.STEP)
)
_WARM_UPS = 2
_CAPTURES = 3  # tries: what other threads do with the device may spoil one


class Way(Enum):
    """How the rows of a step choose tokens: the cheapest way that serves all of them."""

    GREEDY = "greedy"
    DRAWN = "drawn"
    FILTERED = "filtered"


class Choice(NamedTuple):
    """The choice of a step's tokens. edited: logits of some rows are changed before, or told of."""

    way: Way = Way.GREEDY
    edited: bool = False

    @classmethod
    def of(cls, samplers: Sequence[Sampler]) -> Choice:
        """What these samplers need."""
        drawn = Way.GREEDY if all(sampler.greedy for sampler in samplers) else Way.DRAWN
        return cls(
            Way.FILTERED if any_filters(samplers) else drawn, any(sampler.edited for sampler in samplers)
        )


class Stepped(NamedTuple):
    """What a step yields for one session. token: -1 where the logits were not finite. kept: see `StepBatch.kept_B`.

    host_rows, rows_reused: see `StepBatch.fetched_B2`. waited_ns: how long the device waited for the host, with all
    sessions of the step. searched: keys of the context that the selection was made from. logprob: where it is wanted.
    failed: why no token could be chosen.
    """

    token: int
    kept: int
    host_rows: int
    rows_reused: int
    waited_ns: int
    searched: int
    logprob: TokenLogprob | None
    failed: Exception | None


@dataclass(slots=True)
class Replay:
    """A step that was launched, with or without its choice.

    searched: keys of each context that are searched. wait: until the device has done all that was launched. result_BX:
    of the choice, there after `wait`. failed: rows for which nothing can be chosen.
    """

    rows: Sequence[int]
    samplers: Sequence[Sampler]
    searched: Sequence[int]
    wait: Callable[[], None]
    result_BX: Tensor | None = None
    failed: dict[int, Exception] = field(default_factory=dict)


class Captures:
    """What graphs share of which only one runs at a time: memory, and streams to warm up and capture on.

    Matrix products keep scratch memory for the stream that they were captured on.
    """

    def __init__(self, device: torch.device, alone: Lock) -> None:
        """alone: held while a graph is captured."""
        self.alone = alone
        self.pool = torch.cuda.graph_pool_handle()
        # torch hands out 32 streams of each priority in turn: one of the usual priority would sooner or later be that
        # of a thread that loads a context, whose waits spoil a capture.
        self.stream, self._beside, self.capturing = (
            torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that captures have taken, used or not."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == self.pool)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A stream for what runs beside the current stream, behind all that this was given before now."""
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield


class StepGraph:
    """A batch's decode step, replayed for whichever sessions its rows hold; a graph for every way to choose tokens."""

    def __init__(
        self, model: StepModel, batch: StepBatch, captures: Captures | None, nbytes: int = 0
    ) -> None:
        """captures: None runs every step without a graph, as on a CPU. nbytes: of the batch."""
        self._model = model
        self.batch = batch
        self.captures = captures
        plan, self.nbytes = batch.plan, nbytes
        """Bytes of device memory that the batch and its graphs hold."""
        columns = _STATES + (0 if plan.model.states is None else 2)
        self._inputs = np.zeros((plan.size, columns), dtype=np.int64)
        self._inputs_BX = torch.zeros(plan.size, columns, dtype=torch.int64, device=plan.device)
        self._draws = np.zeros((plan.size, DRAW_COLUMNS), dtype=np.float32)
        self._draws_BX = torch.zeros(plan.size, DRAW_COLUMNS, device=plan.device)
        self._edits = EditBuffers.allocate(plan.size, plan.model.vocab_size, plan.device)
        self._table = np.zeros((plan.size, TABLE_COLUMNS), dtype=np.int64)
        self._masks = np.zeros(tuple(self._edits.mask_BW.shape), dtype=np.int32)
        self._result_BX = torch.zeros(plan.size, RESULT_COLUMNS, dtype=torch.int64, device=plan.device)
        self._logits_BV: Tensor | None = None
        # The layers are None among ways to choose.
        self._graphs: dict[Choice | None, torch.cuda.CUDAGraph] = {}
        self._captures_left: dict[Choice | None, int] = {}
        self.choice = Choice()
        """Of the last step."""
        # Rows of the last step, and the counts in their inputs.
        self._seating: tuple[int, tuple[int, ...]] = (-1, ())
        self._counts: dict[int, NDArray[np.int64]] = {}

    @property
    def captured(self) -> bool:
        """Whether steps of the last way to choose replay graphs."""
        return None in self._graphs and self.choice in self._graphs

    @property
    def logits_BV(self) -> Tensor:
        """Of the last step. Raises RuntimeError before the first one."""
        if self._logits_BV is None:
            raise RuntimeError("there are no logits before the first step")
        return self._logits_BV

    def prepare(self, choice: Choice) -> None:
        """Captures the step with that way to choose tokens, and takes it from now on.

        Where that fails the reason is logged, steps run without a graph, and the next two calls try again. Raises
        torch.OutOfMemoryError where there is no memory for it.
        """
        self.choice = choice
        if self.captures is None:
            return
        for part, work in ((None, self.compute), (choice, partial(self.choose_eagerly, choice))):
            left = self._captures_left.setdefault(part, _CAPTURES)
            if part not in self._graphs and left:
                self._captures_left[part] = left - 1
                self._capture(part, work, self.captures)

    def step(self, rows: Sequence[int], tokens: Sequence[int], samplers: Sequence[Sampler]) -> list[Stepped]:
        """Feeds the sessions in `rows` a token each and returns what came out. Positions do not advance here."""
        replay = self.launch(rows, tokens, samplers)
        self.choose(replay)
        return self.collect(replay)

    def launch(
        self, rows: Sequence[int], tokens: Sequence[int] | None, samplers: Sequence[Sampler]
    ) -> Replay:
        """Starts the layers of a step on the current stream; `choose` and `collect` must follow unless one raises.

        tokens: None for those that the last step chooses, which was of the same rows and may be in flight; its
        sessions have not advanced then. Where that one finds no token the row is fed some other one.
        """
        ahead, queue = 1 if tokens is None else 0, self.batch.plan.queue
        number = self.batch.begin(rows, any(sampler.repeatable for sampler in samplers), ahead)
        with self._ending_what_fails():
            self._fill(rows, tokens or [0] * len(rows), number, ahead)
            self.batch.follow_tails()
            self.batch.send()
            queue.send(torch.from_numpy(self._inputs), self._inputs_BX)
            if tokens is None:
                queue.do(self._feed_chosen)
            queue.do(self.run_layers)
            searched = (self._inputs[rows, _END] - self._inputs[rows, _FIRST]).tolist()
            return Replay(rows, samplers, searched, queue.mark(self.batch.plan.device))

    def choose(self, replay: Replay, ahead: int = 0, left: Collection[int] = ()) -> None:
        """Starts the choice of a step's tokens behind its layers.

        ahead: tokens before those that the samplers have not taken. left: rows whose choice is not wanted: their
        sessions have left meanwhile, or the host chooses. Waits for grammars.
        """
        choice, queue = Choice.of(replay.samplers), self.batch.plan.queue
        with self._ending_what_fails():
            masked = self._fill_table(replay, ahead, left) if choice != Choice() else []
            if choice != self.choice:
                self.prepare(choice)
            if choice != Choice():
                queue.send(torch.from_numpy(self._table), self._edits.table_BX)
                queue.send(torch.from_numpy(self._draws), self._draws_BX)
                if masked:
                    some = slice(masked[0], masked[-1] + 1)
                    queue.send(torch.from_numpy(self._masks[some]), self._edits.mask_BW[some])
            queue.do(partial(self.run_choice, choice))
            replay.result_BX = queue.fetch(self._result_BX)
            replay.wait = queue.mark(self.batch.plan.device)

    def collect(self, replay: Replay) -> list[Stepped]:
        """Waits for a step that `choose` started, and returns what came out."""
        with self._ending_what_fails():
            replay.wait()
            if replay.result_BX is None:
                raise RuntimeError("a step without a choice was collected")
        waited_ns = self.batch.end()
        result_BX, vocabulary = replay.result_BX.numpy(), self.logits_BV.shape[1]
        stepped = []
        for row, sampler, searched in zip(replay.rows, replay.samplers, replay.searched, strict=True):
            token, kept, host_rows, rows_reused = result_BX[row, :4].tolist()
            told, failed = sampler.parameters.top_logprobs, replay.failed.get(row)
            wanted = told is not None and token >= 0 and failed is None
            logprob = read_logprob(result_BX[row], min(told or 0, vocabulary)) if wanted else None
            stepped.append(Stepped(token, kept, host_rows, rows_reused, waited_ns, searched, logprob, failed))
        return stepped

    @contextmanager
    def _ending_what_fails(self) -> Iterator[None]:
        """Ends the step whose error is on its way."""
        try:
            yield
        except Exception:
            try:
                self.batch.end()
            except SparseKVError as error:
                logger.info("a step that failed has ended: %s", error)
            raise

    def _feed_chosen(self) -> None:
        """Makes the tokens that the last step has chosen those of the next; on the device. -1 is no token."""
        self._inputs_BX[:, _FED].copy_(self._result_BX[:, TOKEN].clamp(min=0))

    def run(self) -> None:
        """The whole step, over whatever was copied to the device last."""
        self.run_layers()
        self.run_choice(self.choice)

    def run_layers(self) -> None:
        """The layers, from tokens to logits."""
        self._run(None, self.compute)

    def run_choice(self, choice: Choice) -> None:
        """The choice, from logits to results."""
        self._run(choice, partial(self.choose_eagerly, choice))

    def _run(self, part: Choice | None, work: Callable[[], None]) -> None:
        graph = self._graphs.get(part)
        (work if graph is None else graph.replay)()

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
                inputs[row, _COUNTS:_STATES] = self._counts[row] = counts
            before = ahead + self.batch.numbers[row]
            inputs[row, _FED] = token
            inputs[row, _POSITION] = session.position + before
            inputs[row, _TAIL_KEYS] = session.tail_keys + before + 1
            inputs[row, _STEP] = number
            if session.states is not None:
                inputs[row, _STATES:] = session.states.addresses(before)

    def _fill_table(self, replay: Replay, ahead: int, left: Collection[int]) -> list[int]:
        """What rows are drawn by, and how their logits are changed; returns rows that have masks, in their order."""
        device, vocabulary = self.batch.plan.device, self.batch.plan.model.vocab_size
        self._table[:] = 0
        masked = []
        for row, sampler in zip(replay.rows, replay.samplers, strict=True):
            if row in left:
                continue
            before = ahead + self.batch.numbers[row]
            self._draws[row] = Draws.numbers(sampler, before)
            try:
                edits = sampler.edits(device, vocabulary, before)
            except Exception as error:
                replay.failed[row] = error
                continue
            if edits is not None:
                write_edits(edits, self._table[row])
                if edits.allowed_W is not None:
                    self._masks[row] = edits.allowed_W[: self._masks.shape[1]]
                    masked.append(row)
        return sorted(masked)

    @torch.inference_mode()
    def compute(self) -> None:
        """What the layers do, launched from here."""
        self.batch.refresh(self._inputs_BX[:, _COUNTS:_STATES])
        tokens, positions = self._inputs_BX[:, _FED, None], self._inputs_BX[:, _POSITION, None]
        with self.batch.states(self._inputs_BX[:, _STATES:]):
            logits_BV = self._model(tokens, positions, self.batch)
        if self._logits_BV is None:
            # Not in the memory that graphs share: another one may run before the choice.
            self._logits_BV = torch.empty_like(logits_BV, memory_format=torch.contiguous_format)
            self.nbytes += self._logits_BV.nbytes
        self._logits_BV.copy_(logits_BV)
        self._result_BX[:, 1] = self.batch.kept_B()
        fetched_B2 = self.batch.fetched_B2()
        if fetched_B2 is not None:
            self._result_BX[:, 2:4] = fetched_B2

    @torch.inference_mode()
    def choose_eagerly(self, choice: Choice) -> None:
        """What the choice does, launched from here."""
        way, edited = choice
        logits_BV = self.logits_BV
        edited_BV = edit_logits(logits_BV, self._edits) if edited else logits_BV
        if way is Way.GREEDY:
            self._result_BX[:, TOKEN] = choose_greedy(edited_BV)
        else:
            draws = Draws.table(self._draws_BX)
            self._result_BX[:, TOKEN] = choose_tokens(edited_BV, draws, filtered=way is Way.FILTERED)
        if edited:
            tell_tokens(logits_BV, self._edits, self._result_BX)

    def _capture(self, part: Choice | None, work: Callable[[], None], captures: Captures) -> None:
        """Runs a part of the step, all rows idle, until everything is compiled and allocated, then captures it."""
        self._inputs_BX.zero_()
        self._edits.table_BX.zero_()
        here, side = torch.cuda.current_stream(), captures.stream
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                work()
        here.wait_stream(side)
        side.synchronize()
        graph, before = torch.cuda.CUDAGraph(), captures.nbytes
        try:
            # Other threads load contexts meanwhile: what they allocate must not spoil the capture. `torch.cuda.graph`
            # would wait for all that the device does, and give back memory that running steps then wait for.
            with captures.alone, torch.cuda.stream(captures.capturing):
                graph.capture_begin(pool=captures.pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except torch.OutOfMemoryError:
            self._captures_left[part] += 1  # whoever can make room tries again
            raise
        except RuntimeError as error:
            logger.warning(
                "steps of %d rows run without a graph (%d more tries): %s",
                self.batch.plan.size,
                self._captures_left[part],
                error,
            )
        else:
            self._graphs[part] = graph
            self.nbytes += captures.nbytes - before
