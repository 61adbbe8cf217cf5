"""Edits of logits, and log probabilities, inside of captured steps.

Every row's edits stand in a table that the host writes for each step: numbers, and addresses of what the answer has on
the device. One launch before the choice reads the logits once and writes those to choose from; where log probabilities
are wanted it also finds the likeliest tokens of every segment. One after the choice adds the token to its answer's
counts, and joins what the segments found.

The likeliest are found by keys, integers in the order of logits and, among equal ones, of falling ids; so no two keys
are equal.

Shape legend: B rows, V vocabulary, W words of 32 tokens, S segments of the vocabulary, T likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampling.edits import COUNT, ENDS, SAID, Edits
from decode_engine.orders.events import TokenLogprob
from decode_engine.settings.request_bounds import MAX_TOP_LOGPROBS

MARKS, BIAS, BANNED, MASKED, TOLD, PRESENCE, FREQUENCY, REPETITION, TABLE_COLUMNS = range(9)
"""Of the table. TOLD: one more than how many likeliest tokens are told, 0 where no log probability is. The last three
are bits of float64."""

TOKEN, FIRST_LOGPROB = 0, 4
RESULT_COLUMNS = FIRST_LOGPROB + 1 + MAX_TOP_LOGPROBS
"""Of a step's results: the token, three others, the bits of its log probability, and the likeliest with theirs."""

_SEGMENT = 2048
_LOWEST = tl.constexpr(-(2**63))
_SAID, _ENDS, _COUNT = tl.constexpr(SAID), tl.constexpr(ENDS), tl.constexpr(COUNT)
_MARKS, _BIAS, _BANNED, _MASKED = (tl.constexpr(each) for each in (MARKS, BIAS, BANNED, MASKED))
_TOLD, _PRESENCE, _FREQUENCY = (tl.constexpr(each) for each in (TOLD, PRESENCE, FREQUENCY))
_REPETITION, _COLUMNS, _RESULTS = (tl.constexpr(each) for each in (REPETITION, TABLE_COLUMNS, RESULT_COLUMNS))
_FIRST_LOGPROB, _MOST_TOLD = tl.constexpr(FIRST_LOGPROB), tl.constexpr(MAX_TOP_LOGPROBS)
_HIGH, _SIGNLESS = tl.constexpr(2**32), tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True)
class EditBuffers:
    """What edits of a batch need on the device.

    table_BX: int64 [B, TABLE_COLUMNS], and mask_BW: int32, what the host writes. keys_BST, sums_BS2: of segments.
    """

    table_BX: Tensor
    mask_BW: Tensor
    keys_BST: Tensor
    sums_BS2: Tensor

    @classmethod
    def allocate(cls, rows: int, vocabulary: int, device: torch.device) -> EditBuffers:
        """For rows without edits. vocabulary: most tokens that logits have."""
        segments = triton.cdiv(vocabulary, _SEGMENT)
        return cls(
            torch.zeros(rows, TABLE_COLUMNS, dtype=torch.int64, device=device),
            torch.zeros(rows, triton.cdiv(vocabulary, 32), dtype=torch.int32, device=device),
            torch.zeros(rows, segments, MAX_TOP_LOGPROBS, dtype=torch.int64, device=device),
            torch.zeros(rows, segments, 2, dtype=torch.float32, device=device),
        )


def write_edits(edits: Edits, values_X: NDArray[np.int64]) -> None:
    """Writes a row of the table, in host memory; the mask is written apart."""
    values_X[MARKS] = 0 if edits.marks_V is None else edits.marks_V.data_ptr()
    values_X[BIAS] = 0 if edits.bias_V is None else edits.bias_V.data_ptr()
    values_X[BANNED] = edits.banned
    values_X[MASKED] = edits.allowed_W is not None
    values_X[TOLD] = 0 if edits.told is None else edits.told + 1
    values_X[PRESENCE:].view(np.float64)[:] = edits.presence, edits.frequency, edits.repetition


