"""Whole-model decode steps through the engine's own graphs: checked, then timed, for benchmarks."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Flight
from decode_engine.host_search.mailbox import Mailbox, SearchThreads
from decode_engine.kernels import records
from decode_engine.layers.session import Session
from decode_engine.steps.attention.host_steps import HostTableSelection
from decode_engine.steps.attention.listed_steps import ListedSteps
from decode_engine.steps.attention.step_batch import step_counts
from decode_engine.steps.step_graph import StepGraph, StepModel
from decode_engine.steps.stepper import MAX_ROWS, Stepper
from harness.report import CheckFailedError, compare
from harness.steps import general_steps
from harness.steps.general_steps import first_tokens, percentile, start_sessions, step_figures, time_steps
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.selection.budgets import Ratio
from index_store.selection.cutting import best_keys


class SteppedSessions:
    """A session on each context, and the steps of all of them. There are no sessions before `start`."""

    def __init__(
        self,
        run: StepModel,
        model: Any,
        contexts: Sequence[ResidentContext],
        threads: SearchThreads,
    ) -> None:
        self.contexts = contexts
        identity, weights = contexts[0].manifest.model, next(model.parameters())
        self.stepper = Stepper(run, identity, weights.dtype, weights.device, searching=threads)
        self.samplers = [Sampler(SamplingParameters())] * len(contexts)
        self.sessions: list[Session] = []
        self.parts: list[list[Session]] = []

    def takes(self, method: Method) -> bool:
        """Whether the method's steps run in graphs."""
        return all(
            self.stepper.takes(Session(context, method.on(context.manifest))) for context in self.contexts
        )

    def start(self, method: Method) -> None:
        """New sessions in place of those that there are. Raises CheckFailedError for a method without kernels."""
        self.sessions = start_sessions(self.contexts, method)
        if not all(self.stepper.takes(session) for session in self.sessions):
            raise CheckFailedError("the method does not run in a graph")
        firsts = range(0, len(self.sessions), MAX_ROWS)
        self.parts = [self.sessions[first : first + MAX_ROWS] for first in firsts]

    def step(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that follow. Raises CheckFailedError where a session's step has failed."""
        results = self.stepper.step(self.sessions, tokens, self.samplers)
        for result in results:
            if isinstance(result, Exception):
                raise CheckFailedError(str(result))
        return [int(result) for result in results if isinstance(result, int)]

    @property
    def graphs(self) -> list[StepGraph]:
        """One for each part of as many rows as a batch has."""
        return [self.stepper.graph(part, i) for i, part in enumerate(self.parts)]

    def logits(self) -> Tensor:
        """Of the last step, [B, V] float32."""
        found = [graph.logits_BV[: len(part)] for graph, part in zip(self.graphs, self.parts, strict=True)]
        return torch.cat(found).float().clone()

    @property
    def mailboxes(self) -> list[Mailbox]:
        """One for each part that is searched for on the host."""
        steps = [each for graph in self.graphs for each in graph.batch.attentions]
        searches = [each.selection for each in steps if isinstance(each, ListedSteps)]
        return [search.mailbox for search in searches if isinstance(search, HostTableSelection)]

    def moved(self) -> tuple[int, int]:
        """Bytes read from host memory and rows found on the device by all sessions until now."""
        figures = [session.figures for session in self.sessions]
        return sum(each.host_bytes_read for each in figures), sum(each.rows_reused for each in figures)

    def waited_s(self) -> float:
        """In which the device stood still for the host until now."""
        return sum(part[0].figures.device_wait_for_host_ns for part in self.parts) * 1e-9


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of a batch that were timed, by seconds, and what they moved.

    first_s: of the step before all of them, which captures the graph where that was not done yet. read: bytes from host
    memory; reused: rows found on the device instead, of `row_bytes` each. waited_s: for the host.
    said: tokens of the first step and of the last one of the warm-up. tokens: that follow the last step.
    """

    seconds: list[float]
    batch: int
    first_s: float
    read: int
    reused: int
    row_bytes: int
    waited_s: float
    said: list[list[int]]
    tokens: list[int]

    def steps(self) -> dict[str, float]:
        """See `step_figures`."""
        return step_figures(self.seconds, self.batch)

    def moved(self) -> dict[str, float]:
        """Megabytes of a step from host memory, and the share of rows that were on the device."""
        rows = self.read // self.row_bytes
        return {
            "host_mb": round(self.read / len(self.seconds) * 1e-6, 3),
            "reused": round(self.reused / max(1, rows + self.reused), 4),
        }


def time_captured(stepped: SteppedSessions, method: Method, turns: int, limit_s: float = math.inf) -> Timed:
    """Times steps of new sessions, no more than fit into the time limit, after a first one and a warm-up.

    Raises CheckFailedError when lists that were searched on the host in the first step are wrong.
    """
    stepped.start(method)
    begin = time.perf_counter()
    said = [stepped.step(first_tokens(stepped.contexts))]
    first_s = time.perf_counter() - begin
    check_lists(stepped, method)
    said.append(time_steps(stepped.step, said[0], general_steps.WARM_UP, limit_s)[1])
    (read, reused), waited_s = stepped.moved(), stepped.waited_s()
    seconds, tokens = time_steps(stepped.step, said[1], turns, limit_s)
    read_then, reused_then = stepped.moved()
    context = stepped.contexts[0]
    return Timed(
        seconds,
        len(stepped.sessions),
        first_s,
        read_then - read,
        reused_then - reused,
        context.manifest.row_bytes,
        stepped.waited_s() - waited_s,
        said,
        tokens,
    )


def time_flight(
    stepped: SteppedSessions, method: Method, turns: int, said: Sequence[Sequence[int]]
) -> dict[str, float]:
    """What steps take that are launched before the tokens of those before are read; nothing where the host has a part.

    said: see `Timed`, of steps that wait for each other. Raises CheckFailedError unless most sessions say the same: not
    all of them, since logits that are almost equal may change places where kernels add up in no fixed order.
    """
    stepped.start(method)
    flight: Flight[Session] = Flight(stepped.stepper)

    def step(tokens: Sequence[int]) -> list[int]:
        results = flight.step(stepped.sessions, tokens, stepped.samplers, follow=True)
        found = [result for result in results if isinstance(result, int)]
        if len(found) < len(results):
            raise CheckFailedError(f"steps in flight failed: {results}")
        return found

    with patch.object(Stepper, "flies", True):
        try:
            first = step(first_tokens(stepped.contexts))
            if not flight.flies:
                return {}
            found = [first, time_steps(step, first, general_steps.WARM_UP, math.inf)[1]]
            alike = np.equal(found, said).all(0).mean()
            if alike < 0.5:
                raise CheckFailedError(f"sessions say {found} in flight, and otherwise {said}")
            seconds, _ = time_steps(step, found[1], turns, math.inf)
        finally:
            for session in stepped.sessions:
                flight.leave(session)
    return {
        "flight_ms": round(statistics.median(seconds) * 1e3, 3),
        "flight_p99_ms": round(percentile(seconds, 0.99) * 1e3, 3),
        "flight_alike": round(float(alike), 3),
    }


def whole_difference(stepped: SteppedSessions, method: Method, expected_BV: Tensor) -> float | None:
    """`compare` of a step with a budget of all keys and what is expected of full attention; the sessions are left.

    None for searches on the host, whose lists have no room for all keys. Raises CheckFailedError as `compare` does.
    """
    if searched_on_host(stepped.contexts, method):
        return None
    stepped.start(replace(method, budget=Ratio(1.0)) if method.sparse else method)
    stepped.step(first_tokens(stepped.contexts))
    return round(compare(stepped.logits(), expected_BV), 4)


def check_lists(stepped: SteppedSessions, method: Method) -> None:
    """Raises CheckFailedError unless lists of the last layer are the general path's for the queries that were posted.

    Nothing is compared where nothing is searched for on the host.
    """
    for mailbox, part in zip(stepped.mailboxes, stepped.parts, strict=bool(stepped.mailboxes)):
        layer = mailbox.order[-1]
        for row, session in zip(mailbox.used, part, strict=True):
            manifest = session.context.manifest
            model, counts = manifest.model, session_counts(session)
            shape = (model.kv_heads, 1, model.query_heads // model.kv_heads, model.head_dim)
            q_HTGD = mailbox.shared.q_BX[row].view(shape) * model.head_dim**-0.5
            name = "" if method.index is None else method.index.name
            ranking = session.context.index(name, layer).rank(
                q_HTGD, counts[records.FIRST], counts[records.END], None, method.search
            )
            kept = best_keys(ranking, counts[records.KEEP])
            for h in range(model.kv_heads):
                found = mailbox.answer(layer, row * model.kv_heads + h)
                wanted = kept.ids_HTK[h, 0, : int(kept.counts_HT[h, 0])]
                if found is None or not torch.equal(found, wanted):
                    raise CheckFailedError(f"the list of KV head {h} is not the general path's")


def searched_on_host(contexts: Sequence[ResidentContext], method: Method) -> bool:
    """Whether threads search for the method on such contexts."""
    return method.index is not None and contexts[0].placement.index_on_host(method.index.kind)


def session_counts(session: Session) -> Mapping[int, int]:
    """Of the step that the session has just taken."""
    session.position -= 1
    try:
        return step_counts(session)
    finally:
        session.position += 1


def tidy_up() -> None:
    """Gives back what graphs and contexts held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
