"""What tenants used, held against their quotas: one account for each, in the engine's process, for all doors.

Rates are token buckets: a minute's allowance, which comes back evenly. What a prompt will take is spent when its
request is let in, and what of it was not read is given back; what is generated is spent as it comes. So nothing is
broken off: a tenant may owe, and its next request has to wait until that has come back. A prompt longer than a minute's
allowance is let in when all of that is there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Lock

from decode_engine.engine.job import Use
from index_store.cli.quotas import LIMITS, Quota, QuotaFile, per_minute
from index_store.errors import QuotaExceededError
from sparsekv.v1.values import TenantLimit, TenantUse

OTHERS = "other"
"""In metrics, all tenants without a table of their own."""
_MOST_IDLE = 4096
_MINUTE_S = 60.0
_SOON_S = 1.0


@dataclass(slots=True)
class Bucket:
    """One minute's allowance. spent: of it, and not come back yet. at_s: as of when."""

    spent: float = 0.0
    at_s: float = 0.0

    def spent_at(self, now_s: float, allowed: int) -> float:
        back = (now_s - self.at_s) * allowed / _MINUTE_S
        self.spent, self.at_s = max(0.0, self.spent - back) if self.spent > 0 else self.spent, now_s
        return self.spent


@dataclass(slots=True)
class Account:
    """A tenant's. sessions: answers that wait or run. counts: since the start, of what `TenantUse` has."""

    sessions: int = 0
    buckets: dict[str, Bucket] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class Tenants:
    """All accounts. Thread-safe. Those of tenants that have no table in the file are forgotten some time after."""

    def __init__(
        self, quotas: QuotaFile | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.quotas = quotas or QuotaFile()
        self._clock_s = clock_s
        self._accounts: dict[str, Account] = {}
        self._others: Counter[str] = Counter()  # of accounts that were forgotten
        self._lock = Lock()

    def weight(self, tenant: str) -> float:
        return self.quotas.known.of(tenant).weight

    def admit(self, tenant: str, sessions: int, prompt: int) -> RequestUse:
        """Lets a request in. sessions: for its answers. prompt: tokens that it has read.

        Raises QuotaExceededError, with when to come back, where its tenant has used up what it may.
        """
        quota = self.quotas.now.of(tenant)
        wanted = {
            "sessions": sessions,
            "requests_per_minute": 1,
            "prompt_tokens_per_minute": prompt,
            "generated_tokens_per_minute": 1,
        }
        with self._lock:
            account = self._account(tenant)
            self._enter(account, quota, wanted)
            account.sessions += sessions
        return RequestUse(self, tenant, sessions, prompt)

    def allow(self, tenant: str, tokens: int) -> None:
        """Lets a context be made: a request, and so many tokens to read. Raises QuotaExceededError."""
        quota, wanted = (
            self.quotas.now.of(tenant),
            {"requests_per_minute": 1, "prompt_tokens_per_minute": tokens},
        )
        with self._lock:
            self._enter(self._account(tenant), quota, wanted)

    def note(self, tenant: str, quota_of: str, count: int, spent: bool = True) -> None:
        """Tokens were read or generated. spent: now, and not before. count: below 0 where they were given back."""
        with self._lock:
            account = self._account(tenant)
            if spent:
                self._spend(account, self.quotas.known.of(tenant), f"{quota_of}_per_minute", count)
            if count > 0:
                account.counts[quota_of] += count

    def leave(self, tenant: str, sessions: int) -> None:
        with self._lock:
            self._account(tenant).sessions -= sessions

    def use(self, held: Mapping[str, Mapping[str, int]]) -> list[TenantUse]:
        """What tenants use of what they may, by name: all that have a table, or did anything lately.

        held: of limits that are counted elsewhere, by name, what each tenant has.
        """
        quotas, now_s = self.quotas.now, self._clock_s()
        with self._lock:
            names = {*quotas.tenants, *self._accounts, *(name for each in held.values() for name in each)}
            return [self._use(name, quotas.of(name), held, now_s) for name in sorted(names)]

    def totals(self) -> dict[str, Counter[str]]:
        """Counts since the start of tenants that have a table, and of all others together."""
        named = self.quotas.known.tenants
        with self._lock:
            totals = {name: Counter[str]() for name in named}
            totals[OTHERS] = Counter(self._others)
            for name, account in self._accounts.items():
                totals[name if name in named else OTHERS].update(account.counts)
        return totals

    def _use(self, name: str, quota: Quota, held: Mapping[str, Mapping[str, int]], now_s: float) -> TenantUse:
        account = self._accounts.get(name, Account())
        used = []
        for limit in LIMITS:
            allowed = quota.limits.get(limit)
            if limit in held:
                count = held[limit].get(name, 0)
            elif not per_minute(limit):
                count = account.sessions
            elif allowed is None or limit not in account.buckets:
                count = 0
            else:
                count = round(account.buckets[limit].spent_at(now_s, allowed))
            used.append(TenantLimit(limit, count, allowed))
        counts = account.counts
        return TenantUse(
            name,
            quota.weight,
            tuple(used),
            counts["requests"],
            counts["prompt_tokens"],
            counts["generated_tokens"],
            counts["refused"],
        )

    def _enter(self, account: Account, quota: Quota, wanted: Mapping[str, int]) -> None:
        """Spends what is wanted, but for what is spent later, where all of it is there."""
        over = [self._over(account, name, quota, count) for name, count in wanted.items()]
        errors = [error for error in over if error is not None]
        if errors:
            account.counts["refused"] += 1
            raise max(errors, key=lambda error: error.retry_after_s or 0.0)
        account.counts["requests"] += 1
        for name in ("requests_per_minute", "prompt_tokens_per_minute"):
            self._spend(account, quota, name, wanted[name])

    def _over(self, account: Account, name: str, quota: Quota, count: int) -> QuotaExceededError | None:
        """Why so much more is too much; None where it is not."""
        allowed = quota.limits.get(name)
        if allowed is None or not count:
            return None
        if not per_minute(name):
            if account.sessions + count <= allowed:
                return None
            return QuotaExceededError.of(
                name, account.sessions, count, allowed, _SOON_S if count <= allowed else None
            )
        bucket = account.buckets.get(name)
        spent = 0.0 if bucket is None else bucket.spent_at(self._clock_s(), allowed)
        too_much = spent + min(count, allowed) - allowed
        if too_much <= 0:
            return None
        return QuotaExceededError.of(name, round(spent), count, allowed, too_much * _MINUTE_S / allowed)

    def _spend(self, account: Account, quota: Quota, name: str, count: int) -> None:
        allowed = quota.limits.get(name)
        if allowed is None:
            account.buckets.pop(name, None)
            return
        now_s = self._clock_s()
        bucket = account.buckets.setdefault(name, Bucket(0.0, now_s))
        bucket.spent = max(0.0, bucket.spent_at(now_s, allowed) + count)

    def _account(self, tenant: str) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= _MOST_IDLE:
                self._forget()
            account = self._accounts[tenant] = Account()
        return account

    def _forget(self) -> None:
        """Forgets accounts of tenants without a table that hold nothing and owe nothing."""
        quotas, now_s = self.quotas.known, self._clock_s()
        for name, account in list(self._accounts.items()):
            limits = quotas.of(name).limits
            owes = any(
                bucket.spent_at(now_s, limits[limit]) > 0
                for limit, bucket in account.buckets.items()
                if limit in limits
            )
            if name not in quotas.tenants and not account.sessions and not owes:
                self._others.update(account.counts)
                del self._accounts[name]


class RequestUse(Use):
    """What one request uses. Its methods are for any thread; `close` may be called again."""

    def __init__(self, tenants: Tenants, tenant: str, sessions: int, prompt: int) -> None:
        self._tenants, self._tenant, self._sessions, self._unread = tenants, tenant, sessions, prompt
        self._closing = Lock()

    def read(self, tokens: int) -> None:
        self._unread -= tokens
        self._tenants.note(self._tenant, "prompt_tokens", tokens, spent=False)

    def generated(self, tokens: int) -> None:
        self._tenants.note(self._tenant, "generated_tokens", tokens)

    def close(self) -> None:
        with self._closing:
            sessions, self._sessions = self._sessions, 0
        if sessions:
            self._tenants.leave(self._tenant, sessions)
            if self._unread > 0:
                self._tenants.note(self._tenant, "prompt_tokens", -self._unread)
