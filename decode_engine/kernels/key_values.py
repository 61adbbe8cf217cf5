"""What keys, values and queries the kernels over lists and clusters take."""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_queries(q_RGD: Tensor, sequences: int) -> None:
    """Raises InvalidArgumentError unless the queries [R, G, d] are supported, contiguous, and R a multiple of B."""
    rows, group, head_dim = q_RGD.shape
    if not sequences or rows % sequences or not 1 <= group <= MAX_GROUP or head_dim not in HEAD_DIMS:
        raise InvalidArgumentError(
            f"queries have shape {tuple(q_RGD.shape)} for {sequences} sequences, expected [KV heads of all sequences, "
            f"1..{MAX_GROUP}, one of {HEAD_DIMS}]"
        )
    if q_RGD.dtype not in DTYPES or not q_RGD.is_contiguous():
        raise InvalidArgumentError(
            f"queries are {q_RGD.dtype}, expected one of {', '.join(map(str, DTYPES))} in one contiguous piece"
        )
