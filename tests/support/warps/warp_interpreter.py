"""Runs kernels written in Gluon, program by program, in numpy: what `TRITON_INTERPRET` does for those in Triton.

Tensors are logical, as the language has them, so that layouts change no result, with two exceptions. Inline assembly
sees pairs of neighbouring registers: a tensor remembers the layout of its words, which says along which axis they
lie. And votes see lanes: a tile's eight keys are four lanes each. Integers divide as in C, and wrap.
Whether the layouts that kernels claim are what the hardware has is checked where they are compiled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as memory
from triton.experimental.gluon import language as gl
from triton.language import pointer_type

_DTYPES = {
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
            return Numbers(self.array.astype(np.uint64), self.layout, _DTYPES[str(dtype.element_ty)])
        wanted = _DTYPES[str(dtype)]
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

    def __floordiv__(self, other: Any) -> Numbers:
        return self._with(other, _divide)

    def __mod__(self, other: Any) -> Numbers:
        return self._with(other, lambda a, b: a - _divide(a, b) * b)

    def __and__(self, other: Any) -> Numbers:
        return self._with(other, np.bitwise_and)

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
    names = {np.dtype(value): name for name, value in _DTYPES.items()}
    return {"fp32": gl.float32, "fp16": gl.float16}[names[dtype]]


def _divide(a: Any, b: Any) -> Any:
    """As C divides integers."""
    quotient = np.abs(a) // np.abs(b)
    return np.where((np.asarray(a) < 0) != (np.asarray(b) < 0), -quotient, quotient).astype(
        np.asarray(a).dtype
    )


def _array(value: Any) -> Any:
    return value.array if isinstance(value, Numbers) else np.asarray(value)


def _number(value: Any) -> Numbers:
    return value if isinstance(value, Numbers) else Numbers(value)


class Shared:
    """Shared memory of a program, or a part of it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def index(self, at: Any) -> Shared:
        return Shared(self.array[int(_array(at))])

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
        return Numbers(np.full(shape, value, _DTYPES[str(dtype)]), layout)

    @staticmethod
    def allocate_shared_memory(dtype: Any, shape: list[int], layout: Any) -> Shared:
        return Shared(np.full(shape, -1, _DTYPES[str(dtype)]))

    @staticmethod
    def multiple_of(pointer: Numbers, count: int) -> Numbers:
        assert not (
            pointer.array % (count * np.dtype(pointer.element).itemsize if count < 16 else count)
        ).any()
        return pointer

    @staticmethod
    def load(pointer: Numbers, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Numbers:
        places = np.asarray(pointer.array, np.uint64)
        there = np.ones(places.shape, bool) if mask is None else np.broadcast_to(_array(mask), places.shape)
        filled = np.full(places.shape, other, pointer.element)
        found = memory.load(places, np.ascontiguousarray(there), filled, np.dtype(pointer.element))
        return Numbers(found.reshape(places.shape), pointer.layout)

    @staticmethod
    def store(pointer: Numbers, value: Any, mask: Any = None) -> None:
        places = np.asarray(pointer.array, np.uint64)
        numbers = np.broadcast_to(_array(value).astype(pointer.element), places.shape)
        there = np.ones(places.shape, bool) if mask is None else np.broadcast_to(_array(mask), places.shape)
        taken = places[there]
        assert len(np.unique(taken)) == len(taken), "two elements of a tensor go to one place"
        memory.store(places, np.ascontiguousarray(numbers), np.ascontiguousarray(there))

    @staticmethod
    def atomic_add(pointer: Numbers, value: Any, mask: Any = None, sem: str = "") -> Numbers:
        places = np.atleast_1d(pointer.array)
        there = np.broadcast_to(True if mask is None else _array(mask), places.shape)
        before = np.zeros(places.shape, pointer.element)
        for at in np.flatnonzero(there):
            one = Numbers(places[at], None, pointer.element)
            before[at] = Language.load(one).array
            Language.store(one, before[at] + np.broadcast_to(_array(value), places.shape)[at])
        return Numbers(before.reshape(pointer.array.shape), pointer.layout)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Numbers:
        chosen = np.where(_array(condition), _array(a), _array(b))
        typed = [each.array.dtype for each in (a, b) if isinstance(each, Numbers)]
        return Numbers(chosen.astype(typed[0]) if typed else chosen)

    @staticmethod
    def maximum(a: Any, b: Any) -> Numbers:
        return _number(a)._with(b, np.maximum)

    @staticmethod
    def minimum(a: Any, b: Any) -> Numbers:
        return _number(a)._with(b, np.minimum)

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
    def fma(a: Numbers, b: Numbers, c: Numbers) -> Numbers:
        with np.errstate(invalid="ignore"):
            return Numbers((a.array.astype(np.float64) * b.array + c.array).astype(np.float32))

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
        found = _number(x)
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
        if any(each in asm for each in ("griddepcontrol", "bar.warp.sync", "prefetch")):
            return None
        if "ld.global.nc.u16" in asm:
            places = args[0].array.astype(np.uint64)
            none = np.zeros(places.shape, np.uint16)
            found = memory.load(places, np.ones(places.shape, bool), none, np.dtype(np.uint16))
            return Numbers(found.reshape(places.shape).astype(np.int32))
        if "vote" in asm:
            bits = sum(int(mark != 0) << (4 * lane) for lane, mark in enumerate(args[0].array))
            return Numbers(np.full(8, np.uint32(bits)).view(np.int32))
        if "popc" in asm:
            return Numbers(np.array([int(np.uint32(bits)).bit_count() for bits in args[0].array], np.int32))
        if "movmatrix" in asm:
            blocks = args[0].array.reshape(args[0].array.shape[0] // 8, 8, args[0].array.shape[1] // 8, 8)
            return Numbers(blocks.transpose(0, 3, 2, 1).reshape(args[0].array.shape))
        if "mul.f16x2" in asm:
            factor = np.uint16(int((re.findall("0x([0-9a-f]{4})", asm) or ["3c00"])[0], 16)).view(np.float16)
            return Numbers(args[0].array * args[1].array * factor)
        return _unpacked(asm, args, len(dtype))


def _unpacked(asm: str, words: list[Numbers], count: int) -> tuple[Numbers, ...]:
    """Runs instructions over pairs of neighbouring registers: each result is two float16 numbers, one of each."""
    axis = int(words[0].layout.reg_bases[0][1] != 0)
    registers = {}
    for number, each in enumerate(words):
        for half in range(2):
            taken = np.take(each.array, range(half, each.array.shape[axis], 2), axis)
            registers[f"${count + 2 * number + half}"] = taken.view(np.uint32)
    for line in filter(None, map(str.strip, re.sub(r"[{}]|\.reg \.b32 \w;", "", asm).split(";"))):
        name, target, *operands = line.replace(",", "").split()
        a, *others = (registers.get(each, each) for each in operands)
        if name in ("shr.b32", "shl.b32"):
            by = np.uint32(others[0])
            registers[target] = a >> by if name == "shr.b32" else a << by
        elif name == "and.b32":
            registers[target] = a & np.uint32(int(others[0], 16))
        elif name == "lop3.b32":
            assert others[2] == "0xe4"
            mask = np.uint32(int(others[1], 16))
            registers[target] = (a & mask) | (others[0] & ~mask)
        else:
            assert name == "prmt.b32", name
            halves = {"5": others[0], "7": others[0], "1": a, "3": a}
            low, high = others[1][4:], others[1][2:4]
            taken = [halves[pair[0]] >> np.uint32(16 if pair[0] in "37" else 0) for pair in (low, high)]
            registers[target] = (taken[0] & np.uint32(0xFFFF)) | (taken[1] << np.uint32(16))
    found = []
    for number in range(count):
        pair = registers[f"${number}"]
        halves = [(pair >> np.uint32(at) & np.uint32(0xFFFF)).astype(np.uint16) for at in (0, 16)]
        numbers = np.stack([half.view(np.float16) for half in halves], axis + 1)
        found.append(Numbers(numbers.reshape(words[0].array.shape)))
    return tuple(found)


def multiply(a: Numbers, b: Numbers, acc: Numbers) -> Numbers:
    """As tensor cores do: 16 products at a time, exact, are added, and what float32 cannot hold is dropped."""
    found = acc.array
    left, right = a.array.astype(np.float64), b.array.astype(np.float64)
    for at in range(0, left.shape[1], 16):
        exact = found + left[:, at : at + 16] @ right[at : at + 16]
        rounded = exact.astype(np.float32)
        found = np.where(np.abs(rounded) > np.abs(exact), np.nextafter(rounded, np.float32(0)), rounded)
    return Numbers(found)
