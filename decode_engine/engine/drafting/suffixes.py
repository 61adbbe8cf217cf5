"""What followed the last tokens where they stood before: in a context, or in what a session has said since.

Shape legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

REACH = 16
"""Tokens that are compared at most: a power of two."""

_LEAST = 2  # tokens that must stand there, too


class Match(NamedTuple):
    """So many tokens stand there as well (0: nowhere), and what follows them."""

    length: int
    following: Sequence[int]


NOWHERE = Match(0, ())


class ContextSuffixes:
    """A context's positions in the order of what stands before them. Immutable; 12 bytes a token."""

    def __init__(self, tokens: NDArray[np.int64]) -> None:
        self._text = tokens.astype(np.int64).data
        self._order = _order(tokens).data

    def find(self, last: Sequence[int], most: int) -> Match:
        """Where the most of these tokens, up to the last one, stand; at most so many tokens that follow."""
        wanted = last[: -REACH - 1 : -1]
        low, high = 0, len(self._order)
        while low < high:
            middle = (low + high) // 2
            if self._precedes(self._order[middle], wanted):
                low = middle + 1
            else:
                high = middle
        near = [self._order[place] for place in (low - 1, low) if 0 <= place < len(self._order)]
        length, end = max(((_alike(self._text, end, wanted), end) for end in near), default=(0, 0))
        if length < _LEAST:
            return NOWHERE
        return Match(length, self._text[end + 1 : end + 1 + most].tolist())

    def _precedes(self, end: int, wanted: Sequence[int]) -> bool:
        for back, token in enumerate(wanted):
            if end < back:
                return True
            other = self._text[end - back]
            if other != token:
                return bool(other < token)
        return False


class OwnText:
    """What a session was told and said, and where its last two tokens stood before."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, int], int] = {}
        self._before: int | None = None
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        self.tokens.append(token)
        if len(self.tokens) >= _LEAST:
            pair, end = (self.tokens[-2], token), len(self.tokens) - 1
            self._before = self._ends.get(pair)
            self._ends[pair] = end

    def find(self, most: int) -> Match:
        """Where its last tokens stood the last time; at most so many tokens that follow."""
        if self._before is None:
            return NOWHERE
        length = _alike(self.tokens, self._before, self.tokens[: -REACH - 1 : -1])
        return Match(length, self.tokens[self._before + 1 : self._before + 1 + most])


def _alike(text: Sequence[int] | memoryview[Any], end: int, wanted: Sequence[int]) -> int:
    """How many tokens up to `end` are these, the last one first."""
    length = 0
    while length < len(wanted) and length <= end and text[end - length] == wanted[length]:
        length += 1
    return length


def _order(tokens_N: NDArray[np.int64]) -> NDArray[np.int32]:
    """[N] positions by the REACH tokens up to them, the last one first: by ranks of twice as many tokens each time."""
    ranks = _ranks(tokens_N)
    reach = 1
    while reach < min(REACH, len(tokens_N)):
        before = np.zeros_like(ranks)
        before[reach:] = ranks[:-reach]
        ranks = _ranks(ranks * (len(tokens_N) + 1) + before)
        reach *= 2
    return np.argsort(ranks, kind="stable").astype(np.int32)


def _ranks(numbers_N: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(numbers_N, return_inverse=True)[1].astype(np.int64) + 1
