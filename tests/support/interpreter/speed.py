"""Triton's interpreter without two thirds of its time, which it spends on what changes nothing.

Every call of one jit function by another puts the interpreter's operations into `triton.language` once more; here a
launch does it once. Sums and products of integers are computed again in 64 bits, to find overflows, which are then not
told, because that is for debugging alone. And numpy's types are looked up once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any


def patch_once() -> None:
    """Changes the interpreter of this process, whose kernels compute what they did before."""
    # Not above: triton reads where its kernels run when it is imported first.
    import triton.language as tl
    from triton.runtime import interpreter

    put_in_place, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype

    @functools.cache
    def languages(function: Callable[..., Any]) -> tuple[Any, ...]:
        """The modules whose operations the function sees."""
        seen = {id(value) for value in function.__globals__.values()}
        return tuple(language for language in (tl, tl.core) if id(language) in seen)

    def put_in_place_once(function: Callable[..., Any]) -> Any:
        seen = languages(function)
        if seen and not any(tl.core.is_builtin(language.load) for language in seen):
            return interpreter._LangPatchScope()
        return put_in_place(function)

    types = {}

    def numpy_type_once(dtype: Any) -> Any:
        if dtype.scalar.is_ptr():
            return numpy_type(dtype)
        name = dtype.scalar.name
        if name not in types:
            types[name] = numpy_type(dtype)
        return types[name]

    interpreter._patch_lang = put_in_place_once
    interpreter._get_np_dtype = numpy_type_once
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
