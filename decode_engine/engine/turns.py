"""Whose turn it is between tenants: fair queueing over tokens of work, by weights."""

from __future__ import annotations

from collections.abc import Callable

_MOST_KNOWN = 4096
"""Tenants that are remembered; of more, those that were given most."""


class Turns:
    """What each tenant was given so far, over its weight: who was given least is first. Not thread-safe.

    Tokens are counted when they are known, a prompt's before it is read, an answer's as they come ("virtual token
    counter": Sheng et al., Fairness in Serving Large Language Models, section 4). Who begins to wait is lifted to where
    the one stood who was served last: time without requests saves nothing up. So of two tenants that always wait, and
    are served when it is their turn, neither gets more than the other, over their weights, by more than what one
    request is given at once and what those that run were given since.
    """

    def __init__(self, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        """weight: of a tenant, above 0."""
        self._weight = weight
        self._given: dict[str, float] = {}
        self._now = 0.0

    def given(self, tenant: str) -> float:
        return self._given.get(tenant, self._now)

    def join(self, tenant: str) -> None:
        """A tenant begins to wait for turns."""
        if len(self._given) >= _MOST_KNOWN:
            most_given = sorted(self._given, key=self.given)[_MOST_KNOWN // 2 :]
            self._given = {name: self._given[name] for name in most_given if self._given[name] > self._now}
        self._given[tenant] = max(self.given(tenant), self._now)

    def serve(self, tenant: str) -> None:
        self._now = max(self._now, self.given(tenant))

    def charge(self, tenant: str, tokens: float) -> None:
        """A tenant is given something, or gives it back (below 0)."""
        self._given[tenant] = self.given(tenant) + self.share(tenant, tokens)

    def share(self, tenant: str, tokens: float) -> float:
        return tokens / self._weight(tenant)

    def place(self, tenant: str) -> tuple[float, str]:
        """Tenants are served in the order of this."""
        return self.given(tenant), tenant
