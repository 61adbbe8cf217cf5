"""What a plan is about: a fleet of replicas, the contexts that it serves, and how often each is asked about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TIERS = ("device", "host", "disk", "objects")
HEAD = 100
"""Contexts that no sample leaves out: so popular that each weighs, and so few that together they take no room."""


@dataclass(frozen=True)
class Fleet:
    """Replicas that are alike, each with one card. Sizes in bytes, times in seconds, rates a second and replica.

    A step of n sessions on contexts of t tokens takes step_s + n * t * token_s. sessions: at once. device, host, disk:
    memory for contexts. *_rate: bytes that come from there. prompt_s: of reading a question. answer: tokens, mean of an
    exponential distribution. bound: of a replica's part of all requests. lifetime_s: mean time between two failures of
    a replica, away_s: until it is back, with what its disk holds. remembered_s: how long a context keeps its holders.
    """

    replicas: int = 1000
    sessions: int = 64
    device: float = 124e9
    host: float = 256e9
    disk: float = 2e12
    host_rate: float = 9.3e9
    disk_rate: float = 1.5e9
    objects_rate: float = 1e9
    step_s: float = 5.4e-3
    token_s: float = 1.23e-8
    prompt_s: float = 0.06
    answer: float = 32.0
    bound: float = 1.25
    remembered_s: float = 30.0
    lifetime_s: float = 7 * 86_400.0
    away_s: float = 40.0


@dataclass(frozen=True)
class Load:
    """Requests a second, contexts, and the exponent of Zipf's law by which they are asked about. tokens: mean of a
    context, log-normal with this sigma. bytes_per_token: of its keys, values and indexes.
    """

    rate: float = 1e5
    contexts: int = 1_000_000
    zipf: float = 1.0
    tokens: float = 4096.0
    sigma: float = 0.8
    bytes_per_token: float = 67_600.0


@dataclass(frozen=True)
class Sample:
    """Contexts of a part of a fleet: rates_C a second of requests, tokens_C, bytes_C."""

    rates_C: NDArray[Any]
    tokens_C: NDArray[Any]
    bytes_C: NDArray[Any]


def sample(load: Load, part: int, random: np.random.Generator) -> Sample:
    """The contexts of a `part`-th of a fleet, with a `part`-th of all requests.

    The `HEAD` most popular contexts are all there, each with its `part`-th of requests: they have holders all over the
    fleet. Of the rest, ordered by popularity, one of each `part` neighbours is there, with the mean of their requests,
    as a fleet that is cut into `part` pieces has it. So rates by rank, bytes by replica and requests by replica stay.
    """
    weights = np.arange(1, load.contexts + 1, dtype=np.float64) ** -load.zipf
    rates = weights * (load.rate / weights.sum())
    head, rest = rates[:HEAD] / part, rates[HEAD:]
    whole = len(rest) // part * part
    chosen = rest[:whole].reshape(-1, part).mean(axis=1)
    left = rest[whole:]
    kept = np.concatenate([head, chosen, [left.sum() / part] if len(left) else []])
    spread = random.normal(0.0, load.sigma, len(kept)) if load.sigma else np.zeros(len(kept))
    tokens = load.tokens * np.exp(spread - load.sigma**2 / 2)
    return Sample(kept, tokens, tokens * load.bytes_per_token)
