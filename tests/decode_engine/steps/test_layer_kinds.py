"""Batches of decode steps equal the general path for models with sliding windows, learnt sinks, experts, other scales.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.dense_layer import keys_in_window
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import WindowSteps
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.support.devices import nightly
from tests.support.models import HEAD_SHAPES, LAYER_KINDS, write_model_folder

LENGTHS = (90, 9)
USUAL = MappingProxyType({"head_dim": 64})


def make_runner(folder: Path, kind: str, heads: Mapping[str, int] = USUAL) -> ModelRunner:
    family, settings = LAYER_KINDS[kind]
    write_model_folder(folder, family, layers=3, max_positions=8192, **heads, **settings)
    return ModelRunner(resolve_model(str(folder)))


def make_stepper(runner: ModelRunner) -> Stepper:
    model = step_model(runner.model)
    return Stepper(model, runner.identity, torch.float32, torch.device("cpu"), forms=runner.forms)


def start(
    runner: ModelRunner,
    name: str,
    placement: Placement = Placement.DEVICE,
    lengths: tuple[int, int] = LENGTHS,
) -> list[Session]:
    """Sessions on contexts of two lengths, 0 for none, of which one has read a prompt longer than a window."""
    method = get_method(name, None if name == "full" else 1.0)
    sessions = []
    for length, prompt in zip(lengths, ([5, 9], list(range(40))), strict=True):
        context = runner.no_context
        if length:
            context = made_up_context(runner.identity, runner.kv_dtype, method, length, placement=placement)
        sessions.append(runner.start(context, method.on(context.manifest)))
        runner.forward(sessions[-1:], [prompt])
    return sessions


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("windows", "csattention+dropped"),
        ("windows only", "csattention"),
        ("sinks", "full"),
        ("sinks", "multipole"),
        ("experts", "full"),
        ("another scale", "full"),
    ],
)
def test_steps_equal_the_general_path(tmp_path: Path, kind: str, name: str) -> None:
    """With a budget of all keys: of fewer, the two keep others near the border."""
    check_steps(make_runner(tmp_path, kind), name)


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("heads", ["long rows", *nightly("large groups")])
@pytest.mark.parametrize(
    ("name", "placement"),
    [("refined", Placement.HYBRID), *nightly(("full", Placement.DEVICE), ("refined", Placement.DEVICE))],
)
def test_other_heads_step_as_on_the_general_path(
    tmp_path: Path, heads: str, name: str, placement: Placement
) -> None:
    """In layers with windows and in those between them."""
    check_steps(make_runner(tmp_path, "windows", HEAD_SHAPES[heads]), name, placement, (90, 40))


@pytest.mark.usefixtures("few_programs", "watched")
@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("windows", (0, 0)),
        ("sinks", (90, 0)),
        *nightly(
            ("windows only", (0, 0)), ("sinks", (0, 0)), ("windows", (90, 0)), ("windows only", (90, 0))
        ),
    ],
)
def test_sessions_without_a_context_step_as_on_the_general_path(
    tmp_path: Path, kind: str, lengths: tuple[int, int]
) -> None:
    """Two of them are a group that shares no keys; beside a session on a context they share its batch."""
    check_steps(make_runner(tmp_path, kind), "full", lengths=lengths)


def check_steps(
    runner: ModelRunner,
    name: str,
    placement: Placement = Placement.DEVICE,
    lengths: tuple[int, int] = LENGTHS,
) -> None:
    stepper = make_stepper(runner)
    sessions, twins = (start(runner, name, placement, lengths) for _ in range(2))
    assert all(map(stepper.takes, sessions))
    tokens, samplers = [3, 4], [Sampler(SamplingParameters())] * 2
    for _ in range(2):
        chosen = stepper.step(sessions, tokens, samplers)
        expected = torch.stack([row[-1] for row in runner.forward(twins, [[token] for token in tokens])])
        found = stepper.graph(sessions).logits_BV[:2].float()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        tokens = [int(token) for token in chosen if isinstance(token, int)]
    for session, twin in zip(sessions, twins, strict=True):
        assert session.figures.available == twin.figures.available
        if name == "full":
            assert session.figures.attended == twin.figures.attended


@pytest.mark.usefixtures("few_programs")
def test_windows_stay_on_the_device_where_other_keys_are_in_host_memory(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, "sinks")
    stepper = make_stepper(runner)
    sessions, twins = (start(runner, "multipole+dropped", Placement.HYBRID) for _ in range(2))
    assert all(map(stepper.takes, sessions))
    samplers = [Sampler(SamplingParameters())] * 2
    stepper.step(sessions, [3, 4], samplers)
    expected = torch.stack([row[-1] for row in runner.forward(twins, [[3], [4]])])
    torch.testing.assert_close(stepper.graph(sessions).logits_BV[:2].float(), expected, rtol=2e-3, atol=2e-3)
    kinds = [type(attention) for attention in stepper.graph(sessions).batch._layers]
    assert [kind is WindowSteps for kind in kinds] == [True, False, True]


def test_capped_logits_take_the_general_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runner = make_runner(tmp_path, "caps")
    with caplog.at_level("INFO"):
        assert not any(map(make_stepper(runner).takes, start(runner, "full")))
    assert any("the model caps its logits" in record.message for record in caplog.records)


@pytest.mark.parametrize("window", [1, 5, 24])
@pytest.mark.parametrize(("position", "positions"), [(0, 1), (0, 40), (3, 2), (23, 9), (100, 7)])
def test_keys_in_a_window_are_counted(window: int, position: int, positions: int) -> None:
    expected = sum(min(place + 1, window) for place in range(position, position + positions))
    assert keys_in_window(position, positions, window) == expected
