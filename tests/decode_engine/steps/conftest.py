"""A model and its stepper, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode_engine.model.runner import ModelRunner
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.models.resolve import resolve_model
from tests.support.models import write_model_folder


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192)
    return ModelRunner(resolve_model(str(folder)))


@pytest.fixture
def stepper(runner: ModelRunner) -> Stepper:
    model = step_model(runner.model)
    return Stepper(model, runner.identity, torch.float32, torch.device("cpu"))
