"""Drafts: tokens that may follow, from texts read so far or by a method, and how many of them are worth a step.

What followed the last tokens where they stood before, in a context or in what a session has said since, is a draft; so
is what a method proposes.

How many are worth drafting follows from how often drafts were right, and what they cost, both as seen so far. A step
takes one unit of time. Each token that it verifies adds `row` to it, each that a method drafts `step`. A draft of k
tokens, each right with chance c if those before it were, brings 1 + c + ... + c^k tokens. Drafts by a method cost steps
of their own, so how they fare is learnt by all sessions of a batch together, and what they lose comes from an
allowance: over an engine's n steps they lose, on balance, the time of no more than 3/4 + n/100 steps and of the last
draft.

Shape legend: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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


@dataclass(slots=True)
class Costs:
    """Of steps of batches like one, None before they were seen. plain_s: seconds of a step without drafts. row, step:
    see the module. method: drafts by methods."""

    plain_s: float | None = None
    row: float | None = None
    step: float | None = None
    method: Source = field(
        default_factory=partial(Source, _BY_METHOD, 1, _LONGEST_WAIT_OF_METHOD), compare=False
    )

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


_CHANCES = (0.0, 0.3, 0.5, 0.75, 0.95)
"""Of what followed 2, 4, 8 and 16 tokens the last time, before anything is known."""

_LOOKS = 64
"""Steps with drafts after which one goes without, to see how long that takes now."""

_RECENT = 8  # steps since a draft was right, in which another one is likely


class Plan(NamedTuple):
    """What is drafted for a step. tokens: that are known. by_method: how many are to be drafted by the method."""

    tokens: Sequence[int] = ()
    by_method: int = 0


class Drafter:
    """Drafts of one answer."""

    def __init__(
        self,
        context: ContextSuffixes | None,
        said: Sequence[int],
        *,
        by_method: bool = False,
        timed: bool = True,
    ) -> None:
        """context: None where there is no text of it. said: tokens that the session was told behind it. by_method:
        whether a method may draft. timed: whether times may say so, and how much; otherwise that follows from the
        tokens alone.
        """
        self._context = context
        self._timed = timed
        self._own = OwnText(said)
        self._copies = [Source(chance) for chance in _CHANCES]
        self.by_method = by_method and timed
        self._used: Source | None = None
        self._with = self._since = 0

    def take(self, token: int) -> None:
        self._own.add(token)

    @property
    def waits(self) -> bool:
        """Whether the next step has to know the token before, as a draft may follow it."""
        return not self._timed or self._since < _RECENT or self._since % (2 * _RECENT) == 0

    def plan(self, most: int, costs: Costs, others: int, worth: tuple[int, float] = (0, 1.0)) -> Plan:
        """What to draft behind the last token, at most so many tokens, in a step with so many other sessions.

        worth: of drafts by a method, see `Costs.worth_by_method`.
        """
        self._used = None
        most = min(most, MOST)
        if most < 1 or (self._timed and (costs.plain_s is None or self._with >= _LOOKS)):
            self._with = 0
            return Plan()
        if not self._timed:
            costs, others = Costs(), 0
        match = self._own.find(most)
        if self._context is not None:
            match = max(match, self._context.find(self._own.tokens, most), key=lambda each: each.length)
        copies = self._copies[match.length.bit_length() - 1] if match.length else None
        count, factor, row = 0, 1.0, USUAL_ROW if costs.row is None else costs.row
        if copies is not None:
            count, factor = copies.worth(row, len(match.following), others)
            self._used = copies if count else None
        plan = Plan(match.following[:count])
        count, gain = min(worth[0], most), worth[1]
        if self.by_method and count and (gain > factor or not plan.tokens):
            self._used, plan = costs.method, Plan(by_method=count)
        return plan

    def note(self, drafted: int, accepted: int) -> None:
        """A step was taken, in which so many drafted tokens were right."""
        self._since = 0 if accepted else self._since + 1
        if self._used is not None and drafted:
            self._with += 1
            self._used.note(drafted, accepted)
