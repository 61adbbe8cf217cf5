"""Tensors, scalars and addresses of kernels that `warp_interpreter` runs, in numpy. Integers divide as in C."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl
from triton.language import pointer_type

DTYPES = {
    "int1": np.bool_, "uint8": np.uint8, "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64,
    "fp16": np.float16, "fp32": np.float32,
}  # fmt: skip


class Numbers:
    """A tensor, or a scalar, of numbers or of addresses."""

    def __init__(self, array: Any, layout: Any = None, element: Any = None) -> None:
        self.array, self.layout, self.element = np.asarray(array), layout, element

    @property
    def dtype(self) -> Any:
        if self.element is None:
            return SimpleNamespace(element_ty=_named(self.array.dtype))
        return SimpleNamespace(element_ty=_named(np.dtype(self.element)))

    def to(self, dtype: Any, bitcast: bool = False) -> Numbers:
        if isinstance(dtype, pointer_type):
            return Numbers(self.array.astype(np.uint64), self.layout, DTYPES[str(dtype.element_ty)])
        wanted = DTYPES[str(dtype)]
        return Numbers(self.array.view(wanted) if bitcast else self.array.astype(wanted), self.layout)

    def _with(self, other: Any, compute: Callable[[Any, Any], Any]) -> Numbers:
        layout = self.layout if self.layout is not None else getattr(other, "layout", None)
        element = self.element if self.element is not None else getattr(other, "element", None)
        ours, theirs = self.array, getattr(other, "array", other)
        if element is not None:  # an address and numbers of elements
            size = np.dtype(element).itemsize
            if self.element is None:
                ours, theirs = theirs, ours
            found = ours + (np.asarray(theirs).astype(np.int64) * size).astype(np.uint64)
            return Numbers(found, layout, element)
        with np.errstate(all="ignore"):
            found = compute(ours, theirs)
        if isinstance(theirs, int | float) and not isinstance(theirs, bool) and found.dtype != np.bool_:
            found = found.astype(ours.dtype)  # Python's numbers take the tensor's type
        return Numbers(found, layout)

    def __add__(self, other: Any) -> Numbers:
        return self._with(other, np.add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Numbers:
        return self._with(other, np.subtract)

    def __rsub__(self, other: Any) -> Numbers:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Numbers:
        return self._with(other, np.multiply)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Numbers:
        return self._with(other, np.divide)

    def __rtruediv__(self, other: Any) -> Numbers:
        return self._with(other, lambda a, b: b / a)

    def __floordiv__(self, other: Any) -> Numbers:
        return self._with(other, _divide)

    def __mod__(self, other: Any) -> Numbers:
        return self._with(other, lambda a, b: a - _divide(a, b) * b)

    def __and__(self, other: Any) -> Numbers:
        return self._with(other, np.bitwise_and)

    def __or__(self, other: Any) -> Numbers:
        return self._with(other, np.bitwise_or)

    def __lshift__(self, other: Any) -> Numbers:
        return self._with(other, np.left_shift)

    def __rshift__(self, other: Any) -> Numbers:
        return self._with(other, np.right_shift)

    def __lt__(self, other: Any) -> Numbers:
        return self._with(other, np.less)

    def __gt__(self, other: Any) -> Numbers:
        return self._with(other, np.greater)

    def __ge__(self, other: Any) -> Numbers:
        return self._with(other, np.greater_equal)

    def __eq__(self, other: object) -> Numbers:  # type: ignore[override]
        return self._with(other, np.equal)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self.array)

    def __index__(self) -> int:
        return int(self.array)


def _named(dtype: Any) -> Any:
    """The language's type."""
    names = {np.dtype(value): name for name, value in DTYPES.items()}
    return {"fp32": gl.float32, "fp16": gl.float16}[names[dtype]]


def _divide(a: Any, b: Any) -> Any:
    """As C divides integers."""
    quotient = np.abs(a) // np.abs(b)
    return np.where((np.asarray(a) < 0) != (np.asarray(b) < 0), -quotient, quotient).astype(
        np.asarray(a).dtype
    )


def array_of(value: Any) -> Any:
    return value.array if isinstance(value, Numbers) else np.asarray(value)


def number_of(value: Any) -> Numbers:
    return value if isinstance(value, Numbers) else Numbers(value)
