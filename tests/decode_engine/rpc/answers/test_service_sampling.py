"""What Generate can be asked beside a prompt: several answers, probabilities, penalties, biases and ends."""

from __future__ import annotations

import pytest

from decode_engine.rpc.client import Client

PROMPT = "Who lit the lamp of the grey harbour?"


@pytest.mark.parametrize("method", ["full", "csattention"])
def test_every_answer_is_that_of_its_own_seed_alone(client: Client, lamp: str, method: str) -> None:
    with client.generate(
        lamp, text=PROMPT, max_tokens=12, temperature=1.5, seed=7, n=4, method=method
    ) as several:
        pieces = list(several)
    answers = [
        tuple(id_ for piece in pieces if piece.index == index for id_ in piece.token_ids)
        for index in range(4)
    ]
    assert len(set(answers)) == 4
    assert several.usage.completion_tokens == 48
    for answer, summary in zip(answers, several.summaries, strict=True):
        assert summary.completion_tokens == 12
        assert summary.prompt_tokens == several.summary.prompt_tokens
        with client.generate(
            lamp, text=PROMPT, max_tokens=12, temperature=1.5, seed=summary.seed, method=method
        ) as alone:
            assert tuple(id_ for piece in alone for id_ in piece.token_ids) == answer
        assert alone.summary.selection == summary.selection
    assert several.summary.seed == 7


def test_prompt_log_probabilities_are_those_of_feeding_it(client: Client, lamp: str) -> None:
    ids = client.tokenize(PROMPT).ids
    reading = client.generate(
        lamp, token_ids=ids, max_tokens=1, method="full", prompt_logprobs=True, top_logprobs=2
    )
    list(reading)
    assert [each.token_id for each in reading.prompt_logprobs] == list(ids[1:])
    for place in (1, len(ids) // 2, len(ids) - 1):
        asked = client.generate(lamp, token_ids=ids[:place], max_tokens=1, method="full", top_logprobs=20)
        [only] = [each for piece in asked for each in piece.logprobs]
        by_id = {other.token_id: other.logprob for other in only.alternatives}
        own = reading.prompt_logprobs[place - 1]
        assert own.alternatives[0].token_id == only.token_id
        assert own.alternatives[0].logprob == pytest.approx(only.logprob, abs=1e-4)
        if own.token_id in by_id:
            assert own.logprob == pytest.approx(by_id[own.token_id], abs=1e-4)
