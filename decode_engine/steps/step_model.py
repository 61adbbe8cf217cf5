"""The model's part of a decode step as a function of tensors, compiled where that is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decode_engine.settings.command_options import Compilation
from decode_engine.steps.step_graph import StepModel


def step_model(model: Any, compilation: Compilation) -> StepModel:
    """Tokens [B, 1], positions [B, 1] and a batch's number -> logits [B, V]; compiled anew for every B."""

    def run(tokens: Tensor, positions: Tensor, batch: Tensor) -> Tensor:
        out = model(
            input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1, step_batch=batch
        )
        logits: Tensor = out.logits[:, -1]
        return logits

    return _compiled(run, compilation)


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
