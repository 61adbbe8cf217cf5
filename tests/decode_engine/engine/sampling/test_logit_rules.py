"""Penalties, biases and bans, by their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decode_engine.engine.sampling.edits import edit_logits_reference
from decode_engine.engine.sampling.logit_rules import LogitRules, RuledLogits
from index_store.errors import InvalidArgumentError

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 1.0])


def ruled(answer: list[int], prompt: tuple[int, ...] = (), **options: Any) -> list[float]:
    rules = RuledLogits(LogitRules(**options), prompt, end_ids=[5])
    for token in answer:
        rules.take(token)
    edits = rules.edits(LOGITS.device, len(LOGITS), 0)
    return edit_logits_reference(LOGITS[None], [edits])[0].tolist()


def test_presence_counts_once_and_frequency_every_time() -> None:
    assert ruled([0, 0, 1], presence_penalty=0.5) == [1.5, -1.5, 0.5, 3.0, 0.0, 1.0]
    assert ruled([0, 0, 1], frequency_penalty=0.5) == [1.0, -1.5, 0.5, 3.0, 0.0, 1.0]
    assert ruled([0, 0, 1], frequency_penalty=-0.5) == [3.0, -0.5, 0.5, 3.0, 0.0, 1.0]
    assert ruled([], presence_penalty=2.0, frequency_penalty=2.0) == LOGITS.tolist()


def test_repetition_divides_what_is_positive_and_multiplies_what_is_not_of_prompt_and_answer() -> None:
    assert ruled([0], (1, 3), repetition_penalty=2.0) == [1.0, -2.0, 0.5, 1.5, 0.0, 1.0]


def test_biases_come_after_the_penalties_and_bans_after_the_biases() -> None:
    assert ruled([0], repetition_penalty=2.0, logit_bias={0: 1.0, 4: -100.0}) == [
        2.0,
        -1.0,
        0.5,
        3.0,
        -100.0,
        1.0,
    ]
    assert ruled([0], min_tokens=2, logit_bias={5: 100.0})[5] == -torch.inf
    assert ruled([0, 1], min_tokens=2)[5] == 1.0


def test_the_models_logits_stay_as_they_are() -> None:
    before = LOGITS.clone()
    ruled([0], logit_bias={0: 5.0})
    assert torch.equal(before, LOGITS)
    assert ruled([0], logit_bias={0: 5.0})[0] == 7.0


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": dict.fromkeys(range(301), 0.0)},
        {"min_tokens": -1},
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        LogitRules(**options)
    assert caught.value.metadata["field"] in options
