"""Products of rows with weights on a CPU: a row's bits depend neither on the rows beside it nor on its place.

Libraries choose how they add up by the number of rows, so that a session's logits, and sometimes its token, would
change with the sessions beside it. Here every number is one sum over the inputs, in one order.

Shape legend: B rows, one of each session; I inputs, O outputs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.vectors.weight_rows_numba import make_weight_product
from index_store.launch import launch, njit, prange, worth_sharing

LEAST_OUTPUTS = 4
_OUTPUTS_PER_TASK = 64
_NANOSECONDS = {1: 0.1, 2: 0.17, 4: 0.3}
"""For a weight of so many bytes, in products with one row."""

_NANOSECONDS_MORE = 0.018
"""For every other row."""

_one_row = make_weight_product(1, 4)
_four_rows = make_weight_product(4, 2)

Numbers = NDArray[np.float32] | NDArray[np.int16] | NDArray[np.uint16] | NDArray[np.int8]


def multiply_rows(rows_BI: Tensor, weights: Numbers, scales: NDArray[np.float32]) -> Tensor:
    """The product with weights of `packed_weights`, [B, O] float32; rows are float32 on the host, O is at least 4."""
    out = rows_BI.new_empty(len(rows_BI), len(weights))
    work = weights.size * (_NANOSECONDS[weights.itemsize] + _NANOSECONDS_MORE * (len(rows_BI) - 1))
    arrays = (rows_BI.detach().contiguous().numpy(), weights, scales)
    if worth_sharing(work):
        launch(_multiply_rows, *arrays, out.numpy(), work=work)
    else:  # a step has hundreds of these, and a parallel loop takes a tenth of their time to begin, even alone
        _multiply_some(*arrays, 0, len(weights), out.numpy())
    return out


def multiply_rows_reference(rows_BI: Tensor, weights_OI: Tensor) -> Tensor:
    """The same by torch with weights in float32, whose bits depend on the number of rows."""
    return rows_BI @ weights_OI.T


@njit(cache=True, nogil=True, parallel=True)
def _multiply_rows(
    rows: NDArray[np.float32], weights: Numbers, scales: NDArray[np.float32], out: NDArray[np.float32]
) -> None:  # pragma: no cover - compiled
    outputs = weights.shape[0]
    for task in prange((outputs + _OUTPUTS_PER_TASK - 1) // _OUTPUTS_PER_TASK):
        begin = task * _OUTPUTS_PER_TASK
        _multiply_some(rows, weights, scales, begin, min(begin + _OUTPUTS_PER_TASK, outputs), out)


@njit(cache=True, nogil=True, _nrt=False)
def _multiply_some(
    rows: NDArray[np.float32],
    weights: Numbers,
    scales: NDArray[np.float32],
    begin: int,
    end: int,
    out: NDArray[np.float32],
) -> None:  # pragma: no cover - compiled
    """Rows with the weights of these outputs, by fours: the last four may be some that were done before."""
    inputs = rows.shape[1]
    fours = rows.shape[0] // 4 * 4
    for first in range(begin, end, 4):
        output = min(first, weights.shape[0] - 4)
        for row in range(0, fours, 4):
            _four_rows(rows, row, weights, scales, output, inputs, out)
            _four_rows(rows, row, weights, scales, output + 2, inputs, out)
        for row in range(fours, rows.shape[0]):
            _one_row(rows, row, weights, scales, output, inputs, out)
