"""Who serves a request: rendezvous hashing with bounded load, and more holders for what is asked for more often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Replica:
    """One that can be asked. load: requests that it has now."""

    name: str
    load: int = 0
    up: bool = True


def weights_of(keys_K: NDArray[Any], names_R: NDArray[Any]) -> NDArray[Any]:
    """[K, R] uint64: how much each replica wants each key, by a mix of both (splitmix64)."""
    mixed = keys_K[:, None].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = mixed + (names_R[None].astype(np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def orders(keys: int, replicas: int) -> NDArray[Any]:
    """[keys, replicas] int16: the order in which replicas are asked to hold each key."""
    names = np.arange(replicas)
    parts = [
        np.argsort(weights_of(np.arange(first, min(first + 4096, keys)), names), axis=1)[:, ::-1].astype(
            np.int16
        )
        for first in range(0, keys, 4096)
    ]
    return np.concatenate(parts)


def choose(
    order: Sequence[int], replicas: Sequence[Replica], total: int, bound: float, most: int, holders: int
) -> int:
    """The replica for a request: of the first `holders` of the key's order the one with the least to do; the next of
    the order where that has more than `bound` times its part of all `total` requests and as many as it can run
    (`most`). -1 where none is up.
    """
    up = [number for number in order if replicas[number].up]
    if not up:
        return -1
    part = max(math.ceil(bound * (total + 1) / len(up)), most)
    nearest = min(up[:holders], key=lambda number: replicas[number].load)
    if replicas[nearest].load < part:
        return nearest
    return next((number for number in up if replicas[number].load < part), nearest)
