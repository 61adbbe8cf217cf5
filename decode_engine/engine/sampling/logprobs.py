"""Log probabilities of tokens by a model's exact output: before temperature, penalties, biases and grammars.

Shape legend: T positions, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decode_engine.orders.events import TokenLogprob

_ROWS = 16  # whose probabilities are held at a time


def token_logprobs(logits_TV: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Of one token for each row of logits [T, V]; alternatives: how many are told, equal ones by id."""
    found: list[TokenLogprob] = []
    count = min(alternatives, logits_TV.shape[1])
    for first in range(0, len(tokens), _ROWS):
        chosen = list(tokens[first : first + _ROWS])
        logprobs_TV = torch.log_softmax(logits_TV[first : first + len(chosen)].float(), dim=1)
        ids_T = torch.tensor(chosen, dtype=torch.int64, device=logits_TV.device)
        own = logprobs_TV.gather(1, ids_T[:, None])[:, 0].tolist()
        likeliest = logprobs_TV.topk(count, dim=1)
        for token, logprob, ids, values in zip(
            chosen, own, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True
        ):
            others = sorted(zip(ids, values, strict=True), key=lambda other: (-other[1], other[0]))
            found.append(TokenLogprob(token, logprob, tuple(others)))
    return found
