"""How many tokens are worth drafting: by how often drafts were right, and what they cost, both as seen so far.

A step takes one unit of time. Each token that it verifies adds `row` to it, each that a method drafts `step`. A draft
of k tokens, each right with chance c if those before it were, brings 1 + c + ... + c^k tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST = 15
"""Tokens of a draft: with the last one they are 16 rows, and far less than any method's recent window."""

USUAL_ROW = 0.1
_WEIGHT = 1 / 8
_LEARNING = 0.1
_LONGEST_WAIT = 256
_SHORTEST_S = 1e-9


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + (now - before) * _WEIGHT


@dataclass(slots=True)
class Costs:
    """Of steps of batches like one, None before they were seen. plain_s: seconds of a step without drafts. row, step:
    see the module."""

    plain_s: float | None = None
    row: float | None = None
    step: float | None = None

    def note_step(self, seconds: float, drafted: int) -> None:
        """A step took so long that verified so many drafted tokens of all sessions."""
        if not drafted:
            self.plain_s = _blend(self.plain_s, seconds)
        elif self.plain_s is not None:
            self.row = _blend(self.row, max(0.0, seconds / max(self.plain_s, _SHORTEST_S) - 1) / drafted)

    def note_drafting(self, seconds: float, tokens: int) -> None:
        """So many tokens, all of them, were drafted by methods."""
        if self.plain_s is not None:
            self.step = _blend(self.step, seconds / max(self.plain_s, _SHORTEST_S) / tokens)


class Source:
    """Where drafts come from, and how they have fared. chance: that a token is right if those before it were."""

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self._wait = self._left = 4  # steps without a draft until one is tried that seems to lose

    def note(self, drafted: int, accepted: int) -> None:
        """So many tokens of a draft were right."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self.chance += (right - self.chance) * _LEARNING
        self._wait = 4 if accepted else min(2 * self._wait, _LONGEST_WAIT)
        self._left = self._wait

    def worth(self, cost: float, most: int, others: int) -> tuple[int, float]:
        """How many tokens to draft, up to `most`, and by what factor that is faster than a step without.

        cost: of each. others: sessions in the step. None is worth it at a factor of 1; now and then one is tried.
        """
        best, factor, tokens, likely = 0, 1.0, 1.0, 1.0
        for count in range(1, most + 1):
            likely *= self.chance
            tokens += likely
            gain = (others + tokens) / (others + 1) / (1 + count * cost)
            if gain > factor:
                best, factor = count, gain
        if best or not most:
            return best, factor
        self._left -= 1
        return int(self._left <= 0), factor
