"""Captured decode steps on a GPU equal the general path for models with sliding windows, learnt sinks and experts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.support.models import HEAD_SHAPES, LAYER_KINDS, STATEFUL, write_model_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTHS, LONG = (4000, 15, 2777), (4000, 150, 2777)
"""Of contexts, 0 for none; coarse rows are no shorter than the latter."""
PROMPTS = ([5, 9, 2], list(range(40)), [7])


def start(runner: ModelRunner, name: str, lengths: tuple[int, ...]) -> list[Session]:
    method = get_method(name, None if name == "full" else 1.0)
    sessions = []
    for row, (length, prompt) in enumerate(zip(lengths, PROMPTS, strict=True)):
        context = runner.no_context
        if length:
            context = made_up_context(
                runner.identity, runner.kv_dtype, method, length, device="cuda", seed=row
            )
        sessions.append(runner.start(context, method.on(context.manifest)))
        runner.forward(sessions[-1:], [prompt])
    return sessions


@pytest.mark.parametrize("kind", ["windows", "windows only", "sinks", "experts", "another scale"])
@pytest.mark.parametrize("name", ["full", "csattention", "csattention+dropped", "multipole"])
def test_a_captured_batch_equals_the_general_path(tmp_path: Path, kind: str, name: str) -> None:
    check_batch(tmp_path, kind, name, {"head_dim": 64})


@pytest.mark.parametrize("kind", ["windows", "windows only", "sinks", "experts"])
def test_sessions_without_a_context_step_as_on_the_general_path(tmp_path: Path, kind: str) -> None:
    """Two of them are a group that shares no keys, beside a session on a context."""
    check_batch(tmp_path, kind, "full", {"head_dim": 64}, (0, 0, 2777))


@pytest.mark.parametrize(
    ("heads", "name"),
    [*product(HEAD_SHAPES, ("full", "refined", "refined+dropped")), ("long rows", "refined-3")],
)
def test_other_heads_step_as_on_the_general_path(tmp_path: Path, heads: str, name: str) -> None:
    check_batch(tmp_path, "windows", name, HEAD_SHAPES[heads], LONG)


def check_batch(
    folder: Path, kind: str, name: str, heads: Mapping[str, int], lengths: tuple[int, ...] = LENGTHS
) -> None:
    family, settings = LAYER_KINDS.get(kind) or (kind, STATEFUL[kind])
    write_model_folder(
        folder, family, layers=3, max_positions=8192, dtype=torch.bfloat16, **heads, **settings
    )
    runner, exact = (ModelRunner(resolve_model(str(folder)), "cuda") for _ in range(2))
    exact.model.float()
    exact._compute_dtype = torch.float32  # of states
    weights = next(runner.model.parameters())
    model = step_model(runner.model)
    stepper = Stepper(model, runner.identity, weights.dtype, weights.device, forms=runner.forms)
    sessions, twins, exact_twins = (start(each, name, lengths) for each in (runner, runner, exact))
    assert all(map(stepper.takes, sessions))
    samplers = [Sampler(SamplingParameters())] * 3
    apart: list[torch.Tensor] = []
    rounding: list[torch.Tensor] = []
    for step in range(3):
        tokens = [3 + step, 4, 5]
        assert all(isinstance(token, int) for token in stepper.step(sessions, tokens, samplers))
        graph = stepper.graph(sessions)
        assert graph.captured
        general, wide = (
            torch.stack([logits[-1] for logits in each.forward(group, [[token] for token in tokens])])
            for each, group in ((runner, twins), (exact, exact_twins))
        )
        apart.append(distances(graph.logits_BV[:3].float(), general))
        rounding.append(distances(general, wide))
    for session, twin, exact_twin in zip(sessions, twins, exact_twins, strict=True):
        check_states(session, twin, exact_twin)
    # Runs in 16 bits whose rounding has nothing in common are the square root of two times that far apart. Experts may
    # be chosen otherwise here and there: then most rows must still be about equal.
    of = torch.median if kind == "experts" else torch.max
    assert float(of(torch.cat(apart))) < 2**0.5 * float(of(torch.cat(rounding)))
    assert float(torch.cat(rounding).median()) < 0.2


def check_states(session: Session, twin: Session, exact_twin: Session) -> None:
    """What captured steps left is as near to what the general path left as that is to the same in float32."""
    if session.states is None or twin.states is None or exact_twin.states is None:
        return
    parts = zip(session.states.parts, twin.states.parts, exact_twin.states.parts, strict=True)
    for own, general, wide in parts:
        rows = [each.float().flatten(1) for each in (own, general, wide)]
        apart, rounding = distances(rows[0], rows[1]), distances(rows[1], rows[2])
        assert float(apart.max()) < max(2**0.5 * float(rounding.max()), 0.01)


def distances(left_BV: torch.Tensor, right_BV: torch.Tensor) -> torch.Tensor:
    """[B]: the root mean square of each row's differences, as a share of the logits' spread."""
    return (left_BV - right_BV).pow(2).mean(1).sqrt() / right_BV.std()
