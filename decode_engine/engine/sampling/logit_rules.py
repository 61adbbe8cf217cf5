"""Logits changed before a token is chosen: penalties for tokens that came before, biases, and ends that come too early.

Shape legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decode_engine.engine.sampling.edits import COUNT, ENDS, SAID, Edits
from decode_engine.orders.fields import Sampling


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
        """The answer goes on with this token."""
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
