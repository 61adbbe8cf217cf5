"""Batches of decode steps through records and kernels equal the general path, session by session.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.step_batch import step_counts
from decode_engine.steps.stepper import Stepper
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS, get_method
from tests.decode_engine.steps.sessions import (
    GREEDY,
    OnlyEven,
    by_forward,
    by_steps,
    start,
    successor,
)


def test_sessions_on_contexts_of_other_lengths_decode_as_one_by_one(
    runner: ModelRunner, stepper: Stepper
) -> None:
    prompts, lengths = [[5, 9, 2], [7], [1, 2, 3, 4]], [512, 301, 17]
    samplings = [GREEDY, SamplingParameters(temperature=0.9, seed=4), SamplingParameters(0.8, 0.7, 11, 5)]
    expected = [
        by_forward(runner, start(runner, prompt, length), 3, Sampler(sampling), 4)
        for prompt, length, sampling in zip(prompts, lengths, samplings, strict=True)
    ]
    sessions = [start(runner, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    samplers = [Sampler(sampling) for sampling in samplings]
    assert by_steps(stepper, sessions, [3] * 3, samplers, 4) == expected


def test_sessions_with_rules_grammars_and_log_probabilities_step_with_the_others(
    runner: ModelRunner, stepper: Stepper
) -> None:
    prompts, rules = [[5, 9, 2], [4, 4]], {"frequency_penalty": 2.0, "logit_bias": {9: 3.0}}
    grammars = [OnlyEven(), OnlyEven()]

    def samplers(grammar: OnlyEven) -> list[Sampler]:
        by_hand = SamplingParameters(**rules, grammar=grammar, top_logprobs=2)  # type: ignore[arg-type]
        return [Sampler(GREEDY), Sampler(by_hand, prompts[1])]

    alone, together = (samplers(grammar) for grammar in grammars)
    expected = [
        by_forward(runner, start(runner, prompt, 17), 3, sampler, 2)
        for prompt, sampler in zip(prompts, alone, strict=True)
    ]
    sessions = [start(runner, prompt, 17) for prompt in prompts]
    assert by_steps(stepper, sessions, [3] * 2, together, 2) == expected
    assert grammars[0].taken == grammars[1].taken == expected[1]
    assert all(token % 2 == 0 for token in expected[1])
    told = [sampler.logprob for sampler in (alone[1], together[1])]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0].token_id == told[1].token_id == expected[1][-1]
    assert told[0].logprob == pytest.approx(told[1].logprob, abs=1e-3)


@pytest.mark.parametrize("name", ["full", "csattention", "multipole", "quest", "pq", "csattention-paper"])
def test_a_fork_decodes_as_the_session_it_was_made_of(runner: ModelRunner, name: str) -> None:
    prompt = list(range(40)) * 4
    whole, other = start(runner, prompt, name=name), start(runner, prompt, name=name)
    fork = whole.fork()
    assert fork.figures == whole.figures
    assert fork.nbytes > 0
    expected = by_forward(runner, other, 3, Sampler(GREEDY), 6)
    by_forward(runner, whole, 8, Sampler(SamplingParameters(2.0, seed=2)), 6)
    whole.close()
    assert by_forward(runner, fork, 3, Sampler(GREEDY), 6) == expected
    assert fork.nbytes == other.nbytes
    times = {"search_ns", "gather_ns", "attend_ns", "append_ns"}
    assert {field: value for field, value in asdict(fork.figures).items() if field not in times} == {
        field: value for field, value in asdict(other.figures).items() if field not in times
    }


def test_sessions_join_leave_and_take_other_rows(runner: ModelRunner, stepper: Stepper) -> None:
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4]]
    expected = [by_forward(runner, start(runner, prompt), 3, Sampler(GREEDY), 4) for prompt in prompts]
    a, b, c = (start(runner, prompt) for prompt in prompts)
    got: dict[int, list[int]] = {id(session): [] for session in (a, b, c)}
    for batch in ([a], [a, b], [b, a, c], [c, b], [c], [a, b, c]):
        tokens = [(got[id(session)] or [3])[-1] for session in batch]
        for session, token in zip(
            batch, stepper.step(batch, tokens, [Sampler(GREEDY)] * len(batch)), strict=True
        ):
            assert isinstance(token, int)
            got[id(session)].append(token)
    for session, whole in zip((a, b, c), expected, strict=True):
        assert got[id(session)] == whole[: len(got[id(session)])]
        assert len(got[id(session)]) >= 3


def test_a_tail_that_grows_is_followed(runner: ModelRunner, stepper: Stepper) -> None:
    prompt = list(range(125))
    expected = by_forward(runner, start(runner, prompt), 3, Sampler(GREEDY), 6)
    session = start(runner, prompt)
    assert by_steps(stepper, [session], [3], [Sampler(GREEDY)], 6)[0] == expected
    assert session.layers[0].tail.capacity > 128


def test_steps_count_what_they_touch(runner: ModelRunner, stepper: Stepper) -> None:
    one, other = start(runner, [5]), start(runner, [5])
    by_forward(runner, one, 3, Sampler(GREEDY), 3)
    by_steps(stepper, [other], [3], [Sampler(GREEDY)], 3)
    assert other.position == one.position
    assert other.figures.available == one.figures.available
    assert other.figures.attended == one.figures.attended


@pytest.mark.parametrize("expression", ["squeezed", "csattention@period=4", "quest"])
def test_a_context_of_flat_layers_is_attended_to_as_by_full_attention(
    runner: ModelRunner, expression: str
) -> None:
    """Without any index; on the general path, and in the captured steps of full attention."""
    context = made_up_context(runner.identity, runner.kv_dtype, METHODS["full"], 90)
    context.manifest = replace(context.manifest, dense_layers=tuple(range(runner.identity.layers)))

    def begun(name: str) -> Session:
        session = runner.start(context, get_method(name).on(context.manifest))
        runner.forward([session], [[5, 9]])
        return session

    expected = by_forward(runner, begun("full"), 3, Sampler(GREEDY), 3)
    assert by_forward(runner, begun(expression), 3, Sampler(GREEDY), 3) == expected
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    session, full = begun(expression), begun("full")
    assert stepper.graph([session]) is stepper.graph([full])
    assert step_counts(session) == step_counts(full)


def test_steps_and_the_general_path_take_turns(runner: ModelRunner, stepper: Stepper) -> None:
    prompt, sampler = list(range(125)), Sampler(GREEDY)
    expected = by_forward(runner, start(runner, prompt), 3, sampler, 8)
    session, tokens = start(runner, prompt), [3]
    for _ in range(2):
        tokens += by_steps(stepper, [session], tokens[-1:], [sampler], 2)[0]
        tokens += by_forward(runner, session, tokens[-1], sampler, 2)
    assert tokens[1:] == expected


def test_a_step_without_anything_to_search_counts_no_search(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    one, other = (start(runner, [5], 100, name="multipole") for _ in range(2))
    by_forward(runner, one, 3, Sampler(GREEDY), 2)
    by_steps(stepper, [other], [3], [Sampler(GREEDY)], 2)
    assert other.figures.searches == one.figures.searches == 0
    assert other.figures.attended == one.figures.attended


@pytest.mark.usefixtures("few_programs")
def test_steps_over_host_memory_equal_the_general_path(runner: ModelRunner, stepper: Stepper) -> None:
    """Two sessions of one context and one of another, in one batch; they share slots, and not all rows find one.

    They attend to all keys: with fewer, the two paths keep others near the border.
    """
    method = replace(get_method("multipole+dropped", 1.0), recent=20)
    made = [
        made_up_context(runner.identity, runner.kv_dtype, method, length, placement=Placement.HYBRID)
        for length in (120, 70)
    ]
    for context in made:
        context.manifest = replace(context.manifest, dense_layers=(0,))
    prompts, contexts = [[5, 9], [7], [1, 2, 3]], [made[0], made[0], made[1]]

    def sessions() -> list[Session]:
        begun = [runner.start(context, method.on(context.manifest)) for context in contexts]
        for session, prompt in zip(begun, prompts, strict=True):
            runner.forward([session], [prompt])
        return begun

    expected = [by_forward(runner, session, 3, Sampler(GREEDY), 2) for session in sessions()]
    batch = sessions()
    before = [(session.figures.attended, session.position) for session in batch]
    assert by_steps(stepper, batch, [3] * 3, [Sampler(GREEDY)] * 3, 2) == expected
    for session, (attended, position) in zip(batch, before, strict=True):
        figures, model = session.figures, session.context.manifest.model
        assert figures.rows_reused > 0
        # Every row of the context that was attended to was read, or found; the tails are on the device.
        tail = sum(position + step + 1 - session.context.manifest.token_count for step in range(2))
        rows = figures.attended - attended - model.layers * model.kv_heads * tail
        assert figures.host_bytes_read == (rows - figures.rows_reused) * 2 * model.head_dim * 4
