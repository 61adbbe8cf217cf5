"""How vector code is written for functions that numba compiles: rows of arrays, loops, and rearranged vectors.

Arrays' rows are contiguous, and bounds are the caller's care.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
"""Numbers of 32 bits in a vector."""

BYTE, HALF, WORD, SIZE = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT = ir.FloatType()
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(FLOAT, LANES)

Generated = tuple[Any, Callable[..., Any]]
"""What an intrinsic returns: its signature and what emits its code."""


def emits(result: Any, arguments: str) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that compiled ones call of one that emits its code, given a builder and the arguments.

    arguments: of each, whether it is an array of two dimensions (`rows`), which is given as `Rows`, a size (`i`), a
    float32 (`f`), a word (`w`), or an array and two sizes, row and column, which are given as one `Place` (`place`).
    result: its type; what emits returns a value, or a tuple of them, unless it is void.
    """
    words = arguments.replace("place", "rows i i").split()
    kinds = {"i": types.intp, "f": types.float32, "w": types.uint32}

    def made(emit: Callable[..., Any]) -> Any:
        def define(typing: Any, *given: Any) -> Generated:
            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                operands = (
                    Rows(context, builder, kind, value) if word == "rows" else value
                    for word, kind, value in zip(words, signature.args, values, strict=True)
                )
                found = emit(builder, *_placed(builder, arguments.split(), operands))
                if isinstance(found, tuple):
                    return context.make_tuple(builder, signature.return_type, found)
                return context.get_dummy_value() if result == types.void else found

            return result(*(kinds.get(word, own) for word, own in zip(words, given, strict=True))), generate

        define.__name__, define.__doc__ = emit.__name__, emit.__doc__
        names = ["typing", *(f"{word}_{number}" for number, word in enumerate(words))]
        named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        define.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return intrinsic(define)

    return made


def _placed(builder: Any, arguments: Iterable[str], operands: Iterator[Any]) -> Iterator[Any]:
    for word in arguments:
        own = next(operands)
        yield Place(builder, own, next(operands), next(operands)) if word == "place" else own


