"""Edits of logits, by rules and by kernels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decode_engine.engine.sampler import SamplingParameters
from decode_engine.engine.sampling.edits import (
    COUNT,
    ENDS,
    SAID,
    Edits,
    RuledLogits,
    edit_logits_reference,
    tell_tokens_reference,
)
from decode_engine.engine.sampling.edits_triton import (
    RESULT_COLUMNS,
    TOKEN,
    EditBuffers,
    edit_logits,
    read_logprob,
    tell_tokens,
    write_edits,
)
from decode_engine.orders.events import TokenLogprob
from decode_engine.orders.fields import Sampling
from index_store.errors import InvalidArgumentError
from tests.support.devices import DEVICE, DTYPES

SIZES = [1, 63, 100, 500, 4100]


def ugly_logits(rows: int, vocabulary: int, dtype: torch.dtype, seed: int) -> Tensor:
    """With ties, zeros of both signs, tokens that cannot come, and a row that is no number."""
    generator = torch.Generator().manual_seed(seed)
    logits_BV = (torch.randn(rows, vocabulary, generator=generator) * 4).round(decimals=1)
    logits_BV[:, ::7] = 0.0
    logits_BV[:, ::21] = -0.0
    logits_BV[1, 1::2] = -torch.inf
    logits_BV[2, vocabulary // 2] = torch.nan
    logits_BV[3, : vocabulary - 1] = -torch.inf
    return logits_BV.to(DEVICE, dtype)


def drawn_edits(draw: random.Random, vocabulary: int) -> Edits | None:
    """Of a row, as it comes."""
    if draw.random() < 0.2:
        return None
    generator = np.random.default_rng(draw.randrange(2**32))
    made = Edits(told=draw.choice([None, 0, 3, 20]))
    if draw.random() < 0.7:
        marks = generator.integers(0, 12, vocabulary, dtype=np.int32) * generator.integers(0, 2, vocabulary)
        made = replace(
            made,
            marks_V=torch.from_numpy(marks.astype(np.int32)).to(DEVICE),
            presence=draw.choice([0.0, -1.3, 0.7]),
            frequency=draw.choice([0.0, 0.1, 1.9]),
            repetition=draw.choice([1.0, 1.3, 0.6]),
            banned=draw.random() < 0.5,
        )
    if draw.random() < 0.5:
        bias = np.zeros(vocabulary, dtype=np.float32)
        bias[generator.integers(0, vocabulary, 20)] = generator.uniform(-100, 100, 20)
        made = replace(made, bias_V=torch.from_numpy(bias).to(DEVICE))
    if draw.random() < 0.5:
        words = generator.integers(-(2**31), 2**31, -(-vocabulary // 32), dtype=np.int64)
        made = replace(made, allowed_W=words.astype(np.int32))
    return made


def filled(edits: Sequence[Edits | None], vocabulary: int) -> EditBuffers:
    """Buffers as a step has them; what nothing is to be read of is poisoned."""
    buffers = EditBuffers.allocate(len(edits), vocabulary, torch.device(DEVICE))
    buffers.keys_BST.fill_(2**62)
    buffers.sums_BS2.fill_(torch.nan)
    buffers.mask_BW.fill_(0x5A5A5A5A)
    for row, each in enumerate(edits):
        values = np.zeros(buffers.table_BX.shape[1], dtype=np.int64)
        if each is not None:
            write_edits(each, values)
            if each.allowed_W is not None:
                buffers.mask_BW[row] = torch.from_numpy(each.allowed_W).to(DEVICE)
        buffers.table_BX[row] = torch.from_numpy(values).to(DEVICE)
    return buffers


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_kernels_do_what_the_references_do(vocabulary: int, dtype: torch.dtype) -> None:
    draw = random.Random(vocabulary)
    logits_BV = ugly_logits(8, vocabulary, dtype, vocabulary)
    before_BV = logits_BV.clone()
    edits = [drawn_edits(draw, vocabulary) for _ in range(8)]
    buffers = filled(edits, vocabulary)
    edited_BV = edit_logits(logits_BV, buffers)
    expected_BV = edit_logits_reference(logits_BV, edits)
    torch.testing.assert_close(edited_BV, expected_BV, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert torch.equal(logits_BV.nan_to_num(7.0), before_BV.nan_to_num(7.0))
    tokens = [draw.randrange(vocabulary) for _ in range(8)]
    tokens[2], tokens[3] = -1, vocabulary - 1
    result_BX = torch.full((8, RESULT_COLUMNS), 99, dtype=torch.int64, device=DEVICE)
    result_BX[:, TOKEN] = torch.tensor(tokens, device=DEVICE)
    copies = [
        each and replace(each, marks_V=None if each.marks_V is None else each.marks_V.clone())
        for each in edits
    ]
    tell_tokens(logits_BV, buffers, result_BX)
    expected = tell_tokens_reference(logits_BV, copies, tokens)
    assert result_BX[:, TOKEN].tolist() == tokens
    assert (result_BX[:, 1:4] == 99).all(), "others write there"
    for row, (each, copied, token) in enumerate(zip(edits, copies, tokens, strict=True)):
        if each is not None and copied is not None and each.marks_V is not None:
            assert copied.marks_V is not None
            assert torch.equal(each.marks_V, copied.marks_V)
        if each is not None and each.told is not None and token >= 0:
            found = read_logprob(result_BX[row].cpu().numpy(), min(each.told, vocabulary))
            assert_alike(found, expected[row])
        else:
            assert expected[row] is None
            assert (result_BX[row, 4:] == 99).all(), "nothing is told"


def assert_alike(found: TokenLogprob, expected: TokenLogprob | None) -> None:
    assert found.token_id == expected.token_id
    assert found.logprob == pytest.approx(expected.logprob, abs=1e-5)
    assert [each for each, _ in found.alternatives] == [each for each, _ in expected.alternatives]
    values = [[value for _, value in each.alternatives] for each in (found, expected)]
    assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_marks_say_what_is_done_to_a_token() -> None:
    marks_V = torch.tensor([0, SAID, ENDS, 2 * COUNT, SAID | ENDS | COUNT], dtype=torch.int32, device=DEVICE)
    each = Edits(marks_V=marks_V, presence=0.5, frequency=0.25, repetition=2.0, banned=True)
    logits_BV = torch.tensor([[2.0, -2.0, 3.0, 4.0, 1.0]], device=DEVICE)
    expected = [2.0, -4.0, -torch.inf, 1.0, -torch.inf]
    assert edit_logits_reference(logits_BV, [each])[0].tolist() == expected
    assert edit_logits(logits_BV, filled([each], 5))[0].tolist() == expected


def test_equal_tokens_are_told_by_id_also_at_the_border_and_across_segments() -> None:
    logits_BV = torch.zeros(1, 5000, device=DEVICE)
    logits_BV[0, 4999] = 1.0
    (told,) = tell_tokens_reference(logits_BV, [Edits(told=4)], [7])
    assert [each for each, _ in told.alternatives] == [4999, 0, 1, 2]
    buffers, result_BX = (
        filled([Edits(told=4)], 5000),
        torch.zeros(1, RESULT_COLUMNS, dtype=torch.int64, device=DEVICE),
    )
    result_BX[0, TOKEN] = 7
    edit_logits(logits_BV, buffers)
    tell_tokens(logits_BV, buffers, result_BX)
    assert_alike(read_logprob(result_BX[0].cpu().numpy(), 4), told)


LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 1.0])


def ruled(answer: list[int], prompt: tuple[int, ...] = (), **options: Any) -> list[float]:
    rules = RuledLogits(Sampling(**options), prompt, end_ids=[5])
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
        SamplingParameters(**options)
    assert caught.value.metadata["field"] in options
