"""Runs kernels written in Gluon, program by program, in numpy: what `TRITON_INTERPRET` does for those in Triton.

Tensors are logical, as the language has them, so that layouts change no result, with three exceptions. Votes see lanes:
a tile's eight keys are four lanes each. Products in inline assembly see tensors [8, 4] as a register of each lane. And
inline assembly over four registers at a time sees neighbours of [8, keys, ..]: all keys that there are, and then those
of the last axis. Integers divide as in C, and wrap.
Whether the layouts that kernels claim are what the hardware has is checked where they are compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as memory
from triton.experimental.gluon import language as gl

from tests.support.warps.warp_assembly import by_fours, multiplied, registers_run
from tests.support.warps.warp_numbers import DTYPES, Numbers, array_of, number_of

prefetched: list[tuple[int, int]] = []
"""What kernels had brought into the second-level cache: addresses, and bytes; nothing where these are not above 0."""


class Shared:
    """Shared memory of a program, or a part of it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, at: Any) -> Shared:
        return Shared(self.array[int(array_of(at))])

    def load(self, layout: Any) -> Numbers:
        return Numbers(self.array.copy(), layout)

    def store(self, value: Numbers) -> None:
        self.array[...] = value.array


class Copies:
    """Copies into shared memory, which come as late as they may: only when they are waited for."""

    def __init__(self) -> None:
        self._groups: list[list[tuple[Shared, Numbers, Any]]] = [[]]

    def async_copy_global_to_shared(self, into: Shared, pointer: Numbers, mask: Any) -> None:
        size = np.dtype(pointer.element).itemsize
        together = min(16 // size, pointer.array.shape[-1])
        assert not (pointer.array[..., ::together] % (together * size)).any(), (
            "copies are of 16 bytes, or whole rows"
        )
        into.array[:] = -1
        self._groups[-1].append((into, pointer, mask))

    def commit_group(self) -> None:
        self._groups.append([])

    def wait_group(self, outstanding: int) -> None:
        while len(self._groups) - 1 > outstanding:
            for into, pointer, mask in self._groups.pop(0):
                into.array[:] = Language.load(pointer, mask).array


class Language:
    """The functions of `gl` that kernels here call."""

    def __init__(self, program: tuple[int, int], grid: tuple[int, int]) -> None:
        self._program, self._grid = program, grid
        self.copies = Copies()

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name)  # types and layouts

    def program_id(self, axis: int) -> Numbers:
        return Numbers(np.int32(self._program[axis]))

    def num_programs(self, axis: int) -> Numbers:
        return Numbers(np.int32(self._grid[axis]))

    static_range = staticmethod(range)

    @staticmethod
    def arange(start: int, end: int, layout: Any) -> Numbers:
        return Numbers(np.arange(start, end, dtype=np.int32), layout)

    @staticmethod
    def full(shape: list[int], value: float, dtype: Any, layout: Any) -> Numbers:
        return Numbers(np.full(shape, value, DTYPES[str(dtype)]), layout)

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(np.full(shape, -1, DTYPES[str(dtype)]))

    @staticmethod
    def multiple_of(pointer: Numbers, count: int) -> Numbers:
        assert not (
            pointer.array % (count * np.dtype(pointer.element).itemsize if count < 16 else count)
        ).any()
        return pointer

    @staticmethod
    def load(pointer: Numbers, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Numbers:
        places = np.asarray(pointer.array, np.uint64)
        there = np.ones(places.shape, bool) if mask is None else np.broadcast_to(array_of(mask), places.shape)
        filled = np.full(places.shape, other, pointer.element)
        found = memory.load(places, np.ascontiguousarray(there), filled, np.dtype(pointer.element))
        return Numbers(found.reshape(places.shape), pointer.layout)

    @staticmethod
    def store(pointer: Numbers, value: Any, mask: Any = None) -> None:
        places = np.asarray(pointer.array, np.uint64)
        numbers = np.broadcast_to(array_of(value).astype(pointer.element), places.shape)
        there = np.ones(places.shape, bool) if mask is None else np.broadcast_to(array_of(mask), places.shape)
        taken = places[there]
        assert len(np.unique(taken)) == len(taken), "two elements of a tensor go to one place"
        memory.store(places, np.ascontiguousarray(numbers), np.ascontiguousarray(there))

    @staticmethod
    def atomic_add(pointer: Numbers, value: Any, mask: Any = None, sem: str = "") -> Numbers:
        places = np.atleast_1d(pointer.array)
        there = np.broadcast_to(True if mask is None else array_of(mask), places.shape)
        before = np.zeros(places.shape, pointer.element)
        for at in np.flatnonzero(there):
            one = Numbers(places[at], None, pointer.element)
            before[at] = Language.load(one).array
            Language.store(one, before[at] + np.broadcast_to(array_of(value), places.shape)[at])
        return Numbers(before.reshape(pointer.array.shape), pointer.layout)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Numbers:
        chosen = np.where(array_of(condition), array_of(a), array_of(b))
        typed = [each.array.dtype for each in (a, b) if isinstance(each, Numbers)]
        return Numbers(chosen.astype(typed[0]) if typed else chosen)

    @staticmethod
    def maximum(a: Any, b: Any) -> Numbers:
        return number_of(a)._with(b, np.maximum)

    @staticmethod
    def minimum(a: Any, b: Any) -> Numbers:
        return number_of(a)._with(b, np.minimum)

    @staticmethod
    def exp2(x: Numbers) -> Numbers:
        with np.errstate(over="ignore"):
            return Numbers(np.exp2(x.array))

    @staticmethod
    def log2(x: Numbers) -> Numbers:
        return Numbers(np.log2(x.array))

    @staticmethod
    def abs(x: Numbers) -> Numbers:
        return Numbers(np.abs(x.array))

    @staticmethod
    def fma(a: Numbers, b: Any, c: Any) -> Numbers:
        with np.errstate(invalid="ignore"):
            exact = a.array.astype(np.float64) * array_of(b).astype(np.float64) + array_of(c)
            return Numbers(exact.astype(np.float32))

    @staticmethod
    def sum(x: Numbers, axis: int) -> Numbers:
        return Numbers(x.array.sum(axis, dtype=x.array.dtype))

    @staticmethod
    def max(x: Numbers, axis: int) -> Numbers:
        return Numbers(x.array.max(axis))

    @staticmethod
    def associative_scan(x: Numbers, axis: int, combine: Callable[[Any, Any], Any]) -> Numbers:
        found = [Numbers(np.take(x.array, 0, axis))]
        for at in range(1, x.array.shape[axis]):
            found.append(combine(found[-1], Numbers(np.take(x.array, at, axis))))
        return Numbers(np.stack([each.array for each in found], axis), x.layout)

    @staticmethod
    def gather(x: Numbers, index: Numbers, axis: int) -> Numbers:
        return Numbers(np.take_along_axis(x.array, index.array, axis), index.layout)

    @staticmethod
    def expand_dims(x: Any, axis: int) -> Numbers:
        found = number_of(x)
        layout = getattr(found.layout, "parent", found.layout)
        return Numbers(np.expand_dims(found.array, axis), layout, found.element)

    @staticmethod
    def broadcast(a: Numbers, b: Numbers) -> tuple[Numbers, Numbers]:
        left, right = np.broadcast_arrays(a.array, b.array)
        return Numbers(left), Numbers(right)

    @staticmethod
    def reshape(x: Numbers, shape: list[int]) -> Numbers:
        return Numbers(x.array.reshape(shape))

    @staticmethod
    def permute(x: Numbers, order: list[int]) -> Numbers:
        return Numbers(np.transpose(x.array, order))

    @staticmethod
    def join(a: Numbers, b: Numbers) -> Numbers:
        return Numbers(np.stack([a.array, b.array], -1))

    @staticmethod
    def split(x: Numbers) -> tuple[Numbers, Numbers]:
        return Numbers(x.array[..., 0]), Numbers(x.array[..., 1])

    @staticmethod
    def convert_layout(x: Numbers, layout: Any, assert_trivial: bool = False) -> Numbers:
        return Numbers(x.array, layout)

    @staticmethod
    def inline_asm_elementwise(
        asm: str, constraints: str, args: list[Numbers], dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        if "prefetch" in asm:
            prefetched.append((int(array_of(args[0])), int(array_of(args[1]))))
        if any(each in asm for each in ("griddepcontrol", "bar.warp.sync", "prefetch")):
            return None
        if "ld.global.nc.u16" in asm:
            places = args[0].array.astype(np.uint64)
            none = np.zeros(places.shape, np.uint16)
            found = memory.load(places, np.ones(places.shape, bool), none, np.dtype(np.uint16))
            return Numbers(found.reshape(places.shape).astype(np.int32))
        if "vote" in asm:
            marks = args[0].array  # a key has so many lanes, of which the first votes
            lanes = 4 * np.arange(8)[:, None] + 4 // marks.shape[1] * np.arange(marks.shape[1])
            bits = np.sum(np.where(marks != 0, 1 << lanes, 0))
            return Numbers(np.full(marks.shape, np.uint32(bits)).view(np.int32))
        if "popc" in asm:
            return Numbers(np.bitwise_count(args[0].array.view(np.uint32)).astype(np.int32))
        if "movmatrix" in asm:
            blocks = args[0].array.reshape(args[0].array.shape[0] // 8, 8, args[0].array.shape[1] // 8, 8)
            return Numbers(blocks.transpose(0, 3, 2, 1).reshape(args[0].array.shape))
        if "mma.sync" in asm:
            return multiplied(asm, [each.array for each in args])
        if "cvt.rn.f16x2" in asm:  # pairs of neighbours, twice
            pairs = np.ascontiguousarray(args[0].array.astype(np.float16)).view(np.int32)
            return Numbers(np.repeat(pairs, 2, -1))
        assert "f16" in asm or "prmt" in asm, asm
        return by_fours(asm, args[0], dtype) if pack == 4 else registers_run(asm, args, dtype)


def multiply(a: Numbers, b: Numbers, acc: Numbers) -> Numbers:
    """As tensor cores do: 16 products at a time, exact, are added, and what float32 cannot hold is dropped."""
    found = acc.array
    left, right = a.array.astype(np.float64), b.array.astype(np.float64)
    for at in range(0, left.shape[1], 16):
        exact = found + left[:, at : at + 16] @ right[at : at + 16]
        rounded = exact.astype(np.float32)
        found = np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0)), rounded)
    return Numbers(found)
