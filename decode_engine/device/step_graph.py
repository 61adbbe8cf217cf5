"""One decode step of a batch as a CUDA graph: all layers and the choice of the next tokens, captured once.

A step takes one copy to the device (tokens, positions, counts), one replay, and one copy back (the chosen tokens and
how many keys were kept). Nothing inside waits for the host.

Shape legend: B rows, V vocabulary, C counts of a record, X columns of the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from decode_engine.device.operator import register_batch
from decode_engine.device.step_batch import STEP_COUNTS, StepBatch, step_counts
from decode_engine.kernels import records
from decode_engine.sampler import Draws, Sampler, any_filters, choose_greedy, choose_tokens
from decode_engine.session import Session

logger = logging.getLogger(__name__)

StepModel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Tokens [B, 1], positions [B, 1] and the number of a live batch -> logits [B, V]."""

_TOKEN, _POSITION, _TOP_K, _COUNTS = 0, 1, 2, 3
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
        """What these samplers need."""
        if any_filters(samplers):
            return cls.FILTERED
        return cls.GREEDY if all(sampler.greedy for sampler in samplers) else cls.DRAWN


@dataclass(frozen=True, slots=True)
class Stepped:
    """What a step yields for one session. token: -1 where the logits were not finite. kept: see `StepBatch.kept_B`."""

    token: int
    kept: int


class StepGraph:
    """A batch's decode step, replayed for whichever sessions its rows hold."""

    def __init__(self, model: StepModel, batch: StepBatch, choice: Choice) -> None:
        """Captures the step on a GPU.

        Where that fails the reason is logged, steps run without a graph, and the next two try again.
        """
        plan = batch.plan
        on_gpu = plan.device.type == "cuda"
        self.batch = batch
        self._model = model
        self._choice = choice
        self._number = register_batch(batch)
        columns = _COUNTS + STEP_COUNTS
        self._host_inputs_BX = torch.zeros(plan.size, columns, dtype=torch.int64, pin_memory=on_gpu)
        self._inputs = self._host_inputs_BX.numpy()
        self._inputs_BX = torch.zeros(plan.size, columns, dtype=torch.int64, device=plan.device)
        self._host_draws_BX = torch.zeros(plan.size, 3, pin_memory=on_gpu)
        self._draws = self._host_draws_BX.numpy()
        self._draws_BX = torch.zeros(plan.size, 3, device=plan.device)
        self._host_result_BX = torch.zeros(plan.size, 2, dtype=torch.int64, pin_memory=on_gpu)
        self._result_BX = torch.zeros(plan.size, 2, dtype=torch.int64, device=plan.device)
        self.logits_BV = torch.empty(0, device=plan.device)
        """Of the last step, until the next one."""
        self._captures_left = _CAPTURES if on_gpu else 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._try_to_capture()

    @property
    def captured(self) -> bool:
        """Whether steps replay a graph."""
        return self._graph is not None

    def step(self, rows: Sequence[int], tokens: Sequence[int], samplers: Sequence[Sampler]) -> list[Stepped]:
        """Feeds the sessions in `rows` a token each and returns what came out. Positions do not advance here."""
        self._fill(rows, tokens, samplers)
        self.batch.follow_tails()
        self.batch.send()
        self._try_to_capture()
        self._inputs_BX.copy_(self._host_inputs_BX, non_blocking=True)
        if self._choice is not Choice.GREEDY:
            self._draws_BX.copy_(self._host_draws_BX, non_blocking=True)
        self.run()
        self._host_result_BX.copy_(self._result_BX, non_blocking=True)
        if self._result_BX.is_cuda:
            torch.cuda.current_stream().synchronize()
        results = self._host_result_BX.tolist()
        return [Stepped(*results[row]) for row in rows]

    def run(self) -> None:
        """The step itself, over whatever was copied to the device last."""
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()

    def _fill(self, rows: Sequence[int], tokens: Sequence[int], samplers: Sequence[Sampler]) -> None:
        self._inputs[:] = 0
        for row, token, sampler in zip(rows, tokens, samplers, strict=True):
            session = self.batch.sessions[row]
            if session is None:
                raise RuntimeError(f"row {row} of a batch holds no session")
            self._inputs[row] = _inputs(session, token, sampler)
            given = sampler.parameters
            self._draws[row] = given.temperature, given.top_p, sampler.draw()

    @torch.inference_mode()
    def compute(self) -> None:
        """What a replay does, launched from here."""
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
        self.logits_BV = logits_BV

    def _try_to_capture(self) -> None:
        if self._graph is None and self._captures_left:
            self._captures_left -= 1
            self._graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph | None:
        """Runs the batch, all rows idle, until everything is compiled and allocated, then captures it."""
        self._inputs_BX.zero_()
        side = torch.cuda.Stream(self.batch.plan.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self.compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        try:
            # Other threads load contexts meanwhile: what they allocate must not spoil the capture. The outer context
            # brings this thread back to its stream, which a capture that fails does not.
            with torch.cuda.stream(here), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.compute()
        except RuntimeError as error:
            logger.warning(
                "steps of %d rows run without a graph (%d more tries): %s",
                self.batch.plan.size,
                self._captures_left,
                error,
            )
            return None
        return graph


def _inputs(session: Session, token: int, sampler: Sampler) -> list[int]:
    counts = step_counts(session)
    first, end = records.STEP_FIELDS
    top_k = sampler.parameters.top_k
    return [token, session.position, top_k, *(counts[field] for field in range(first, end))]
