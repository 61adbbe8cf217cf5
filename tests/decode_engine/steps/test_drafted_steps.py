"""Steps of sessions with drafts: a row for each token, and the same tokens, keys and values as one by one.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from decode_engine.engine.sampler import Guesses, Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.steps.stepper import FIXED_ROWS, MAX_ROWS, Stepper
from tests.decode_engine.steps.sessions import GREEDY, OnlyEven, by_steps, start, stepper_of, successor

DRAWN = SamplingParameters(temperature=0.9, seed=4)
RULED = SamplingParameters(frequency_penalty=2.0, presence_penalty=1.0, logit_bias={9: 3.0}, top_logprobs=2)
COUNT = 8


def one_by_one(
    runner: ModelRunner, stepper: Stepper, prompt: list[int], sampler: Sampler
) -> tuple[list[int], Session]:
    session = start(runner, prompt, 90)
    return by_steps(stepper, [session], [3], [sampler], COUNT)[0], session


def drafts_of(expected: Sequence[int], count: int, wrong: int) -> list[int]:
    """So many of the tokens that are going to come, one of them changed."""
    drafts = list(expected[:count])
    if wrong < len(drafts):
        drafts[wrong] = (drafts[wrong] + 1) % 250
    return drafts


def by_drafts(
    stepper: Stepper,
    sessions: Sequence[Session],
    samplers: Sequence[Sampler],
    expected: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Answers of steps with drafts of many lengths, right and wrong at many places."""
    histories: list[list[int]] = [[3] for _ in sessions]
    for turn in range(COUNT):
        here = [row for row, history in enumerate(histories) if len(history) <= COUNT - 4]
        drafts = [
            drafts_of(expected[row][len(histories[row]) - 1 :], (turn + row) % 4, (2 * turn + row) % 5)
            for row in here
        ]
        found = stepper.step(
            [sessions[row] for row in here],
            [histories[row][-1] for row in here],
            [samplers[row] for row in here],
            drafts,
        )
        for row, each, draft in zip(here, found, drafts, strict=True):
            assert not isinstance(each, Exception), each
            assert isinstance(each, tuple) is bool(draft)
            histories[row] += [each] if isinstance(each, int) else each
    return [history[1:] for history in histories]


def samplers(grammar: OnlyEven) -> list[Sampler]:
    """Of every kind: chosen and drawn on the device, and by the host where logits are changed."""
    return [
        Sampler(GREEDY),
        Sampler(DRAWN),
        Sampler(RULED, [5, 9]),
        Sampler(SamplingParameters(grammar=grammar)),  # type: ignore[arg-type]
    ]


PROMPTS = [[5, 9, 2], [7], [*range(124)], [4, 4]]


@pytest.mark.slow
def test_tokens_keys_and_values_are_those_of_steps_without_drafts(
    runner: ModelRunner, stepper: Stepper
) -> None:
    """Tails grow on the way, and sessions on one context and on others go together."""
    grammars = OnlyEven(), OnlyEven()
    alone = [
        one_by_one(runner, stepper, prompt, sampler)
        for prompt, sampler in zip(PROMPTS, samplers(grammars[0]), strict=True)
    ]
    together = samplers(grammars[1])
    for rows in ([0], [1, 2, 3]):
        sessions = [start(runner, PROMPTS[row], 90) for row in rows]
        said = by_drafts(stepper, sessions, [together[row] for row in rows], [alone[row][0] for row in rows])
        for row, session, tokens in zip(rows, sessions, said, strict=True):
            expected, twin = alone[row]
            assert tokens == expected[: len(tokens)]
            assert len(tokens) > COUNT - 5
            assert session.position == 90 + len(PROMPTS[row]) + len(tokens)
            for own, other in zip(session.layers, twin.layers, strict=True):
                count = session.tail_keys
                assert own.tail.count == count
                torch.testing.assert_close(own.tail.rows, other.tail.rows[:, :count], rtol=1e-3, atol=1e-4)
    told = [sampler.logprobs for sampler in together if sampler.parameters.top_logprobs]
    assert [each.token_id for each in told[0]] == alone[2][0][: len(told[0])]
    assert grammars[1].taken == grammars[0].taken[: len(grammars[1].taken)]


