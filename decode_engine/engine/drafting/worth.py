"""How many tokens are worth drafting: by how often drafts were right, and what they cost, both as seen so far.

A step takes one unit of time. Each token that it verifies adds `row` to it, each that a method drafts `step`. A draft
of k tokens, each right with chance c if those before it were, brings 1 + c + ... + c^k tokens.

Drafts by a method cost steps of their own, so how they fare is learnt by all sessions of a batch together, and what
they lose comes from an allowance: over an engine's n steps they lose, on balance, the time of no more than 3/4 + n/100
steps and of the last draft.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MOST = 15
"""Tokens of a draft: with the last one they are 16 rows, and far less than any method's recent window."""

USUAL_ROW = 0.1
_WEIGHT = 1 / 8
_LEARNING = 0.1
_KNOWN = 10  # tokens that a chance stands for whose source is known
_LONGEST_WAIT = 256
_SHORTEST_S = 1e-9
_BY_METHOD = 0.9
_LONGEST_WAIT_OF_METHOD = 16  # an allowance says how often it is tried, and next answers may be others
_GIVEN, _EACH_STEP, _MOST_WON, _MOST_OWED = 0.75, 0.01, 4.0, 3.0  # steps


def _blend(before: float | None, now: float) -> float:
    return now if before is None else before + (now - before) * _WEIGHT


class Source:
    """Where drafts come from, and how they have fared. chance: that a token is right if those before it were."""

    def __init__(self, chance: float, known: int = _KNOWN, longest_wait: int = _LONGEST_WAIT) -> None:
        """known: tokens that `chance` stands for. longest_wait: see `note`."""
        self.chance = chance
        self._known, self._longest_wait = known, longest_wait
        self._wait = self._left = 4  # steps without a draft until one is tried that seems to lose

    def note(self, drafted: int, accepted: int) -> None:
        """So many tokens of a draft were right. Where none was, twice as many steps go by until the next one."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._known += 1
            self.chance += (right - self.chance) * max(_LEARNING, 1 / self._known)
        self._wait = 4 if accepted else min(2 * self._wait, self._longest_wait)
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


class Allowance:
    """Steps' time that drafts by methods may lose: some is given, a little with each step, and what they win."""

    def __init__(self) -> None:
        self._steps = _GIVEN

    def pays(self, cost: float) -> int:
        """How many tokens at so many steps each; one where all is there that is given, whatever it costs."""
        return max(int(self._steps // max(cost, _SHORTEST_S)), int(self._steps >= _GIVEN))

    def note(self, won: float) -> None:
        """A step was taken, by whose drafts so many were won, or lost below 0."""
        given = max(0.0, min(_EACH_STEP, _GIVEN - self._steps))
        self._steps = max(-_MOST_OWED, min(_MOST_WON, self._steps + given + won))


def _by_method() -> Source:
    return Source(_BY_METHOD, 1, _LONGEST_WAIT_OF_METHOD)


@dataclass(slots=True)
class Costs:
    """Of steps of batches like one, None before they were seen. plain_s: seconds of a step without drafts. row, step:
    see the module. method: drafts by methods."""

    plain_s: float | None = None
    row: float | None = None
    step: float | None = None
    method: Source = field(default_factory=_by_method, compare=False)

    def note_step(self, seconds: float, drafted: int) -> None:
        """A step took so long that verified so many drafted tokens of all sessions."""
        if not drafted:
            self.plain_s = _blend(self.plain_s, seconds)
        elif self.plain_s is not None:
            self.row = _blend(self.row, max(0.0, seconds / max(self.plain_s, _SHORTEST_S) - 1) / drafted)

    def worth_by_method(self, most: int, others: int, allowance: Allowance) -> tuple[int, float]:
        """See `Source.worth`: how many tokens each session drafts by a method. To be asked once a step."""
        if self.plain_s is None:
            return 0, 1.0
        if self.step is None:  # it is seen by trying
            cost, most, spent = USUAL_ROW, min(most, 1), _GIVEN
        else:
            cost = self.step + (USUAL_ROW if self.row is None else self.row)
            spent = cost * (others + 1)
        return self.method.worth(cost, min(most, allowance.pays(spent)), others)

    def note_drafting(self, seconds: float, tokens: int) -> None:
        """So many tokens, all of them, were drafted by methods."""
        if self.plain_s is not None:
            step = seconds / max(self.plain_s, _SHORTEST_S) / tokens
            self.step = min(step, _blend(self.step, step))  # the first one may be slower by far
