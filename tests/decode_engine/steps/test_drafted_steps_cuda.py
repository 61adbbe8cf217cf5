"""Captured steps of sessions with drafts on a GPU: what they choose, and what it is compared with.

Products round otherwise with other numbers of rows. So tokens that are drawn by a seed, whose graphs are all of one
number, equal those without drafts bit by bit; greedy ones are the best by the logits of the rows that chose them, and
by the general path but for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS
from tests.decode_engine.steps.sessions import GREEDY
from tests.support.devices import ON_GPU

pytestmark = ON_GPU

TOKENS = 40


def start(runner: ModelRunner, prompt: Sequence[int], name: str, placement: Placement) -> Session:
    context = made_up_context(
        runner.identity, runner.kv_dtype, METHODS["exact"], 3000, device="cuda", placement=placement
    )
    session = runner.start(context, METHODS[name].on(context.manifest))
    runner.read([session], [prompt])
    return session


def say(runner: ModelRunner, session: Session, sampler: Sampler, expected: Sequence[int] = ()) -> list[int]:
    """An answer; with drafts of what is expected, of many lengths, some of them wrong somewhere."""
    said = [3]
    while len(said) <= TOKENS:
        drafts = [*expected[len(said) - 1 :][: len(said) * 5 % 16]]
        if len(drafts) > 4 and len(said) % 2:
            drafts[4] += 1
        (found,) = runner.launch([session], said[-1:], [sampler], [drafts]).tokens()
        assert not isinstance(found, Exception), found
        said += [found] if isinstance(found, int) else found
    return said[1:]


@pytest.mark.parametrize("placement", [Placement.DEVICE, Placement.HYBRID])
def test_seeded_tokens_keys_and_values_are_those_without_drafts_bit_by_bit(
    runner: ModelRunner, placement: Placement
) -> None:
    seeded = [Sampler(SamplingParameters(temperature=0.9, seed=4)) for _ in range(2)]
    full, exact = (start(runner, [5, 9, 2], name, placement) for name in ("full", "exact"))
    expected = say(runner, full, seeded[0])
    said = say(runner, exact, seeded[1], [*expected, *[7] * 16])
    assert said[:TOKENS] == expected[:TOKENS]
    count = min(full.tail_keys, exact.tail_keys)
    for one, other in zip(full.layers, exact.layers, strict=True):
        assert torch.equal(one.tail.rows[:, :count], other.tail.rows[:, :count])


def test_greedy_tokens_are_the_best_of_the_rows_that_chose_them(runner: ModelRunner) -> None:
    session, said, rounds = start(runner, [5, 9, 2], "exact", Placement.DEVICE), [3], 0
    stepper, sampler = runner._stepper, Sampler(GREEDY)
    expected = say(runner, start(runner, [5, 9, 2], "full", Placement.DEVICE), Sampler(GREEDY))
    while len(said) <= TOKENS:
        drafts = expected[len(said) - 1 :][:7] or [5]
        (found,) = stepper.step([session], said[-1:], [sampler], [drafts])
        assert isinstance(found, tuple)
        graph = stepper.graph([session] * (len(drafts) + 1))
        assert graph.captured
        batch = graph.batch
        rows = {batch.numbers[row]: row for row, sitting in enumerate(batch.sessions) if sitting is session}
        best = [int(graph.logits_BV[rows[number]].argmax()) for number in range(len(found))]
        assert [*found] == best
        assert [*found[:-1]] == drafts[: len(found) - 1]
        assert len(found) > len(drafts) or found[-1] != drafts[len(found) - 1]
        said, rounds = [*said, *found], rounds + 1
    assert rounds < TOKENS
    again = start(runner, [5, 9, 2], "full", Placement.DEVICE)
    [logits_TV] = runner.forward([again], [said[:-1]], all_logits=True)
    behind = logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(said[1:], device="cuda")[:, None])[:, 0]
    assert float(behind.amax() / logits_TV.std()) < 0.1


def test_drafts_by_the_method_are_mostly_right_and_leave_nothing_behind(runner: ModelRunner) -> None:
    """Two sessions at once, with drafts by captured steps in flight; rules and log probabilities on the way."""
    sessions = [start(runner, prompt, "exact", Placement.DEVICE) for prompt in ([5, 9, 2], [7] * 120)]
    samplers = [Sampler(GREEDY), Sampler(SamplingParameters(logit_bias={9: 1.0}, top_logprobs=2))]
    said, drafted, accepted = [[3], [4]], 0, 0
    for _ in range(10):
        lasts, before = [own[-1] for own in said], [session.tail_keys for session in sessions]
        drafts = runner.draft(sessions, lasts, samplers, [5, 3])
        assert [len(each) for each in drafts] == [5, 3]
        assert [session.layers[0].tail.count for session in sessions] == before
        found = runner.launch(sessions, lasts, samplers, drafts).tokens()
        for own, each, draft in zip(said, found, drafts, strict=True):
            assert isinstance(each, tuple), each
            own.extend(each)
            drafted, accepted = drafted + len(draft), accepted + len(each) - 1
    assert accepted > drafted / 4, f"{accepted} of {drafted} drafts were right"
    assert [each.token_id for each in samplers[1].logprobs] == said[1][1:]
    for session, own, prompt in zip(sessions, said, ([5, 9, 2], [7] * 120), strict=True):
        assert session.tail_keys == len(prompt) + len(own) - 1
