"""What a budget is asked with besides a ranking, and what it keeps.

Shape legend: H KV heads, T query positions, G group heads, K kept keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """Keys kept for every (KV head, query position) of one layer.

    ids_HTK: [H, T, K] int32 key ids, ascending and unique within the first `counts` entries of a row; entries
        beyond are undefined but valid ids.
    counts_HT: [H, T] int32, how many entries of a row count.
    """

    ids_HTK: Tensor
    counts_HT: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What a budget may know besides the ranking.

    length: tokens of sinks, searched keys and recent window together. thresholds: for a wanted fraction of the keys,
        the threshold that was calibrated offline for this context and index; None without a calibration.
    read_logits: exact q.k for key ids [H, T, G, K] of the searched range -> [H, T, G, K] float32.
    exact_lse_HTG: [H, T, G] float32, log-sum-exp of the logits of all keys outside the searched range (sinks, recent
        window, tail).
    """

    length: int
    thresholds: Callable[[float], float] | None
    read_logits: Callable[[Tensor], Tensor]
    exact_lse_HTG: Tensor
