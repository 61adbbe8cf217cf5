"""What is done to a row's logits before its token is chosen, the eager reference of how it is done, and what is told.

In this order: the repetition penalty, the frequency and presence penalties, the biases, the ban of ends, the grammar.
Log probabilities are those of the model's exact output, before all of it and before temperature.

Shape legend: B rows, K some of them or alternatives, T positions, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.orders.events import TokenLogprob
from decode_engine.orders.fields import Sampling

_ROWS = 16  # whose probabilities are held at a time
_ID_BITS = 32
_LAST_ID = 2**31 - 1


def token_logprobs(logits_TV: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Of one token for each row of logits [T, V]; alternatives: how many are told, equal ones by id."""
    found: list[TokenLogprob] = []
    count = min(alternatives, logits_TV.shape[1])
    for first in range(0, len(tokens), _ROWS):
        chosen = list(tokens[first : first + _ROWS])
        some_TV = logits_TV[first : first + len(chosen)].float()
        logprobs_TV = torch.log_softmax(some_TV, dim=1)
        ids_T1 = torch.tensor(chosen, dtype=torch.int64, device=logits_TV.device)[:, None]
        told_TK = _likeliest(some_TV, count) if count else ids_T1[:, :0]
        for token, (logprob, *values), ids in zip(
            chosen,
            logprobs_TV.gather(1, torch.cat([ids_T1, told_TK], 1)).tolist(),
            told_TK.tolist(),
            strict=True,
        ):
            found.append(TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True))))
    return found


def _likeliest(logits_TV: Tensor, count: int) -> Tensor:
    """[T, K] ids of the largest float32 logits, the largest first; of equal ones the lower id."""
    bits_TV = torch.where(logits_TV == 0, 0.0, logits_TV).view(torch.int32)
    ordered_TV = bits_TV ^ ((bits_TV >> 31) & _LAST_ID)  # integers in the order of these numbers
    falling_V = _LAST_ID - torch.arange(logits_TV.shape[1], device=logits_TV.device)
    keys_TV = (ordered_TV.long() << _ID_BITS) + falling_V
    falling_TK: Tensor = keys_TV.topk(count, dim=1).values & (2**_ID_BITS - 1)
    return _LAST_ID - falling_TK


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


class RuledLogits:
    """The rules over one answer, and the tokens that it has so far.

    What they say of tokens lies on the device of the logits, made when it is needed there first: 4 bytes of marks and 4
    of biases for every token of the vocabulary. A choice on that device counts the token that it takes.
    """

    def __init__(self, rules: Sampling, prompt: Sequence[int], end_ids: Collection[int]) -> None:
        """end_ids: tokens that end the answer."""
        self._rules = rules
        self._end_ids = sorted(end_ids) if rules.min_tokens else []
        self._prompt = prompt if rules.repetition_penalty != 1.0 else ()
        self._counts = (
            bool(rules.presence_penalty or rules.frequency_penalty) or rules.repetition_penalty != 1.0
        )
        self._said: list[int] = []
        self._marks_V: Tensor | None = None
        self._marked = 0  # tokens that the marks count, or will once the device has chosen
        self._bias_V: Tensor | None = None

    def take(self, token: int) -> None:
        self._said.append(token)

    def edits(self, device: torch.device, vocabulary: int, ahead: int) -> Edits:
        """What is done to the logits of the next token. Raises IndexError for a token outside of the vocabulary.

        ahead: tokens before that one which were not taken. The choice has to count the token that it takes.
        """
        rules = self._rules
        if self._bias_V is None and rules.logit_bias:
            biases = np.zeros(vocabulary, dtype=np.float32)
            biases[[*rules.logit_bias]] = [*rules.logit_bias.values()]
            self._bias_V = _on_device(biases, device)
        return Edits(
            self._marks(device, vocabulary) if self._counts or self._end_ids else None,
            self._bias_V,
            presence=rules.presence_penalty,
            frequency=rules.frequency_penalty,
            repetition=rules.repetition_penalty,
            banned=len(self._said) + ahead < rules.min_tokens,
        )

    def _marks(self, device: torch.device, vocabulary: int) -> Tensor:
        late = self._said[self._marked :]
        if self._marks_V is None:
            marks = np.zeros(vocabulary, dtype=np.int32)
            marks[np.array(self._prompt, dtype=np.int64)] |= SAID
            marks[self._end_ids] |= ENDS
            np.add.at(marks, np.array(late, dtype=np.int64), COUNT)
            self._marks_V = _on_device(marks, device)
        elif late:
            ids = torch.tensor(late, dtype=torch.int64, device=device)
            self._marks_V.index_add_(0, ids, torch.full_like(ids, COUNT, dtype=torch.int32))
        self._marked = max(self._marked, len(self._said)) + 1
        return self._marks_V


def _on_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy there, which nobody waits for."""
    made = torch.from_numpy(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
