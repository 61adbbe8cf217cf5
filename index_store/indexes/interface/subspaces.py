"""How a head's dimensions divide into subspaces, for indexes that look at slices of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.interface.parameters import SubspaceParameters


def subspace_dims(parameters: SubspaceParameters, head_dim: int) -> Tensor:
    """[m, d / m] int64 on the CPU: the dimensions of each subspace.

    Raises InvalidArgumentError when the head dimension is no multiple of m.
    """
    if head_dim % parameters.subspaces:
        raise InvalidArgumentError(
            f"head dimension {head_dim} does not split into {parameters.subspaces} subspaces; "
            f"choose a divisor of {head_dim}"
        )
    order = torch.arange(head_dim, device="cpu")
    if parameters.split == "strided":
        return order.view(-1, parameters.subspaces).t().contiguous()
    return order.view(parameters.subspaces, -1)
