"""Prompts of several requests on one context that come at once, read by the engine's turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Reply
from decode_engine.engine.prompt_pieces import prompt_cost
from decode_engine.engine.requests import Step, Work
from decode_engine.engine.sampler import Sampler
from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import packed
from decode_engine.orders.events import Ends, Event, Fails
from decode_engine.orders.fields import Sampling
from decode_engine.orders.order import Order
from decode_engine.settings.command_options import Prompts
from harness.report import CheckFailedError
from index_store.memory.resident import ResidentContext
from index_store.methods.method import FittedMethod

Together = tuple[list[float], list[int]]
"""Of requests that come at once: seconds until each has its first token, and the tokens of each pass."""


@torch.inference_mode()
def read_prompts(
    model: Any, sessions: Sequence[Session], token_ids: Sequence[Sequence[int]], prompts: Prompts
) -> list[Tensor]:
    """Logits [1, V] float32 after each session's tokens, which are read in one pass."""
    device = sessions[0].device
    inputs = packed(
        sessions, token_ids, device, exact=prompts is Prompts.EXACT, shared=prompts is Prompts.SPARSE
    )
    ends_T = torch.tensor([len(ids) for ids in token_ids]).cumsum(0) - 1
    # Where each session has one token, each is a row of its own.
    kept = ends_T.to(device) if len(inputs["input_ids"]) == 1 else 1
    logits_TV = model(**inputs, logits_to_keep=kept).logits.flatten(0, 1).float()
    for session, ids in zip(sessions, token_ids, strict=True):
        session.position += len(ids)
    return list(logits_TV.split_with_sizes([1] * len(sessions)))


@dataclass(frozen=True)
class PromptRunner:
    """What the engine needs of a model to read prompts of one kind, and to decode nothing.

    passes: tokens of each pass over the model until now.
    """

    model: Any
    prompts: Prompts
    passes: list[int] = field(default_factory=list)

    def read(
        self,
        sessions: Sequence[Session],
        token_ids: Sequence[Sequence[int]],
        *,
        all_logits: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """As `Runner.read`; nobody decodes between."""
        self.passes.append(sum(map(len, token_ids)))
        return read_prompts(self.model, sessions, token_ids, self.prompts)

    def launch(
        self,
        sessions: Sequence[Session],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        drafts: Sequence[Sequence[int]] = (),
    ) -> Step:
        """Raises CheckFailedError: requests of one token are not decoded."""
        raise CheckFailedError(f"{len(sessions)} requests of one token were decoded")

    def draft(
        self,
        sessions: Sequence[Session],
        last_tokens: Sequence[int],
        samplers: Sequence[Sampler],
        counts: Sequence[int],
    ) -> list[list[int]]:
        """Raises CheckFailedError: nothing is decoded."""
        raise CheckFailedError(f"{len(sessions)} requests of one token were drafted for")

    def draft_room(self, samplers: Sequence[Sampler]) -> int:
        """None: nothing is decoded."""
        return 0


@dataclass(kw_only=True, eq=False)
class _Prompt(Work[Session]):
    """A prompt on a context that is in memory."""

    resident: ResidentContext
    fitted: FittedMethod

    def start(self) -> Session:
        return Session(self.resident, self.fitted)


def first_tokens(
    runner: PromptRunner,
    context: ResidentContext,
    fitted: FittedMethod,
    token_ids: Sequence[Sequence[int]],
    chunk: int,
    apart: bool,
) -> Together:
    """Reads them by the engine's turns. apart: each prompt is read by itself, as those with seeds are."""
    engine: Engine[Session] = Engine(runner, max_sessions=len(token_ids), prompt_chunk=chunk)
    sampling = Sampling(temperature=1.0, seed=0) if apart else Sampling()
    cost = prompt_cost(fitted, runner.prompts, context.device)
    begin, taken = time.perf_counter(), list[float]()

    def note(event: Event) -> None:
        if isinstance(event, Fails):
            raise CheckFailedError(event.message)
        if isinstance(event, Ends):
            taken.append(time.perf_counter() - begin)

    for ids in token_ids:
        order = Order(prompt=ids, sampling=sampling)
        engine.submit(
            engine.reserve(),
            _Prompt(order=order, prompt=ids, max_tokens=1, cost=cost, resident=context, fitted=fitted),
            Reply(note),
        )
    while len(taken) < len(token_ids):
        engine.step()
    return taken, runner.passes


def together_figures_of(
    read: Callable[[Sequence[Sequence[int]], bool], Together], token_ids: Sequence[Sequence[int]], turns: int
) -> dict[str, Any]:
    """Times of requests with these prompts that come at once, and of the first by itself.

    read: has some of them read, each by itself or not. turns: that are timed of the latter, and half as many of all.
    """
    all_of = [read(token_ids, False) for _ in range(max(1, turns // 2))]
    alone = min(read(token_ids[:1], False)[0][0] for _ in range(turns))
    apart, _ = read(token_ids, True)
    best, passes = min(all_of, key=lambda turn: max(turn[0]))
    return {
        "prompt_tokens": len(token_ids[0]),
        "requests": len(token_ids),
        "passes": passes,
        "alone_s": alone,
        "first_s": min(best),
        "mean_s": statistics.mean(best),
        "last_s": max(best),
        "apart_mean_s": statistics.mean(apart),
        "apart_s": max(apart),
        "times_alone": max(best) / alone,
    }
