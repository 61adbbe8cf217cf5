"""Batches of decode steps equal the general path for models with states, in their logits and in what they leave.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.errors import SparseKVError
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.support.devices import nightly
from tests.support.models import LAYER_KINDS, STATEFUL, write_model_folder

pytestmark = pytest.mark.usefixtures("few_programs")

LENGTHS = (90, 12, 30)
PROMPTS = ([5, 9], list(range(40)), [7])
GREEDY = [Sampler(SamplingParameters()) for _ in range(4)]


def make(folder: Path, family: str) -> tuple[ModelRunner, Stepper]:
    write_model_folder(folder, family, layers=3, max_positions=8192, head_dim=64, **STATEFUL[family])
    runner = ModelRunner(resolve_model(str(folder)))
    model = step_model(runner.model)
    return runner, Stepper(model, runner.identity, torch.float32, torch.device("cpu"), forms=runner.forms)


def start(runner: ModelRunner, name: str = "full") -> list[Session]:
    """Sessions on contexts of several lengths, with full attention one on none, each behind a prompt."""
    method = get_method(name, None if name == "full" else 1.0)
    sessions = []
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        context = runner.no_context
        if length != 12 or name != "full":
            context = made_up_context(runner.identity, runner.kv_dtype, method, length)
        sessions.append(runner.start(context, method.on(context.manifest)))
        runner.read(sessions[-1:], [prompt])
    return sessions


def check_states(sessions: list[Session], twins: list[Session]) -> None:
    for session, twin in zip(sessions, twins, strict=True):
        assert session.position == twin.position
        for own, other in zip(session.states.parts, twin.states.parts, strict=True):
            torch.testing.assert_close(own, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3_next", "full"), ("granitemoehybrid", "full"), ("lfm2", "csattention")),
        *nightly(*((each, "full") for each in STATEFUL if each not in ("qwen3_next", "granitemoehybrid"))),
    ],
)
def test_steps_equal_the_general_path(tmp_path: Path, family: str, name: str) -> None:
    """Three sessions in a batch of four rows, one after another by either way, and a second answer of one."""
    runner, stepper = make(tmp_path, family)
    sessions, twins = start(runner, name), start(runner, name)
    assert all(map(stepper.takes, sessions))
    tokens = [3, 4, 5]
    for step in range(3):
        if step == 1:
            sessions.append(sessions[1].fork())
            twins.append(twins[1].fork())
            tokens.append(8)
        chosen = stepper.step(sessions, tokens, GREEDY[: len(tokens)])
        expected = torch.cat(runner.forward(twins, [[token] for token in tokens]))
        found = stepper.graph(sessions).logits_BV[: len(tokens)].float()
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        check_states(sessions, twins)
        tokens = [int(token) for token in chosen if isinstance(token, int)]
    (found,) = runner.forward([sessions[0]], [[9]])
    torch.testing.assert_close(found, runner.forward([twins[0]], [[9]])[0], rtol=2e-3, atol=2e-3)
    check_states(sessions, twins)


def test_a_step_in_flight_leaves_the_states_of_who_has_ended(tmp_path: Path) -> None:
    """It was computed one token too far; what is kept of the session, and other answers of it, know nothing of it."""
    runner, stepper = make(tmp_path, "qwen3_5_text")
    sessions, twins = start(runner), start(runner)
    first = stepper.launch(sessions, [3, 4, 5], GREEDY[:3])
    second = first.follow()
    tokens = [int(token) for token in first.tokens() if isinstance(token, int)]
    second.leave(0)
    runner.forward(twins, [[3], [4], [5]])
    check_states(sessions, twins)
    second.tokens()
    check_states(sessions[:1], twins[:1])
    runner.forward(twins[1:], [[token] for token in tokens[1:]])
    check_states(sessions, twins)
    third = stepper.step([sessions[1], sessions[0].fork()], [6, 7], GREEDY[:2])
    assert all(isinstance(token, int) for token in third)
    runner.forward([twins[1]], [[6]])
    check_states(sessions, twins)


def test_a_step_that_fails_may_be_made_again(tmp_path: Path) -> None:
    runner, stepper = make(tmp_path, "lfm2")
    sessions, twins = start(runner), start(runner)
    failing = runner.model.get_output_embeddings().register_forward_hook(_fail)
    assert all(isinstance(found, RuntimeError) for found in stepper.step(sessions, [3, 4, 5], GREEDY[:3]))
    failing.remove()
    check_states(sessions, twins)
    stepper.step(sessions, [3, 4, 5], GREEDY[:3])
    runner.forward(twins, [[3], [4], [5]])
    check_states(sessions, twins)


def _fail(*_: object) -> None:
    raise RuntimeError("half way")


def test_a_session_without_a_token_has_nothing_to_step_behind(tmp_path: Path) -> None:
    """It does not harm the one beside it."""
    runner, stepper = make(tmp_path, "lfm2")
    session, *_ = start(runner)
    empty = runner.start(runner.no_context, get_method("full").on(runner.no_context.manifest))
    found = stepper.step([session, empty], [3, 4], GREEDY[:2])
    assert isinstance(found[0], int)
    assert isinstance(found[1], SparseKVError)
    assert "without a token" in str(found[1])


def test_chunks_take_the_general_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family, settings = LAYER_KINDS["chunks"]
    write_model_folder(tmp_path, family, layers=3, head_dim=64, **settings)
    runner = ModelRunner(resolve_model(str(tmp_path)))
    stepper = Stepper(step_model(runner.model), runner.identity, torch.float32, torch.device("cpu"))
    session = runner.start(runner.no_context, get_method("full").on(runner.no_context.manifest))
    with caplog.at_level("INFO"):
        assert not stepper.takes(session)
    assert any("the model attends in chunks" in record.message for record in caplog.records)
