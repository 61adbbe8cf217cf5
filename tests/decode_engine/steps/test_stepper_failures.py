"""What fails or is refused in a batch of decode steps leaves the other sessions as they would be without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels import records
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.step_batch import step_counts
from decode_engine.steps.stepper import Stepper
from index_store.errors import InvalidArgumentError
from index_store.methods.presets import METHODS
from index_store.models.resolve import resolve_model
from tests.decode_engine.steps.sessions import (
    GREEDY,
    OnlyEven,
    by_forward,
    start,
    successor,
)
from tests.support.models import write_model_folder


def test_a_grammar_that_fails_ends_its_own_session(runner: ModelRunner, stepper: Stepper) -> None:
    class Failing(OnlyEven):
        def allowed(self) -> NDArray[np.int32]:
            raise InvalidArgumentError("the constraint cannot be obeyed any more")

    grammar = Failing()
    samplers = [Sampler(GREEDY), Sampler(SamplingParameters(grammar=grammar))]  # type: ignore[arg-type]
    expected = by_forward(runner, start(runner, [5, 9, 2], 17), 3, Sampler(GREEDY), 1)
    sessions = [start(runner, [5, 9, 2], 17), start(runner, [7], 17)]
    positions = [session.position for session in sessions]
    token, failed = stepper.step(sessions, [3, 3], samplers)
    assert [token] == expected
    assert isinstance(failed, InvalidArgumentError)
    assert [session.position for session in sessions] == [positions[0] + 1, positions[1]]


def test_logits_that_are_not_finite_fail_their_session_only(runner: ModelRunner) -> None:
    def broken(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(tokens[:, 0] + 1, runner.identity.vocab_size).float()
        return torch.where(tokens == 7, torch.nan, logits)

    stepper = Stepper(broken, runner.identity, torch.float32, torch.device("cpu"))
    well, ill = start(runner, [5]), start(runner, [5])
    results = stepper.step([ill, well], [7, 8], [Sampler(GREEDY)] * 2)
    assert isinstance(results[0], Exception)
    assert results[1] == 9
    assert (ill.position, well.position) == (513, 514)


def test_a_batch_that_fails_is_not_the_fault_of_others(runner: ModelRunner) -> None:
    def broken(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        if bool((tokens == 7).any()):
            raise RuntimeError("out of something")
        return successor(tokens, positions, batch)

    stepper = Stepper(broken, runner.identity, torch.float32, torch.device("cpu"))
    well, ill = start(runner, [5]), start(runner, [5], name="multipole")  # a batch of its own
    results = stepper.step([ill, well], [7, 8], [Sampler(GREEDY)] * 2)
    assert str(results[0]) == "out of something"
    assert results[1] == 9
    assert (ill.position, well.position) == (513, 514)


def test_a_session_without_a_place_is_not_the_fault_of_its_batch(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    well, ill = start(runner, [5]), start(runner, [5])
    ill.context._kv.pop(runner.identity.layers - 1)  # its last layer cannot be read any more
    for step in range(2):
        results = stepper.step([ill, well], [7, 8 + step], [Sampler(GREEDY)] * 2)
        assert isinstance(results[0], InvalidArgumentError)
        assert results[1] == 9 + step
    assert (ill.position, well.position) == (513, 515)
    batch = stepper.graph([ill, well]).batch
    row = 1 - batch.sessions.index(well)
    assert not batch._host_LBF[:, row].any()


def test_a_session_whose_counts_no_record_holds_fails_alone(runner: ModelRunner) -> None:
    """One that nothing refused before, among sixteen in a batch: the others step as without it."""
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    method = replace(METHODS["multipole"], recent=8, append_block=4)
    context = made_up_context(runner.identity, runner.kv_dtype, method, 60)
    fitted = method.on(context.manifest)
    sessions = [runner.start(context, fitted) for _ in range(16)]
    absurd = runner.start(context, replace(fitted, method=replace(method, recent=10**24)))
    tokens: list[int | Exception] = [*range(16)]
    for step in range(6):
        results = stepper.step([absurd, *sessions], [0, *tokens], [Sampler(GREEDY)] * 17)  # type: ignore[list-item]
        assert isinstance(results[0], OverflowError)
        tokens = results[1:]
        assert tokens == [number + step + 1 for number in range(16)]
    assert absurd.position == context.manifest.token_count
    graph = stepper.graph([absurd, *sessions])
    for session in sessions:
        session.position -= 1  # as before the last step
        counts = step_counts(session)
        row = graph._inputs[graph.batch.sessions.index(session)]
        assert row[2:].tolist() == [counts[field] for field in range(*records.STEP_FIELDS)]


def test_models_that_kernels_are_not_made_for_take_the_general_path(
    runner: ModelRunner, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path, head_dim=48, max_positions=8192)
    other = ModelRunner(resolve_model(str(folder)))
    stepper = Stepper(successor, other.identity, torch.float32, torch.device("cpu"))
    assert not stepper.takes(start(other, [5]))


def test_a_method_without_kernels_is_refused_with_a_reason(
    runner: ModelRunner, stepper: Stepper, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS["quest"]
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    with caplog.at_level("INFO"):
        assert not stepper.takes(session)
        assert not stepper.takes(session)
    assert sum("quest" in record.message for record in caplog.records) == 1
