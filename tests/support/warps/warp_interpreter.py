"""Runs kernels written in Gluon, program by program, in numpy: what `TRITON_INTERPRET` does for those in Triton.

Tensors are logical, as the language has them, so that layouts change no result, with three exceptions. Votes see lanes:
a tile's eight keys are four lanes each. Products in inline assembly see tensors [8, 4] as a register of each lane. And
inline assembly over four registers at a time sees neighbours of [8, keys, ..]: all keys that there are, and then those
of the last axis. Integers divide as in C, and wrap.
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


def multiplied(asm: str, lanes: list[Any]) -> tuple[Numbers, ...]:
    """A product of tensor cores, by the registers of its operands, each [8, 4]: as PTX says which lane has what."""
    if "f16" in asm:
        rows, columns, before = [lanes[0], lanes[0], lanes[1], lanes[1]], lanes[2:4], lanes[4:]
        kinds: tuple[Any, Any] = (np.float16, np.float16)
    else:
        count = 4 if "k32" in asm else 2
        rows, columns, before = lanes[:count], lanes[count : count + count // 2], lanes[-4:]
        kinds = (np.uint8, np.int8 if "u8.s8" in asm else np.uint8)
    # [8, 4, numbers of a register] for each; those of a row, or of a column, lie along its four lanes.
    left, right = (
        [np.ascontiguousarray(each).view(kind).reshape(8, -1).astype(np.float64) for each in some]
        for some, kind in zip((rows, columns), kinds, strict=True)
    )
    upper, lower = np.hstack(left[::2]), np.hstack(left[1::2])
    exact = np.vstack([upper, lower]) @ np.hstack(right).T  # [16, 8]
    found = []
    for at, register in enumerate(before):
        own = exact[at // 2 * 8 : at // 2 * 8 + 8, at % 2 :: 2]
        total = own + register.astype(np.float64)
        found.append(Numbers(total.astype(np.float32 if "f16" in asm else np.int32)))
    return tuple(found)


def registers_run(asm: str, args: list[Numbers], dtypes: Any) -> Any:
    """Runs instructions over bytes and pairs of float16 numbers, a register of each lane at a time."""
    outputs = len(dtypes) if isinstance(dtypes, tuple) else 1
    registers: dict[str, Any] = {}
    for number, each in enumerate(args):
        registers[f"${outputs + number}"] = np.ascontiguousarray(each.array)

    def pair(name: str) -> Any:
        return registers[name].view(np.float16).reshape(*registers[name].shape, 2)

    for line in filter(None, map(str.strip, re.sub(r"^\{|\}$|\.reg \.\w+ \w;", "", asm).split(";"))):
        name, operands = line.split(None, 1)
        target, *others = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
        if name == "mov.b32" and target.startswith("{"):
            for at, half in enumerate(re.findall(r"\w+", target)):
                registers[half] = pair(others[0])[..., at]
        elif name == "mov.b32" and others[0].startswith("{"):
            both = [registers[half] for half in re.findall(r"\w+", others[0])]
            registers[target] = np.stack(both, -1).view(np.int32)[..., 0]
        elif name == "mov.b32":
            taken = others[0]
            registers[target] = (
                np.array(int(taken, 16), np.uint32).view(np.int32)[None]
                if taken[0] == "0"
                else registers[taken]
            )
        elif name == "prmt.b32":
            four = np.stack(
                [registers[each].view(np.uint8).reshape(*registers[each].shape, 4) for each in others[:2]], -2
            )
            eight = four.reshape(*four.shape[:-2], 8)
            chosen = [int(digit, 16) for digit in reversed(others[2][2:])]
            registers[target] = np.ascontiguousarray(eight[..., chosen]).view(np.int32)[..., 0]
        elif name == "cvt.f32.f16":
            registers[target] = registers[others[0]].astype(np.float32)
        elif name == "cvt.rn.f16.f32":
            with np.errstate(over="ignore"):
                registers[target] = registers[others[0]].astype(np.float16)
        elif name.endswith(".f16"):
            numbers = [registers[each] for each in others]
            registers[target] = np.abs(numbers[0]) if name.startswith("abs") else np.maximum(*numbers)
        else:
            numbers = [pair(each).astype(np.float64) for each in others]
            compute = {
                "abs": np.abs, "max": np.maximum, "mul": np.multiply, "add": np.add,
                "sub": np.subtract, "fma": lambda a, b, c: a * b + c,
            }[name.split(".")[0]]  # fmt: skip
            with np.errstate(all="ignore"):
                registers[target] = np.ascontiguousarray(compute(*numbers).astype(np.float16)).view(np.int32)[
                    ..., 0
                ]
    shape = args[0].array.shape
    found = [Numbers(np.broadcast_to(registers[f"${at}"], shape)) for at in range(outputs)]
    return tuple(found) if isinstance(dtypes, tuple) else found[0]


def by_fours(asm: str, numbers: Numbers, dtypes: Any) -> tuple[Numbers, ...]:
    """Runs instructions over four int32 numbers at a time, which make a register of four bytes for each result.

    numbers: [8, keys, tiles, columns]; two or four keys, and where these are two, columns, are neighbours.
    """
    lanes, keys, tiles, columns = numbers.array.shape
    width = 4 // min(keys, 4)
    apart = numbers.array.reshape(lanes, -1, 4 // width, tiles, columns // width, width)
    order = (0, 1, 3, 4, 5, 2)
    fours = np.ascontiguousarray(apart.transpose(order)).reshape(-1, 4)
    registers = [Numbers(fours[:, at]) for at in range(4)]
    found = registers_run(asm, registers, (None,) * len(dtypes))
    bytes_of = [
        np.ascontiguousarray(each.array).view(np.int8).reshape(*np.array(apart.shape)[list(order)])
        for each in found
    ]
    back = np.argsort(order)
    return tuple(Numbers(each.transpose(back).reshape(numbers.array.shape)) for each in bytes_of)


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
