"""A model and its stepper, without a GPU."""

from __future__ import annotations

import pytest

from decode_engine.model.runner import ModelRunner
from decode_engine.steps.stepper import Stepper
from tests.decode_engine.steps.sessions import make_runner, make_stepper


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return make_runner(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stepper(runner: ModelRunner) -> Stepper:
    return make_stepper(runner)
