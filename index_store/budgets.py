"""Budgets: the rule that cuts a ranking into a selection.

Shape legend: H KV heads, T query positions, M ranked keys, K kept keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.base import Ranking
from index_store.kernels.top_k import top_k


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
class Ratio:
    """Keep the best ceil(keep * length) keys of every ranking (CSAttention section 3.3: Top-K, K = rho * N).

    Sinks and the recent window come on top. Raises InvalidArgumentError unless 0 < keep <= 1.
    """

    keep: float

    def __post_init__(self) -> None:
        if not 0.0 < self.keep <= 1.0:
            raise InvalidArgumentError(
                f"keep ratio is {self.keep}, expected a number above 0 and at most 1", keep_ratio=self.keep
            )

    def cut(self, ranking: Ranking, length: int) -> Selection:
        """Cuts to the budget for a sequence of `length` tokens: sinks, ranked keys and recent window together."""
        available = ranking.scores_HTM.shape[-1]
        keep = min(available, math.ceil(self.keep * length))
        ids, counts = top_k(ranking.scores_HTM, keep)
        return Selection(ids.add_(ranking.first_key), counts)


Budget = Ratio
