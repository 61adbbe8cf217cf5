"""Answers through the engine, turn by turn in this thread, and what their tokens took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Reply
from decode_engine.layers.session import Session
from decode_engine.model.continuing import SessionWork
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.events import Ends, Event, Fails, Says
from decode_engine.orders.order import Order
from harness.report import CheckFailedError
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod


@dataclass(frozen=True)
class Answer:
    """What was said, in so many milliseconds a token behind the first one, with so many tokens drafted and right.

    cpu_ms: of the process's cores, for all that were asked at once.
    """

    tokens: tuple[int, ...]
    token_ms: float
    cpu_ms: float
    drafted: int
    accepted: int


@dataclass
class _Told:
    """Events of an answer, and the process's seconds at the first token and at the end."""

    events: list[Event] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def tell(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Ends) or (isinstance(event, Says) and not self.seconds):
            self.seconds.append(time.process_time())

    @property
    def over(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Ends | Fails)

    def answer(self) -> Answer:
        """Raises CheckFailedError where it has failed, or has no two tokens."""
        end = self.events[-1]
        tokens = tuple(token for each in self.events if isinstance(each, Says) for token in each.token_ids)
        if not isinstance(end, Ends) or len(tokens) < 2:
            raise CheckFailedError(f"an answer of {len(tokens)} tokens has failed: {end}")
        spent_ms = (end.times.total_ns - end.times.first_token_ns) / 1e6
        cpu_ms = (self.seconds[-1] - self.seconds[0]) * 1e3
        behind = len(tokens) - 1
        figures = end.figures
        return Answer(tokens, spent_ms / behind, cpu_ms / behind, figures["drafted"], figures["accepted"])


def ask(
    engine: Engine[Session],
    runner: ModelRunner,
    contexts: Sequence[tuple[ResidentContext, FittedMethod]],
    prompts: Sequence[Sequence[int]],
    order: Order,
) -> list[Answer]:
    """Answers to prompts that are asked at once, each on its context. Raises CheckFailedError where one fails."""
    told = [_Told() for _ in prompts]
    for (context, fitted), prompt, each in zip(contexts, prompts, told, strict=True):
        work = SessionWork(
            order=order,
            prompt=prompt,
            max_tokens=order.max_tokens or 1,
            context=context.manifest.id,
            cost=runner.prompt_cost(fitted),
            runner=runner,
            fitted=fitted,
            resident=context,
            own=None,
            again=0,
            waiting=lambda: None,
            watch=None,
            keeper=None,
            release=lambda: None,
        )
        engine.submit(engine.reserve(), work, Reply(each.tell))
    while not all(each.over for each in told):
        with torch.inference_mode():
            engine.step()
    return [each.answer() for each in told]