class Rows:
    """Loads and stores at rows and elements of a two-dimensional array whose rows are contiguous."""

    def __init__(self, context: Any, builder: Any, array_type: Any, value: Any) -> None:
        array = context.make_array(array_type)(context, builder, value)
        self.dtype = array_type.dtype
        self._builder = builder
        self._data = builder.ptrtoint(array.data, SIZE)
        self._row_bytes = cgutils.unpack_tuple(builder, array.strides)[0]
        self._item_bytes = SIZE(array_type.dtype.bitwidth // 8)

    def load(self, row: Any, element: Any, kind: Any) -> Any:
        return self._builder.load(self.address(row, element, kind), align=1)

    def load_rows(self, row: Any, element: Any, kind: Any, count: int) -> list[Any]:
        """From so many consecutive rows, with one multiplication for the first one's address."""
        builder, loaded = self._builder, []
        begin = builder.add(self._data, builder.mul(row, self._row_bytes))
        address = builder.add(begin, builder.mul(element, self._item_bytes))
        for number in range(count):
            if number:
                address = builder.add(address, self._row_bytes)
            loaded.append(builder.load(builder.inttoptr(address, kind.as_pointer()), align=1))
        return loaded

    def store(self, value: Any, row: Any, element: Any) -> None:
        self._builder.store(value, self.address(row, element, value.type), align=1)

    def address(self, row: Any, element: Any, kind: Any) -> Any:
        builder = self._builder
        begin = builder.add(self._data, builder.mul(row, self._row_bytes))
        address = builder.add(begin, builder.mul(element, self._item_bytes))
        return builder.inttoptr(address, kind.as_pointer())


class Place:
    """Numbers of a row from a column on."""

    def __init__(self, builder: Any, rows: Rows, row: Any, column: Any) -> None:
        self._builder, self.rows, self.row, self.column = builder, rows, row, column

    def load(self, element: Any, kind: Any) -> Any:
        return self.rows.load(self.row, self._builder.add(self.column, element), kind)

    def store(self, value: Any, element: Any, below: int = 0) -> None:
        """below: rows from that of the place to the one that is meant."""
        row = plus(self._builder, self.row, below)
        self.rows.store(value, row, self._builder.add(self.column, element))


@contextmanager
def each_vector(builder: Any, vectors: Any) -> Iterator[Any]:
    """A loop over so many vectors, with the number of elements before each."""
    with cgutils.for_range(builder, vectors) as loop:
        yield builder.mul(loop.index, SIZE(LANES))


def variable(builder: Any, first: Any) -> Any:
    """Memory for what a loop changes, which compilers keep in a register."""
    place = cgutils.alloca_once(builder, first.type)
    builder.store(first, place)
    return place


def call(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    function = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def ask_for(builder: Any, pointer: Any) -> None:
    """Asks for the cache line there."""
    to_read, second_level, data = WORD(0), WORD(2), WORD(1)
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, to_read, second_level, data)


def plus(builder: Any, number: Any, constant: int) -> Any:
    return builder.add(number, SIZE(constant)) if constant else number


def constants(kind: Any, number: float) -> Any:
    """A vector of one number."""
    return ir.Constant(kind, [number] * kind.count)


def repeated(builder: Any, number: Any) -> Any:
    """The number in every lane."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, number, WORD(0))
    return shuffled(builder, first, undefined, [0] * LANES)


def joined(builder: Any, parts: list[Any]) -> Any:
    """Vectors of one type, one after the other; 2 or 4 of them."""
    while len(parts) > 1:
        count = 2 * parts[0].type.count
        parts = [shuffled(builder, parts[i], parts[i + 1], range(count)) for i in range(0, len(parts), 2)]
    return parts[0]


def shuffled(builder: Any, low: Any, high: Any, order: Iterable[int]) -> Any:
    places = list(order)
    return builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(WORD, len(places)), places))


def in_lanes(builder: Any, low: Any, high: Any, order: Iterable[int]) -> Any:
    """Shuffles every lane of four words with the other vector's, whose words are 4 to 7 in `order`."""
    chosen = list(order)
    places = [i % 4 + 4 * lane + (LANES if i > 3 else 0) for lane in range(LANES // 4) for i in chosen]
    return shuffled(builder, low, high, places)


def gathered(builder: Any, vectors: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """One vector of 1, 2, 4 or 16: each one's numbers joined, as far as there is room, and those of all in turn."""
    for number in range(len(vectors).bit_length() - 1):
        vectors = [
            join(*(_halves(builder, low, high, number, half) for half in (0, 1)))
            for low, high in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _halves(builder: Any, low: Any, high: Any, number: int, half: int) -> Any:
    """Half of both vectors, side by side: words within lanes first, then lanes."""
    if number < 2:
        return in_lanes(builder, low, high, (ONES, TWOS)[number][half])
    chosen = [half, half + 2, half + 4, half + 6]
    return shuffled(builder, low, high, [4 * lane + word for lane in chosen for word in range(4)])


ONES = ((0, 4, 1, 5), (2, 6, 3, 7))
TWOS = ((0, 1, 4, 5), (2, 3, 6, 7))
"""How two lanes of four words are interleaved, by one word and by two: their lower and their upper halves."""


def reduced(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """One number of all lanes, joined half with half."""
    return each_reduced(builder, vector, join, 1)[0]


def each_reduced(builder: Any, vector: Any, join: Callable[[Any, Any], Any], numbers: int) -> list[Any]:
    """So many numbers, whose parts follow each other in turn."""
    count = vector.type.count
    while count > numbers:
        count //= 2
        lower, upper = (
            shuffled(builder, vector, vector, range(first, first + count)) for first in (0, count)
        )
        vector = join(lower, upper)
    return [builder.extract_element(vector, WORD(number)) for number in range(numbers)]
