"""What Generate can be asked beside a prompt: several answers, probabilities, penalties, biases and ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from decode_engine.rpc.client import Client, Piece
from index_store.errors import InvalidArgumentError

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
    assert several.usage is not None
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


def test_log_probabilities_are_those_of_the_output_before_anything_else(client: Client, lamp: str) -> None:
    plain = client.generate(lamp, text=PROMPT, max_tokens=6, top_logprobs=3)
    pieces = list(plain)
    told = [each for piece in pieces for each in piece.logprobs]
    tokens = [id_ for piece in pieces for id_ in piece.token_ids]
    assert [each.token_id for each in told] == tokens
    for each in told:
        assert each.alternatives[0].token_id == each.token_id
        assert each.alternatives[0].logprob == each.logprob < 0
        assert len(each.alternatives) == 3
        assert sum(math.exp(other.logprob) for other in each.alternatives) < 1
    assert b"".join(each.text for each in told).decode("utf-8", "replace") == plain_text(pieces)
    biased = client.generate(
        lamp,
        text=PROMPT,
        max_tokens=6,
        top_logprobs=3,
        logit_bias={tokens[0]: -100.0},
        temperature=2.0,
        seed=3,
    )
    first = next(iter(biased)).logprobs[0]
    assert first.token_id != tokens[0]
    assert first.alternatives == told[0].alternatives


def plain_text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


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


def test_penalties_and_biases_change_the_answer(client: Client, lamp: str) -> None:
    def ask(**options: object) -> list[int]:
        generation = client.generate(lamp, text=PROMPT, max_tokens=24, **options)  # type: ignore[arg-type]
        return [id_ for piece in generation for id_ in piece.token_ids]

    forced = ask(logit_bias={77: 100.0})
    assert forced == [77] * 24
    once = ask(logit_bias={77: 1.5}, presence_penalty=2.0, frequency_penalty=2.0)
    assert len(set(once)) > len(set(forced))
    assert ask(repetition_penalty=1.0) == ask()
    assert len(set(ask(repetition_penalty=100.0))) == 24


def test_a_prompt_that_is_too_long_for_log_probabilities_is_refused(
    client: Client, lamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_engine.rpc.answers.prompting.MAX_PROMPT_LOGPROBS", 100)
    assert list(client.generate(lamp, token_ids=[5] * 100, prompt_logprobs=True, max_tokens=1))
    with pytest.raises(InvalidArgumentError, match="at most 100"):
        list(client.generate(lamp, token_ids=[5] * 101, prompt_logprobs=True, max_tokens=1))
