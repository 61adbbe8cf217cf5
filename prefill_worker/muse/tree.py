"""The causal triangle as a binary tree of blocks (MuSe section 6).

Diagonal blocks are attended exactly. Above them, at every level, pairs of neighbouring ranges of `size` tokens: queries
of the second attend to keys of the first. Sizes double from level to level, so that every query sees every earlier key
in exactly one range. At the end of the tokens a last pair may have fewer queries, never fewer keys.

Shape legend: B batch, H heads, R ranges (pairs of one level), T tokens, D dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of ranges of one size that follow each other from token `first` on, each with `queries` queries."""

    size: int
    first: int
    ranges: int
    queries: int

    def keys(self, x_BHTX: Tensor) -> Tensor:
        """View [B, H, R, size, ...] of what belongs to the keys of all pairs."""
        return self._ranges(x_BHTX, 0, self.size)

    def of_queries(self, x_BHTX: Tensor) -> Tensor:
        """View [B, H, R, queries, ...] of what belongs to the queries of all pairs."""
        return self._ranges(x_BHTX, self.size, self.queries)

    def _ranges(self, x_BHTX: Tensor, start: int, count: int) -> Tensor:
        if self.ranges == 1:
            first = self.first + start
            return x_BHTX[:, :, first : first + count].unsqueeze(2)
        end = self.first + self.ranges * 2 * self.size
        pairs = x_BHTX[:, :, self.first : end]
        split = pairs.view(*pairs.shape[:2], self.ranges, 2 * self.size, *pairs.shape[3:])
        return split[:, :, :, start : start + count]


def divide_triangle(count: int, block: int) -> Iterator[Pairs]:
    """All pairs below the diagonal blocks of `count` tokens, from the smallest to the largest."""
    size = block
    while size < count:
        whole, rest = divmod(count, 2 * size)
        if whole:
            yield Pairs(size, 0, whole, size)
        if rest > size:
            yield Pairs(size, whole * 2 * size, 1, rest - size)
        size *= 2


def earlier_ranges(block_number: int) -> list[tuple[int, int]]:
    """First block and number of blocks of the ranges that a block's queries attend to, from the farthest on.

    Together they are all blocks before it; the last one is new with this block, the others are older.
    """
    found, first = [], 0
    for level in reversed(range(block_number.bit_length())):
        if block_number >> level & 1:
            found.append((first, 1 << level))
            first += 1 << level
    return found
