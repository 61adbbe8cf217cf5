"""Sessions for benchmarks of whole-model decode steps, and their steps by the general path, which any method can go."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import packed
from harness.report import compare
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.selection.budgets import Ratio

PROMPT = 4
WARM_UP = 5
LEAST_TURNS, GENERAL_SECONDS = 10, 10.0


def forward(model: Any, sessions: Sequence[Session], tokens: Sequence[int]) -> Tensor:
    """Logits [B, V] by the general path, which advances the sessions."""
    inputs = packed(sessions, [[token] for token in tokens], sessions[0].device)
    with torch.inference_mode():
        logits: Tensor = model(**inputs).logits.flatten(0, 1)
    for session in sessions:
        session.position += 1
    return logits.float()


def start_sessions(contexts: Sequence[ResidentContext], method: Method) -> list[Session]:
    """Sessions with a few tokens of their own, of random keys and values, which are the same every time."""
    sessions = []
    for row, context in enumerate(contexts):
        session = Session(context, method.on(context.manifest))
        generator = torch.Generator(session.device).manual_seed(row)
        model = context.manifest.model
        shape = (2, model.kv_heads, PROMPT, model.head_dim)
        for layer in session.layers:
            keys_HTD, values_HTD = torch.randn(shape, generator=generator, device=session.device)
            layer.tail.write(0, keys_HTD, values_HTD)
        session.position += PROMPT
        sessions.append(session)
    return sessions


def first_tokens(sessions: Sized) -> list[int]:
    """A token for each session, or context, after the few that sessions start with."""
    return list(range(PROMPT + 3, PROMPT + 3 + len(sessions)))


def full_logits(model: Any, contexts: Sequence[ResidentContext]) -> Tensor:
    """What full attention says to the first tokens, [B, V] float32."""
    return forward(model, start_sessions(contexts, get_method("full")), first_tokens(contexts))


def step_figures(seconds: Sequence[float], batch: int) -> dict[str, float]:
    """What the times of a batch's steps say."""
    step_s = statistics.median(seconds)
    return {
        "step_ms": round(step_s * 1e3, 3),
        "p99_ms": round(percentile(seconds, 0.99) * 1e3, 3),
        "steps": len(seconds),
        "tokens_per_s": round(batch / step_s, 1),
    }


def time_steps(
    step: Callable[[Sequence[int]], list[int]], tokens: list[int], turns: int, limit_s: float
) -> tuple[list[float], list[int]]:
    """Seconds of each step and the last tokens; LEAST_TURNS at least, and no more behind the time limit."""
    times: list[float] = []
    while len(times) < turns and (len(times) < LEAST_TURNS or sum(times) < limit_s):
        begin = time.perf_counter()
        tokens = step(tokens)
        times.append(time.perf_counter() - begin)
    return times, tokens


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that so many of them, a share from 0 to 1, do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def time_general(model: Any, sessions: Sequence[Session], turns: int, limit_s: float) -> list[float]:
    """Seconds of each step by the general path, see `time_steps`."""

    def step(tokens: Sequence[int]) -> list[int]:
        chosen: list[int] = forward(model, sessions, tokens).argmax(-1).tolist()
        return chosen

    _, tokens = time_steps(step, first_tokens(sessions), WARM_UP, limit_s)
    return time_steps(step, tokens, turns, limit_s)[0]


def measure_general(
    model: Any, contexts: Sequence[ResidentContext], method: Method, turns: int
) -> dict[str, Any]:
    """Times of steps by the general path, which any method can go."""
    difference = general_difference(model, contexts, method) if method.sparse else None
    sessions = start_sessions(contexts, method)
    seconds = time_general(model, sessions, turns, GENERAL_SECONDS)
    return step_figures(seconds, len(sessions)) | {
        "captured": False,
        "logits_difference": None if difference is None else round(difference, 4),
        "attended": round(sessions[0].figures.sparse_fraction if method.sparse else 1.0, 4),
    }


def general_difference(model: Any, contexts: Sequence[ResidentContext], method: Method) -> float | None:
    """`compare` of the method with a budget of all keys and full attention, both by the general path.

    None for a search that does not list all keys whatever the budget: lists of the best, trees that are pruned.
    """
    whole = start_sessions(contexts, replace(method, budget=Ratio(1.0)))
    got_BV = forward(model, whole, first_tokens(contexts))
    if whole[0].figures.sparse_fraction < 1.0:
        return None
    return compare(got_BV, full_logits(model, contexts))
