"""Products of rows with weights on a CPU: a row's bits depend neither on the rows beside it nor on its place.

Libraries choose how they add up by the number of rows, so that a session's logits, and sometimes its token, would
change with the sessions beside it. Here every number is one sum over the inputs, in one order.

Shape legend: B rows, one of each session; I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from index_store.attention.vectors.weight_rows_numba import make_weight_product
from index_store.compiled.launch import launch, njit, spread

LEAST_OUTPUTS = 4
OUTPUTS_PER_TASK = 16
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
    arrays = (rows_BI.detach().contiguous().numpy(), weights, scales, out.numpy())
    launch(_LOOPS[weights.dtype.char], *arrays, work=work_of(weights, len(rows_BI)))
    return out


def work_of(weights: Numbers, rows: int) -> float:
    """Nanoseconds that one thread takes for it."""
    return weights.size * (_NANOSECONDS[weights.itemsize] + _NANOSECONDS_MORE * (rows - 1))


def multiply_rows_reference(rows_BI: Tensor, weights_OI: Tensor) -> Tensor:
    """The same by torch with weights in float32, whose bits depend on the number of rows."""
    return rows_BI @ weights_OI.T


@njit(_nrt=False)
def multiply_some(
    task: int,
    rows: NDArray[np.float32],
    weights: Numbers,
    scales: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """Rows with the weights of a task's outputs, by fours: the last four may be some that were done before."""
    inputs, outputs = rows.shape[1], weights.shape[0]
    fours = rows.shape[0] // 4 * 4
    for first in range(task * OUTPUTS_PER_TASK, min((task + 1) * OUTPUTS_PER_TASK, outputs), 4):
        output = min(first, outputs - 4)
        for row in range(0, fours, 4):
            _four_rows(rows, row, weights, scales, output, inputs, out)
            _four_rows(rows, row, weights, scales, output + 2, inputs, out)
        for row in range(fours, rows.shape[0]):
            _one_row(rows, row, weights, scales, output, inputs, out)


def _loop_for(kind: str, numbers: str) -> Any:
    """The loop for weights of one kind, which Python and the cache know as `multiply_KIND` of this module."""

    def multiply(
        rows: NDArray[np.float32], weights: Numbers, scales: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:  # pragma: no cover - compiled
        tasks = (weights.shape[0] + OUTPUTS_PER_TASK - 1) // OUTPUTS_PER_TASK
        spread(multiply_some, tasks, (rows, weights, scales, out))

    multiply.__name__ = multiply.__qualname__ = f"multiply_{kind}"
    return njit(f"f4x2 {numbers}x2 f4x2 f4x2")(multiply)


multiply_float32 = _loop_for("float32", "f4")
multiply_bfloat16 = _loop_for("bfloat16", "i2")
multiply_float16 = _loop_for("float16", "u2")
multiply_int8 = _loop_for("int8", "i1")
_LOOPS = {"f": multiply_float32, "h": multiply_bfloat16, "H": multiply_float16, "b": multiply_int8}
"""By what numpy calls the numbers."""
