"""Sessions for benchmarks of whole-model decode steps, and their steps by the general path, which any method can go."""

from __future__ import annotations

import math
import re
import statistics
import time
import traceback
from collections.abc import Callable, Sequence, Sized
from dataclasses import replace
from typing import Any

import torch
import typer
from torch import Tensor

from decode_engine.layers.session import Session
from decode_engine.model.decode_attention import DecodeStep
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method, get_method
from index_store.selection.budgets import Ratio

PROMPT = 4
WARM_UP = 5
LEAST_TURNS, GENERAL_SECONDS = 10, 10.0
TOLERANCE = 0.1
"""Root mean square of the difference of logits, relative to their standard deviation: rounding to bfloat16 in 32 random
layers makes about 0.05."""


class CheckFailedError(Exception):
    """A result is wrong, so its time means nothing."""


def failure(error: Exception) -> dict[str, str]:
    """What a line says of a case that has failed; where that was no check, the traceback goes to stderr."""
    if isinstance(error, CheckFailedError):
        return {"error": str(error)[:300]}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"[:300]}


def require_device() -> None:
    """Ends a benchmark that needs a GPU where there is none."""
    if not torch.cuda.is_available():
        typer.echo("error: this benchmark needs a CUDA device", err=True)
        raise typer.Exit(1)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """LENGTHxBATCH, comma-separated. Raises typer.BadParameter for anything else."""
    shapes = []
    for part in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part)
        if found is None:
            raise typer.BadParameter(f"shape is {part!r}, expected LENGTHxBATCH such as 131072x1")
        shapes.append((int(found[1]), int(found[2])))
    return shapes


def parse_method(text: str) -> Method:
    """NAME[:KEEP][/m8][/pooled]: m8 are tables of 8 subspaces with 64 centroids, pooled searches once for a group."""
    expression, *variants = text.split("/")
    name, _, keep = expression.partition(":")
    method = get_method(name, float(keep) if keep else None)
    for variant in variants:
        if variant == "m8" and method.index is not None:
            parameters = {**method.index.parameters, "subspaces": 8, "centroids": 64}
            method = replace(method, index=replace(method.index, name="m8_tables", parameters=parameters))
        elif variant == "pooled":
            method = replace(method, search={**method.search, "group": "pooled"})
        else:
            raise typer.BadParameter(f"variant is {variant!r}, expected m8 or pooled")
    return method


def forward(model: Any, sessions: Sequence[Session], tokens: Sequence[int]) -> Tensor:
    """Logits [B, V] by the general path, which advances the sessions."""
    device = sessions[0].device
    positions = torch.tensor([[session.position] for session in sessions], device=device)
    with torch.inference_mode():
        logits: Tensor = model(
            input_ids=torch.tensor(tokens, device=device)[:, None],
            position_ids=positions,
            use_cache=False,
            logits_to_keep=1,
            decode_step=DecodeStep(list(sessions)),
        ).logits[:, -1]
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


def time_general(
    model: Any, sessions: Sequence[Session], turns: int, limit_s: float, warm_up: int = WARM_UP
) -> list[float]:
    """Seconds of each step by the general path, see `time_steps`."""

    def step(tokens: Sequence[int]) -> list[int]:
        chosen: list[int] = forward(model, sessions, tokens).argmax(-1).tolist()
        return chosen

    _, tokens = time_steps(step, first_tokens(sessions), warm_up, limit_s)
    return time_steps(step, tokens, turns, limit_s)[0]


def measure_general(
    model: Any, contexts: Sequence[ResidentContext], method: Method, turns: int, warm_up: int = WARM_UP
) -> dict[str, Any]:
    """Times of steps by the general path, which any method can go."""
    difference = general_difference(model, contexts, method) if method.sparse else None
    sessions = start_sessions(contexts, method)
    seconds = time_general(model, sessions, turns, GENERAL_SECONDS, warm_up)
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


def compare(got_BV: Tensor, expected_BV: Tensor, tolerance: float = TOLERANCE) -> float:
    """Difference of logits relative to their spread. Raises CheckFailedError when it is too large."""
    difference = float((got_BV - expected_BV).square().mean().sqrt() / expected_BV.std())
    if not difference < tolerance:
        raise CheckFailedError(f"logits differ by {difference:.3f} of their spread, limit {tolerance}")
    return difference
