"""Products of Triton's interpreter whose bits do not depend on the processor that tests run on.

A library sums a row's products in an order that depends on the row's place among others, on some processors. On a GPU
it does not.
"""

from __future__ import annotations

from typing import Any


def round_sums_once() -> None:
    """Has this process's interpreter sum products of float32 results in float64, and round each sum once."""
    # Not above: triton reads where its kernels run when it is imported first.
    import numpy as np
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = a.data.dtype.kind == b.data.dtype.kind == "f" and d.data.dtype == np.float32
        if not wide:
            return multiply(self, a, b, d, *options)
        sums = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(sums.astype(np.float32), d.dtype.scalar)

    builder.create_dot = create_dot
