"""Rows of numbers that lie in several tensors, as one line of memory: what loops over many sessions' rows take.

Shape legend: H KV heads, R rows of a KV head, X numbers of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowsInLine:
    """Rows of numbers in one line of them: row r of head h has counts_R[r] of them from places_HR[h, r] on.

    numbers: float32. places_HR, counts_R: int64.
    """

    numbers: NDArray[np.float32]
    places_HR: NDArray[np.int64]
    counts_R: NDArray[np.int64]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> RowsInLine:
        """The rows [H, R, X] of tensors in one piece of memory, each with a number of rows and columns of its own.

        Raises ValueError for tensors of several, and for rows whose numbers are not neighbours.
        """
        pieces = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if len(pieces) != 1 or any(tensor.stride(2) != 1 and tensor.shape[2] > 1 for tensor in tensors):
            strides = [tensor.stride() for tensor in tensors]
            raise ValueError(
                f"rows are {strides} apart in {len(pieces)} pieces of memory, expected rows in one"
            )
        numbers = [(tensor.storage_offset(), *tensor.stride()[:2], *tensor.shape[1:]) for tensor in tensors]
        first, head_stride, stride, rows, count = np.array(numbers, np.int64).T
        first, head_stride, stride, counts = (
            np.repeat(each, rows) for each in (first, head_stride, stride, count)
        )
        row = np.arange(len(counts)) - np.repeat(rows.cumsum() - rows, rows)
        places = first + stride * row + np.arange(len(tensors[0]))[:, None] * head_stride
        whole = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
        line = tensors[0].as_strided((whole,), (1,), 0)
        return cls(line.numpy(), places, counts)
