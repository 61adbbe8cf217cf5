"""Where the keys and values of a batch of sequences lie: addresses in device memory, read by the kernels themselves.

A launch serves sequences on different contexts, so that addresses and lengths are data; a captured graph is replayed
for other contexts by writing into these tensors.

Shape legend: B sequences, H KV heads, N tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError

HEAD_DIMS = (64, 128)
MAX_GROUP = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class KeyValues:
    """Rows [H, N, 2, d] of every sequence, the key and the value of a token adjacent.

    addresses_B: [B] int64, of the first row of KV head 0. head_rows_B: [B] int64, rows from one KV head to the next.
    tensors: what the addresses were taken from; kept alive by this, and read by the eager references.
    """

    addresses_B: Tensor
    head_rows_B: Tensor
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> KeyValues:
        """Of one tensor [H, N, 2, d] per sequence; the same one may appear several times.

        Raises InvalidArgumentError for no tensor, tensors that do not fit each other, and unsupported ones.
        """
        if not tensors:
            raise InvalidArgumentError("attention needs the keys and values of at least one sequence")
        first = tensors[0]
        for tensor in tensors:
            heads, _, two, head_dim = tensor.shape
            if tensor.stride()[1:] != (2 * head_dim, head_dim, 1) or two != 2:
                raise InvalidArgumentError(
                    f"keys and values have shape {tuple(tensor.shape)} and strides {tensor.stride()}, expected "
                    "[KV heads, tokens, 2, head dim] with adjacent tokens"
                )
            if head_dim not in HEAD_DIMS or tensor.dtype not in DTYPES:
                raise InvalidArgumentError(
                    f"keys and values are {tensor.dtype} of head dimension {head_dim}; kernels exist for head "
                    f"dimensions {HEAD_DIMS} in {', '.join(str(dtype) for dtype in DTYPES)}"
                )
            if (heads, head_dim, tensor.dtype, tensor.device) != (
                first.shape[0],
                first.shape[3],
                first.dtype,
                first.device,
            ):
                raise InvalidArgumentError("all sequences of a batch need the same heads, dtype and device")
        addresses = [tensor.data_ptr() for tensor in tensors]
        strides = [tensor.stride(0) // tensor.stride(1) for tensor in tensors]
        return cls(
            torch.tensor(addresses, dtype=torch.int64, device=first.device),
            torch.tensor(strides, dtype=torch.int64, device=first.device),
            tuple(tensors),
        )

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.tensors[0].shape[0]

    @property
    def head_dim(self) -> int:
        return self.tensors[0].shape[3]


def check_queries(q_RGD: Tensor, rows: int, head_dim: int, dtype: torch.dtype) -> None:
    """Raises InvalidArgumentError unless the queries [R, G, d] fit and are contiguous."""
    group = q_RGD.shape[1]
    if q_RGD.shape != (rows, group, head_dim) or not 1 <= group <= MAX_GROUP:
        raise InvalidArgumentError(
            f"queries have shape {tuple(q_RGD.shape)}, expected [{rows}, 1..{MAX_GROUP}, {head_dim}]"
        )
    if q_RGD.dtype != dtype or not q_RGD.is_contiguous():
        raise InvalidArgumentError(f"queries are {q_RGD.dtype}, expected {dtype} in one contiguous piece")