@triton.jit(do_not_specialize=["vocabulary", "words"])
def edit_kernel(
    logits_ptr: tl.tensor,
    table_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    edited_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    vocabulary: tl.tensor,
    words: tl.tensor,
    SEGMENT: tl.constexpr,
) -> None:
    """A program for each segment of each row."""
    segment, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row_ptr = table_ptr + b * _COLUMNS
    ids = segment * SEGMENT + tl.arange(0, SEGMENT)
    there = ids < vocabulary
    given = tl.load(logits_ptr + b * vocabulary + ids, mask=there, other=float("-inf")).to(tl.float32)
    edited = given
    marks, banned = tl.load(row_ptr + _MARKS), tl.load(row_ptr + _BANNED)
    mark = tl.zeros([SEGMENT], tl.int32)
    if marks != 0:
        mark = tl.load(marks.to(tl.pointer_type(tl.int32)) + ids, mask=there, other=0)
        count = mark // _COUNT
        repetition = tl.load(row_ptr + _REPETITION).to(tl.float64, bitcast=True).to(tl.float32)
        divided = tl.div_rn(edited, tl.zeros([SEGMENT], tl.float32) + repetition)
        came = ((mark & _SAID) != 0) | (count > 0)
        changed = tl.where(edited > 0, divided, edited * repetition)
        edited = tl.where(came, changed, edited)
        frequency = tl.load(row_ptr + _FREQUENCY).to(tl.float64, bitcast=True)
        presence = tl.load(row_ptr + _PRESENCE).to(tl.float64, bitcast=True)
        penalty = (count.to(tl.float64) * frequency + presence).to(tl.float32)
        edited = tl.where(count > 0, edited - penalty, edited)
    bias = tl.load(row_ptr + _BIAS)
    if bias != 0:
        edited += tl.load(bias.to(tl.pointer_type(tl.float32)) + ids, mask=there, other=0.0)
    edited = tl.where(((mark & _ENDS) != 0) & (banned != 0), float("-inf"), edited)
    if tl.load(row_ptr + _MASKED) != 0:
        word = tl.load(mask_ptr + b * words + ids // 32, mask=there, other=0)
        edited = tl.where(((word >> (ids % 32)) & 1) == 0, float("-inf"), edited)
    tl.store(edited_ptr + b * vocabulary + ids, edited, mask=there)
    told = tl.load(row_ptr + _TOLD)
    if told > 0:
        place = b * tl.num_programs(0) + segment
        most = tl.max(given, 0)
        weights = tl.where(given > float("-inf"), tl.exp(given - most), 0.0)
        tl.store(sums_ptr + place * 2, most)
        tl.store(sums_ptr + place * 2 + 1, tl.sum(weights, 0))
        bits = tl.where(given == 0.0, 0.0, given).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & _SIGNLESS)
        keys = ordered.to(tl.int64) * _HIGH + (_SIGNLESS - ids)
        keys = tl.where(there, keys, _LOWEST)
        for number in range(0, told - 1):
            best = tl.max(keys, 0)
            tl.store(keys_ptr + place * _MOST_TOLD + number, best)
            keys = tl.where(keys == best, _LOWEST, keys)


