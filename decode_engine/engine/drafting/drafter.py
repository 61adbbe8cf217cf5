"""What one answer drafts: from the texts that its session knows, or by the method that it drafts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from decode_engine.engine.drafting.suffixes import ContextSuffixes, OwnText
from decode_engine.engine.drafting.worth import MOST, USUAL_ROW, Costs, Source

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
        """The answer goes on with this token."""
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
