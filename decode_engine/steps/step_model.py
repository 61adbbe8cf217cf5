"""The model's part of a decode step as a function of tensors, compiled where that is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode_engine.settings.command_options import Compilation
from decode_engine.steps.layer_ahead import foretell_queries
from decode_engine.steps.operator import foresees
from decode_engine.steps.step_graph import StepModel


def step_model(model: Any, compilation: Compilation, prefetch: bool = False) -> StepModel:
    """Tokens [B, 1], positions [B, 1] and a batch's number -> logits [B, V]; compiled anew for every B.

    prefetch: batches whose contexts lie in host memory get every layer's queries foretold, so that rows are on their
    way before the layer's turn (`fetch_ahead`). Raises MethodUnsupportedError for a model whose queries cannot
    be foretold.
    """

    def run(tokens: Tensor, positions: Tensor, batch: Tensor) -> Tensor:
        return _logits(model, tokens, positions, step_batch=batch)

    usual = _compiled(run, compilation)
    if not prefetch:
        return usual
    foretell_queries(model)

    # Of its own, since compilers count how often a function is compiled anew.
    def run_ahead(tokens: Tensor, positions: Tensor, batch: Tensor) -> Tensor:
        return _logits(model, tokens, positions, step_batch=batch, foretell=True)

    ahead = _compiled(run_ahead, compilation)

    def choose(tokens: Tensor, positions: Tensor, batch: Tensor) -> Tensor:
        return (ahead if foresees(batch) else usual)(tokens, positions, batch)

    return choose


def _logits(model: Any, tokens: Tensor, positions: Tensor, **more: Any) -> Tensor:
    out = model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, **more)
    logits: Tensor = out.logits[:, -1]
    return logits


def _compiled(run: StepModel, compilation: Compilation) -> StepModel:
    if compilation is Compilation.OFF:
        return run
    several: StepModel = torch.compile(run, dynamic=False)
    if compilation is Compilation.DEFAULT:
        return several
    single: StepModel = torch.compile(run, dynamic=False, mode="max-autotune-no-cudagraphs")

    def choose(tokens: Tensor, positions: Tensor, batch: Tensor) -> Tensor:
        return (single if len(tokens) == 1 else several)(tokens, positions, batch)

    return choose
