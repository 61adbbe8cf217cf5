"""Triton's interpreter takes operands as it does on its own, now that it remembers types and numbers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="needs the interpreter")

SHAPES = ((), (4,), (1,), (2, 4), (1, 4), (2, 1))
NAMES = ("int1", "int8", "uint8", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64")
NUMBERS = (0, 1, -1, 3, 300, 2**31, 2**40, 0.0, -0.0, 0.5, 1e300, float("inf"), float("nan"), True)


@pytest.fixture(autouse=True)
def _as_in_a_launch() -> Iterator[None]:
    """Types are what they are while a kernel runs."""
    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(tl, scope)
    yield
    scope.restore()


def operand(name: str, shape: tuple[int, ...]) -> Any:
    """Small numbers of a type."""
    import triton.language as tl
    from triton.runtime import interpreter

    dtype = getattr(tl, name)
    values = (
        np.arange(1, 1 + np.prod(shape, dtype=int))
        .reshape(shape or 1)
        .astype(interpreter._get_np_dtype(dtype))
    )
    return tl.tensor(
        interpreter.TensorHandle(values, dtype), tl.block_type(dtype, list(shape)) if shape else dtype
    )


def outcome(work: Callable[..., Any], *arguments: Any) -> Any:
    """Types and bits of the tensors that come of it, or the error (there are no numbers of bfloat16)."""
    try:
        made = work(*arguments)
    except (TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)
    tensors = made if isinstance(made, tuple) else (made,)
    return [
        (str(each.type), str(each), each.handle.data.dtype, each.handle.data.tobytes()) for each in tensors
    ]


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_operands_are_what_they_are_without_memory(name: str, divided: bool) -> None:
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    remembering = interpreter.interpreter_semantic
    plain = TritonSemantic(interpreter.interpreter_builder)
    others: list[Any] = [*NUMBERS, *(operand(other, shape) for other in NAMES for shape in SHAPES)]
    with np.errstate(all="ignore"):
        for shape, other in itertools.product(SHAPES, others):
            own = operand(name, shape)
            for pair in ((own, other), (other, own)):
                expected = outcome(plain.binary_op_type_checking_impl, *pair, False, False, True, divided)
                for _ in range(2):  # the second one is remembered
                    found = outcome(
                        remembering.binary_op_type_checking_impl, *pair, False, False, True, divided
                    )
                    assert found == expected, pair


@pytest.mark.parametrize("name", NAMES)
def test_conversions_are_what_they_are_without_memory(name: str) -> None:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    plain = TritonSemantic(interpreter.interpreter_builder)
    with np.errstate(all="ignore"):
        for shape, target in itertools.product(SHAPES, NAMES):
            arguments = operand(name, shape), getattr(tl, target)
            found = outcome(interpreter.interpreter_semantic.cast, *arguments)
            assert found == outcome(plain.cast, *arguments), (name, target)
