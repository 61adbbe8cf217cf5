"""What a job works with, besides what it is told: a model, and a place where it can be gone on with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from index_store.models.loading import LoadedModel, ModelFolder, load_model
from prefill_worker.jobs.checkpoint import Checkpoint
from prefill_worker.reading.capture import register_attention
from prefill_worker.reading.capture_check import check_capture

Load = Callable[[ModelFolder, torch.device], tuple[LoadedModel, Tensor | None]]
"""A model ready to be read with, and the [d/2] inverse frequencies of its rotary embedding, where it has that form."""


def load_for_reading(folder: ModelFolder, device: torch.device) -> tuple[LoadedModel, Tensor | None]:
    """Loads a model and compares it with itself. Raises ModelUnsupportedError."""
    loaded = load_model(folder, register_attention(), device=device)
    return loaded, check_capture(loaded)


class KeptModel:
    """Loads a model once, for all jobs of a worker."""

    def __init__(self) -> None:
        self._loaded: tuple[LoadedModel, Tensor | None] | None = None

    def load(self, folder: ModelFolder, device: torch.device) -> tuple[LoadedModel, Tensor | None]:
        """The model of the first call."""
        if self._loaded is None:
            self._loaded = load_for_reading(folder, device)
        return self._loaded


@dataclass(frozen=True, slots=True)
class Means:
    """load: where the model comes from. stays: whether its weights stay in memory after the reading.

    checkpoint: where the job leaves what another one can go on from; None without. writing: the folder in which the
    context is written until it is published; None for one that the store removes.
    """

    load: Load = load_for_reading
    stays: bool = False
    checkpoint: Checkpoint | None = None
    writing: Path | None = None


DEFAULT_MEANS = Means()
"""Of a job that runs alone."""
