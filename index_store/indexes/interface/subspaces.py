"""How a head's dimensions divide into subspaces, for indexes that look at slices of keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.parameters import Parameters


@dataclass(frozen=True)
class SubspaceParameters(Parameters):
    """Build parameters of indexes that cluster slices of keys or queries.

    subspaces: m, a divisor of the head dimension. split: `strided` puts the dimensions i with i mod m = b into
        subspace b, `contiguous` cuts slices. iterations: of k-means.
    """

    subspaces: int
    split: str
    iterations: int

    def __post_init__(self) -> None:
        self._require_one_of("split", ("strided", "contiguous"))
        self._require_at_least(1, "subspaces", "iterations")

    def dims(self, head_dim: int) -> Tensor:
        """[m, d / m] int64 on the CPU: the dimensions of each subspace.

        Raises InvalidArgumentError when the head dimension is no multiple of m.
        """
        if head_dim % self.subspaces:
            raise InvalidArgumentError(
                f"head dimension {head_dim} does not split into {self.subspaces} subspaces; "
                f"choose a divisor of {head_dim}"
            )
        order = torch.arange(head_dim, device="cpu")
        if self.split == "strided":
            return order.view(-1, self.subspaces).t().contiguous()
        return order.view(self.subspaces, -1)