def test_rows_of_drafts_stay_seated_and_give_way_to_others(runner: ModelRunner, stepper: Stepper) -> None:
    one, other = start(runner, [5], 90), start(runner, [7], 17)
    greedy = [Sampler(GREEDY)] * 2
    graph = stepper.graph([one] * 4)
    for drafts in ([1, 2, 3], [1, 2], [1, 2, 3]):
        stepper.step([one], [3], greedy[:1], [drafts])
        assert graph.batch.numbers == [0, 1, 2, 3]
    stepper.step([one, other], [3, 3], greedy, [[1], [2]])
    assert [id(session) for session in graph.batch.sessions] == [id(one), id(one), id(other), id(other)]
    assert sorted(graph.batch.numbers[2:]) == graph.batch.numbers[:2] == [0, 1]


def test_a_session_that_fails_among_drafts_fails_alone(runner: ModelRunner) -> None:
    def breaks(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        logits = successor(tokens.clamp(max=60), positions, batch)
        return logits.masked_fill((tokens[:, 0] == 11)[:, None], torch.nan)

    stepper = stepper_of(runner, breaks)
    sessions = [start(runner, [5], 90) for _ in range(3)]
    before = [session.position for session in sessions]
    found = stepper.step(sessions, [8, 11, 20], [Sampler(GREEDY)] * 3, [[9, 10, 11], [12], [21, 22, 5]])
    assert found[0] == (9, 10, 11)
    assert isinstance(found[1], Exception)
    assert found[2] == (21, 22, 23)
    assert [session.position - at for session, at in zip(sessions, before, strict=True)] == [3, 0, 3]


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_drafts_come_by_captured_steps_of_the_method(
    runner: ModelRunner, stepper: Stepper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a session of that method alone, in flight; what they leave in tails is written anew."""
    monkeypatch.setattr(runner, "_stepper", stepper)
    prompts, lasts, counts = [[5, 9, 2], [7] * 126], [3, 4], [3, 2]
    drawn = [SamplingParameters(temperature=0.9), GREEDY]
    samplers = [Sampler(parameters) for parameters in drawn]
    sessions = [start(runner, prompt, 40, name="exact") for prompt in prompts]
    expected = [
        by_steps(stepper, [start(runner, prompt, 40, name="refined")], [last], [Guesses(sampler)], count)[0]
        for prompt, last, sampler, count in zip(prompts, lasts, samplers, counts, strict=True)
    ]
    drafts = runner.draft(sessions, lasts, samplers, counts)
    assert drafts == expected
    assert [session.tail_keys for session in sessions] == [
        session.layers[0].tail.count for session in sessions
    ]
    assert [session.tail_keys for session in sessions] == [3, 126]
    found = runner.launch(sessions, lasts, samplers, drafts).tokens()
    for session, prompt, each in zip(sessions, prompts, found, strict=True):
        assert isinstance(each, tuple)
        assert session.tail_keys == len(prompt) + len(each)
    assert isinstance(found[1], tuple)
    full = start(runner, prompts[1], 40)
    assert by_steps(stepper, [full], [4], [Sampler(GREEDY)], len(found[1]))[0] == [*found[1]]


def test_what_may_be_drafted_has_room_in_one_batch() -> None:
    greedy, seeded = Sampler(GREEDY), Sampler(DRAWN)
    assert Stepper.draft_room([greedy]) == MAX_ROWS - 1
    assert Stepper.draft_room([seeded]) == FIXED_ROWS - 1
    assert Stepper.draft_room([greedy] * 3 + [seeded]) == FIXED_ROWS // 4 - 1
    assert Stepper.draft_room([greedy] * (MAX_ROWS + 1)) == 0


@pytest.mark.parametrize("parameters", [GREEDY, DRAWN, RULED], ids=["greedy", "drawn", "ruled"])
def test_guesses_take_the_numbers_of_the_tokens_to_come(parameters: SamplingParameters) -> None:
    sampler, twin = Sampler(parameters), Sampler(parameters)
    guesses = Guesses(sampler)
    expected = [twin.draw(ahead) for ahead in range(4)]
    assert [guesses.draw(), guesses.draw(1)] == expected[:2]
    guesses.take(5)
    guesses.take(6)
    assert [guesses.draw(), guesses.draw(1)] == expected[2:]
    assert sampler.draw() == expected[0]
    assert not guesses.edited
