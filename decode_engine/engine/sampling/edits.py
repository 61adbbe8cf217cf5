"""What is done to a row's logits before its token is chosen, and the eager reference of how it is done.

In this order: the repetition penalty, the frequency and presence penalties, the biases, the ban of ends, the grammar.

Shape legend: B rows, K some of them, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampling.logprobs import token_logprobs
from decode_engine.orders.events import TokenLogprob

SAID, ENDS, COUNT = 1, 2, 4
"""What a mark says of a token, added up: it stands in the prompt, it ends the answer, and how often it was answered."""


@dataclass(frozen=True, slots=True)
class Edits:
    """Of one row at one step; None and the defaults change nothing.

    marks_V: int32, see `COUNT`. bias_V: float32, is added. Both on the device of the logits, and of this answer alone.
    allowed_W: int32 on the host, a bit for each token that may come. banned: ends may not come. told: how many
    likeliest tokens are told by the model's own logits, beside the chosen one's log probability.
    """

    marks_V: Tensor | None = None
    bias_V: Tensor | None = None
    allowed_W: NDArray[np.int32] | None = None
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    banned: bool = False
    told: int | None = None


def edit_logits_reference(logits_BV: Tensor, edits: Sequence[Edits | None]) -> Tensor:
    """Logits [B, V] to choose from, float32, in a tensor of their own; rows without edits as they are."""
    edited_BV = logits_BV.float().clone()
    device, vocabulary = logits_BV.device, logits_BV.shape[1]
    marked = [
        (row, each, each.marks_V) for row, each in enumerate(edits) if each and each.marks_V is not None
    ]
    biased = [(row, each.bias_V) for row, each in enumerate(edits) if each and each.bias_V is not None]
    masked = [(row, each.allowed_W) for row, each in enumerate(edits) if each and each.allowed_W is not None]
    marks_KV = torch.stack([marks_V[:vocabulary] for *_, marks_V in marked]) if marked else None
    if marks_KV is not None:
        rows = [row for row, *_ in marked]
        edited_BV[rows] = _penalised(edited_BV[rows], marks_KV, [each for _, each, _ in marked])
    if biased:
        edited_BV[[row for row, _ in biased]] += torch.stack([bias_V[:vocabulary] for _, bias_V in biased])
    if marks_KV is not None:
        for number, (row, each, _) in enumerate(marked):
            if each.banned:
                edited_BV[row].masked_fill_((marks_KV[number] & ENDS) != 0, -torch.inf)
    for row, allowed_W in masked:
        bits_V = np.unpackbits(allowed_W.view(np.uint8), bitorder="little")[:vocabulary]
        edited_BV[row].masked_fill_(torch.from_numpy(bits_V == 0).to(device), -torch.inf)
    return edited_BV


def tell_tokens_reference(
    logits_BV: Tensor, edits: Sequence[Edits | None], tokens: Sequence[int]
) -> list[TokenLogprob | None]:
    """Behind the choice: adds tokens to marks, and returns log probabilities where these are wanted. -1 is no token."""
    for each, token in zip(edits, tokens, strict=True):
        if each is not None and each.marks_V is not None and token >= 0:
            each.marks_V[token] += COUNT
    told = [
        (row, each.told)
        for row, (each, token) in enumerate(zip(edits, tokens, strict=True))
        if each is not None and each.told is not None and token >= 0
    ]
    logprobs: list[TokenLogprob | None] = [None] * len(edits)
    if told:
        rows = [row for row, _ in told]
        most = max(count for _, count in told)
        found = token_logprobs(logits_BV[rows], [tokens[row] for row in rows], most)
        for (row, count), each_found in zip(told, found, strict=True):
            logprobs[row] = TokenLogprob(
                each_found.token_id, each_found.logprob, each_found.alternatives[:count]
            )
    return logprobs


def _penalised(logits_KV: Tensor, marks_KV: Tensor, edits: Sequence[Edits]) -> Tensor:
    """After all penalties."""
    device, count_KV = logits_KV.device, marks_KV // COUNT
    if any(each.repetition != 1.0 for each in edits):
        repetition_K1 = torch.tensor(
            [[each.repetition] for each in edits], dtype=torch.float32, device=device
        )
        changed_KV = torch.where(logits_KV > 0, logits_KV / repetition_K1, logits_KV * repetition_K1)
        came_KV = ((marks_KV & SAID) != 0) | (count_KV > 0)
        logits_KV = torch.where(came_KV, changed_KV, logits_KV)
    if any(each.frequency or each.presence for each in edits):
        both = [(each.frequency, each.presence) for each in edits]
        frequency_K1, presence_K1 = torch.tensor(both, dtype=torch.float64, device=device)[:, :, None].unbind(
            1
        )
        penalty_KV = (count_KV * frequency_K1 + presence_K1).float()
        logits_KV = torch.where(count_KV > 0, logits_KV - penalty_KV, logits_KV)
    return logits_KV
