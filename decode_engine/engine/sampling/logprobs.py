"""Log probabilities of tokens by a model's exact output: before temperature, penalties, biases and grammars.

Shape legend: T positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_engine.orders.events import TokenLogprob

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