@triton.jit(do_not_specialize=["vocabulary", "segments"])
def tell_kernel(
    logits_ptr: tl.tensor,
    table_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    result_ptr: tl.tensor,
    vocabulary: tl.tensor,
    segments: tl.tensor,
    SEGMENTS_TILE: tl.constexpr,
    KEYS_TILE: tl.constexpr,
) -> None:
    """A program for each row, behind the choice."""
    b = tl.program_id(0).to(tl.int64)
    row_ptr, result_ptr = table_ptr + b * _COLUMNS, result_ptr + b * _RESULTS
    token = tl.load(result_ptr)
    marks = tl.load(row_ptr + _MARKS)
    if (marks != 0) & (token >= 0):
        mark_ptr = marks.to(tl.pointer_type(tl.int32)) + token
        tl.store(mark_ptr, tl.load(mark_ptr) + _COUNT)
    told = tl.load(row_ptr + _TOLD)
    if (told > 0) & (token >= 0):
        s = tl.arange(0, SEGMENTS_TILE)
        sums_ptr += b * segments * 2
        most_s = tl.load(sums_ptr + s * 2, mask=s < segments, other=float("-inf"))
        sums_s = tl.load(sums_ptr + s * 2 + 1, mask=s < segments, other=0.0)
        most = tl.max(most_s, 0)
        scale = tl.log(tl.sum(sums_s * tl.exp(most_s - most), 0))
        own = tl.load(logits_ptr + b * vocabulary + token).to(tl.float32) - most - scale
        tl.store(result_ptr + _FIRST_LOGPROB, own.to(tl.int32, bitcast=True).to(tl.int64))
        at = tl.arange(0, KEYS_TILE)
        found = (at < segments * _MOST_TOLD) & (at % _MOST_TOLD < told - 1)
        keys = tl.load(keys_ptr + b * segments * _MOST_TOLD + at, mask=found, other=_LOWEST)
        for number in range(0, told - 1):
            best = tl.max(keys, 0)
            keys = tl.where(keys == best, _LOWEST, keys)
            ordered = (best >> 32).to(tl.int32)
            value = (ordered ^ ((ordered >> 31) & _SIGNLESS)).to(tl.float32, bitcast=True) - most - scale
            token_id = _SIGNLESS - (best - ordered.to(tl.int64) * _HIGH)
            bits = value.to(tl.int32, bitcast=True).to(tl.int64)
            tl.store(result_ptr + _FIRST_LOGPROB + 1 + number, token_id * _HIGH + bits)


def edit_logits(logits_BV: Tensor, buffers: EditBuffers) -> Tensor:
    """Logits [B, V] to choose from, float32, by the table; also finds the likeliest tokens of segments.

    logits_BV: contiguous, of no more tokens than the buffers are for.
    """
    rows, vocabulary = logits_BV.shape
    edited_BV = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits_BV.device)
    edit_kernel[(buffers.keys_BST.shape[1], rows)](
        logits_BV,
        buffers.table_BX,
        buffers.mask_BW,
        edited_BV,
        buffers.keys_BST,
        buffers.sums_BS2,
        vocabulary,
        buffers.mask_BW.shape[1],
        SEGMENT=_SEGMENT,
        num_warps=4,
    )
    return edited_BV


def tell_tokens(logits_BV: Tensor, buffers: EditBuffers, result_BX: Tensor) -> None:
    """Behind `edit_logits` and the choice, what becomes of the tokens [:, TOKEN] of the results.

    They are counted where there are marks, and log probabilities stand beside them where these are wanted. -1 is no
    token: nothing is done for its row.
    """
    rows, segments = buffers.keys_BST.shape[:2]
    tell_kernel[(rows,)](
        logits_BV,
        buffers.table_BX,
        buffers.keys_BST,
        buffers.sums_BS2,
        result_BX,
        logits_BV.shape[1],
        segments,
        SEGMENTS_TILE=triton.next_power_of_2(segments),
        KEYS_TILE=triton.next_power_of_2(segments * MAX_TOP_LOGPROBS),
        num_warps=4,
    )


def read_logprob(result_X: NDArray[np.int64], told: int) -> TokenLogprob:
    """What `tell_tokens` wrote into a row of results. told: how many likeliest tokens, no more than there are."""
    written = result_X[FIRST_LOGPROB : FIRST_LOGPROB + 1 + told]
    bits = written.astype(np.int32)  # the low half
    values, ids = bits.view(np.float32).tolist(), ((written[1:] - bits[1:]) >> 32).tolist()
    return TokenLogprob(int(result_X[TOKEN]), values[0], tuple(zip(ids, values[1:], strict=True)))
