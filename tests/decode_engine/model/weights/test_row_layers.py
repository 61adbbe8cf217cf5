"""Decode steps in few calls, beside the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from decode_engine.model import row_layers as module
from decode_engine.model.row_layers import RowLayers
from decode_engine.model.runner import ModelRunner
from index_store.methods.presets import METHODS
from index_store.models.loading import ModelFolder, resolve_model
from tests.support.models import LAYER_KINDS, write_model_folder


def _folder(path: Path, family: str, **settings: Any) -> ModelFolder:
    return resolve_model(str(write_model_folder(path, family, **settings)))


@pytest.mark.parametrize(
    ("family", "weights"), [("llama", "bfloat16"), ("qwen2", "float32"), ("mistral", "int8")]
)
def test_few_calls_give_what_the_models_own_forward_gives(tmp_path: Path, family: str, weights: str) -> None:
    runner = ModelRunner(_folder(tmp_path, family), weights=weights)
    steps = [[[7], [200], [3]], [[9], [8], [60]], [[1], [2], [3]]]

    def logits() -> torch.Tensor:
        fitted = METHODS["full"].on(runner.no_context.manifest)
        sessions = [runner.start(runner.no_context, fitted) for _ in range(3)]
        runner.read(sessions, [[5] * 40, [6], [1, 2, 3]])
        found = [torch.cat(runner.forward(sessions, step, rows=True)) for step in steps]
        found += runner.forward(sessions, [[4, 5, 6, 7, 8], [9], [1, 2]], all_logits=True, rows=True)
        assert [session.position for session in sessions] == [48, 5, 8]
        return torch.cat(found)

    few, runner._row_layers = runner._row_layers, None
    expected = logits()
    assert isinstance(few, RowLayers)
    runner._row_layers = few
    torch.testing.assert_close(logits(), expected, rtol=1e-3, atol=1e-4)
    runner.close()


def test_a_rows_bits_do_not_depend_on_those_beside_it(tmp_path: Path) -> None:
    runner = ModelRunner(_folder(tmp_path, "llama"))
    assert runner._row_layers is not None
    fitted = METHODS["full"].on(runner.no_context.manifest)

    def last(count: int) -> torch.Tensor:
        sessions = [runner.start(runner.no_context, fitted) for _ in range(count)]
        for token in (5, 6, 7):
            found = runner.forward(sessions, [[token + 11 * n] for n in range(count)], rows=True)
        return found[0]

    alone = last(1)
    for count in (4, 7):
        assert torch.equal(last(count), alone)
    runner.close()


@pytest.mark.parametrize(
    ("family", "settings"), [("granite", {"residual_multiplier": 0.5}), LAYER_KINDS["no positions"]]
)
def test_a_trial_finds_layers_that_do_something_else(
    tmp_path: Path, family: str, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(_folder(tmp_path, family, layers=3, **settings))
    with caplog.at_level("INFO", module.__name__):
        assert RowLayers.of(runner.model) is not None
        assert runner._row_layers is None
        assert module.row_layers(runner.model, runner.no_context, runner.forms) is None
    assert "go the general way: in fewer calls logits differ by" in caplog.text
    runner.close()


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_other_layers_go_the_general_way(tmp_path: Path, family: str) -> None:
    runner = ModelRunner(_folder(tmp_path, family))
    assert RowLayers.of(runner.model) is None
    runner.close()
