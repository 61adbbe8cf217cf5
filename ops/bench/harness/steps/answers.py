"""Answers through the engine, turn by turn in this thread, and what their tokens took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """What was said, in so many milliseconds a token, with so many tokens drafted and right."""

    tokens: tuple[int, ...]
    token_ms: float
    drafted: int
    accepted: int


def ask(
    engine: Engine[Session],
    runner: ModelRunner,
    contexts: Sequence[tuple[ResidentContext, FittedMethod]],
    prompts: Sequence[Sequence[int]],
    order: Order,
) -> list[Answer]:
    """Answers to prompts that are asked at once, each on its context. Raises CheckFailedError where one fails."""
    told: list[list[Event]] = [[] for _ in prompts]
    for (context, fitted), prompt, events in zip(contexts, prompts, told, strict=True):
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
        engine.submit(engine.reserve(), work, Reply(events.append))
    while not all(events and isinstance(events[-1], Ends | Fails) for events in told):
        with torch.inference_mode():
            engine.step()
    return [_answer(events) for events in told]


def _answer(events: Sequence[Event]) -> Answer:
    end = events[-1]
    if not isinstance(end, Ends):
        raise CheckFailedError(f"an answer has failed: {end}")
    tokens = tuple(token for event in events if isinstance(event, Says) for token in event.token_ids)
    spent_ns = end.times.total_ns - end.times.first_token_ns
    return Answer(tokens, spent_ns / 1e6 / (len(tokens) - 1), end.figures["drafted"], end.figures["accepted"])
