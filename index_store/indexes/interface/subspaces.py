"""How a head's dimensions divide into subspaces, for indexes that look at slices of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError


def subspace_dims(head_dim: int, subspaces: int, split: str) -> Tensor:
    """[m, B] int64 on the CPU: the dimensions of each of m subspaces.

    split: `strided` puts the dimensions i with i mod m = b into subspace b, `contiguous` cuts slices. Raises
    InvalidArgumentError when the head dimension is no multiple of m.
    """
    if head_dim % subspaces:
        raise InvalidArgumentError(
            f"head dimension {head_dim} does not split into {subspaces} subspaces; choose a divisor of {head_dim}"
        )
    order = torch.arange(head_dim, device="cpu")
    if split == "strided":
        return order.view(-1, subspaces).t().contiguous()
    return order.view(subspaces, -1)
