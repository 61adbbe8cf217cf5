"""Launches of kernels of one warp, run program by program by `warp_interpreter`; the modules of these kernels."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.language.core import is_builtin
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import ConstexprFunction, JITFunction

from decode_engine.kernels.coarse import (
    key_tiles,
    registers,
    search,
    value_tiles,
    warp_pass,
    warp_reads,
    warp_values,
)
from tests.support.warps.warp_interpreter import Language, Numbers, multiply

WARP_MODULES = (registers, key_tiles, value_tiles, warp_reads, search, warp_pass, warp_values)


_RUNNING = SimpleNamespace(language=Language((0, 0), (1, 1)))
"""The program that runs."""


class _Triton:
    """The language of functions in Triton that kernels in Gluon call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_RUNNING.language, name)


class _Launched:
    """A kernel as launches call it: kernel[grid](...)."""

    def __init__(self, kernel: FunctionType) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        sizes = (*grid, 1)[:2]

        def run(*arguments: Any, num_warps: int, maxnreg: int | None = None, **constants: Any) -> None:
            numbers = [_argument(each) for each in arguments]
            for program in itertools.product(*map(range, sizes)):
                language = _RUNNING.language = Language(program, sizes)
                for module in WARP_MODULES:
                    module.gl = language  # type: ignore[attr-defined]
                    if hasattr(module, "async_copy"):
                        module.async_copy = language.copies
                self._kernel(*numbers, **{name: _plain(each) for name, each in constants.items()})

        return run


def _plain(constant: Any) -> Any:
    """A constant, or a record of these, without what a compiler wraps them in."""
    if isinstance(constant, tuple):
        return type(constant)(*map(_plain, constant))
    return constant.value if isinstance(constant, gl.constexpr) else constant


def _argument(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_argument, value))
    if isinstance(value, torch.Tensor):
        return Numbers(np.uint64(value.data_ptr()), None, torch.empty(0, dtype=value.dtype).numpy().dtype)
    if isinstance(value, int):
        return Numbers(np.int32(value))
    return Numbers(np.float32(value)) if isinstance(value, float) else value


def _called(function: Any) -> FunctionType:
    """A function in Triton, in the language that runs kernels in Gluon."""
    around = {**function.fn.__globals__, "tl": _Triton()}
    for name in {*function.fn.__code__.co_names} & {*around} - {"tl"}:
        own = around[name]
        if isinstance(own, JITFunction | InterpretedFunction):
            around[name] = _called(own)
        elif is_builtin(own):  # of a device's alone: waiting for a launch
            around[name] = lambda: None
        else:
            around[name] = _plain(own)
    return FunctionType(function.fn.__code__, around)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, kernels of one warp run here."""
    kept = [dict(vars(module)) for module in WARP_MODULES]
    try:
        for module in WARP_MODULES:
            for name, value in list(vars(module).items()):
                if isinstance(value, GluonJITFunction):
                    launched = value.__name__.endswith("_kernel")
                    vars(module)[name] = _Launched(value.fn) if launched else value.fn
                elif isinstance(value, JITFunction | InterpretedFunction):
                    vars(module)[name] = _called(value)
                elif isinstance(value, ConstexprFunction):
                    vars(module)[name] = value.fn
                elif isinstance(value, gl.constexpr):
                    vars(module)[name] = value.value
                elif name == "mma_v2":
                    vars(module)[name] = multiply
        yield
    finally:
        for module, before in zip(WARP_MODULES, kept, strict=True):
            vars(module).update(before)


def warps_interpreted() -> AbstractContextManager[None]:
    """`interpreted` where Triton's interpreter runs the other kernels."""
    return interpreted() if "TRITON_INTERPRET" in os.environ else nullcontext()
