"""Triton's interpreter without what it spends most of its time on; its products have the same bits everywhere.

Every call of one jit function by another puts the interpreter's operations into `triton.language` once more; here a
launch does it once. Sums and products of integers are computed again in 64 bits, to find overflows, which are then not
told, because that is for debugging alone. And numpy's types are looked up once.

Each sum or product makes new types of blocks, compares them, and asks what type the result has, which takes longer
than the sum itself. Here a type of blocks is made once, what it is asked is remembered with it, and operands of one
type are taken as they are. Whatever is unusual goes Triton's own way, errors as well.

A library sums a row's products in an order that depends on the row's place among others, on some processors. On a GPU
it does not.
"""

from __future__ import annotations

import functools
import math
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


_MOST_NUMBERS, _LARGEST_NUMBER = 256, 1 << 14
"""Blocks of one number that are remembered for a type, and how many elements they have at most."""


def remember_types() -> None:
    """Has this process's interpreter remember types; its kernels compute what they did before."""
    _make_blocks_once()
    _ask_once()
    _check_sizes_quickly()
    _call_directly()
    _spread_and_convert_quickly()
    _take_operands_as_they_are()


def _make_blocks_once() -> None:
    """Types of blocks are made once, with the shape that tensors of this type have."""
    # Not above, here and below: triton reads where its kernels run when it is imported first.
    from triton.language import core
    from triton.runtime import interpreter

    made: dict[Any, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    initialize, to_ir = core.block_type.__init__, core.block_type.to_ir
    with_element_ty = core.block_type.with_element_ty

    def new(kind: Any, element_ty: Any = None, shape: Any = None) -> Any:
        if kind is not core.block_type:
            return object.__new__(kind)
        sizes = shape.values if type(shape) is core.tuple else shape
        if type(sizes) not in (list, tuple):
            sizes = core._unwrap_shape(shape)
        sizes = tuple([size.value if type(size) is core.constexpr else size for size in sizes])
        key = (element_ty.name, getattr(element_ty, "address_space", 0), sizes)
        known = made.get(key)
        if known is None or any(type(size) is not int for size in sizes):
            known = object.__new__(kind)
            initialize(known, element_ty, shape)
            known.sizes, known.others = sizes, {}
            made[key] = known
        return known

    def initialize_others(self: Any, element_ty: Any, shape: Any) -> None:
        if type(self) is not core.block_type:
            initialize(self, element_ty, shape)

    def with_element_once(self: Any, scalar_ty: Any) -> Any:
        if type(self) is not core.block_type or scalar_ty.is_ptr():
            return with_element_ty(self, scalar_ty)
        if scalar_ty.name not in self.others:
            self.others[scalar_ty.name] = with_element_ty(self, scalar_ty)
        return self.others[scalar_ty.name]

    def to_ir_once(self: Any, builder: Any) -> Any:
        if builder is not interpreter.interpreter_builder:
            return to_ir(self, builder)
        try:
            return self.as_interpreted
        except AttributeError:
            self.as_interpreted = to_ir(self, builder)
            return self.as_interpreted

    def initialize_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        try:
            self.shape, self.numel = type.shape_of_tensors
        except AttributeError:
            initialize_shape(self, handle, type)
            sizes = tuple([size.value for size in self.shape.values])
            type.shape_of_tensors = self.shape, self.numel = shapes.setdefault(
                sizes, (self.shape, self.numel)
            )

    initialize_shape = core.tensor.__init__
    core.block_type.__new__, core.block_type.__init__ = new, initialize_others
    core.block_type.to_ir, core.block_type.with_element_ty = to_ir_once, with_element_once
    core.tensor.__init__ = initialize_tensor


def _ask_once() -> None:
    """Questions about types that are answered without making lists, and at once of a type and itself."""
    from triton.language import core

    unwrap = core._unwrap_if_constexpr
    wrapping = (list, tuple, core.tuple, core.constexpr)

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        if kind is core.tensor or kind is int:
            return value
        return unwrap(value) if isinstance(value, wrapping) else value

    def quickly(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        return lambda self, other: self is other or equal(self, other)

    kinds = core.dtype
    signed, unsigned, floating = (
        frozenset(each) for each in (kinds.SINT_TYPES, kinds.UINT_TYPES, kinds.FP_TYPES)
    )
    standard, integers = frozenset(kinds.STANDARD_FP_TYPES), signed | unsigned
    core._unwrap_if_constexpr = unwrap_quickly
    kinds.is_int = lambda self: self.name in integers
    kinds.is_int_signed = lambda self: self.name in signed
    kinds.is_int_unsigned = lambda self: self.name in unsigned
    kinds.is_floating = lambda self: self.name in floating
    kinds.is_standard_floating = lambda self: self.name in standard
    for each in (core.dtype, core.pointer_type, core.block_type):
        each.__eq__ = quickly(each.__eq__)


def _check_sizes_quickly() -> None:
    """Whether an array's elements fit their type is seen from two numbers."""
    from triton.language import core
    from triton.runtime import interpreter

    names = [*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES, *core.dtype.FP_TYPES]
    most = {name: max(1, core.dtype(name).primitive_bitwidth // 8) for name in names}
    fits = interpreter._validate_np_data_size

    def fits_quickly(array: Any, dtype: Any) -> bool:
        return array.itemsize <= most.get(dtype.name, 0) or fits(array, dtype)

    def initialize(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr
        if data.itemsize > most.get(dtype.name, 0):
            self.__post_init__()

    interpreter._validate_np_data_size = fits_quickly
    interpreter.TensorHandle.__init__ = initialize


def _call_directly() -> None:
    """Operations are called without being asked in each call whether somebody interprets them."""
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic

    def put_in_place(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        operation = getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return operation(*arguments, **options)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = put_in_place


def _spread_and_convert_quickly() -> None:
    """Operands are broadcast and converted as numpy does it, without questions that have been answered before."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic, tensor, builder = interpreter.interpreter_semantic, core.tensor, interpreter.interpreter_builder
    broadcast, cast, to_tensor = semantic.broadcast_impl_value, semantic.cast, semantic.to_tensor
    computed_in, kinds = semantic.computation_type_impl, core.dtype
    named = {each.name: each for each in vars(core).values() if type(each) is kinds}
    integers, wide_numbers = {*kinds.SINT_TYPES, *kinds.UINT_TYPES} - {"int1"}, {"fp32", "fp64"}
    numbers = {*integers, "int1", "fp16", *wide_numbers}  # what numpy converts as Triton does

    @functools.cache
    def together(lhs: tuple[int, ...], rhs: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of both broadcast together, if they have as many dimensions and can be."""
        fit = len(lhs) == len(rhs) and all(a == b or 1 in (a, b) for a, b in zip(lhs, rhs, strict=True))
        return tuple(b if a == 1 else a for a, b in zip(lhs, rhs, strict=True)) if fit else None

    def spread(operand: Any, sizes: tuple[int, ...]) -> Any:
        if operand.type.sizes == sizes:
            return operand
        return tensor(
            builder.create_broadcast(operand.handle, sizes), core.block_type(operand.dtype, list(sizes))
        )

    def splat(operand: Any, like: Any) -> Any:
        wide = like.with_element_ty(operand.dtype)
        return tensor(builder.create_splat(wide, operand.handle), wide)

    def broadcast_if_unlike(lhs: Any, rhs: Any) -> Any:
        if lhs.type is rhs.type or lhs.shape is rhs.shape:
            return lhs, rhs
        left, right = type(lhs.type) is core.block_type, type(rhs.type) is core.block_type
        if left and right:
            sizes = together(lhs.type.sizes, rhs.type.sizes)
            return broadcast(lhs, rhs) if sizes is None else (spread(lhs, sizes), spread(rhs, sizes))
        return (lhs, splat(rhs, lhs.type)) if left else (splat(lhs, rhs.type), rhs)

    def cast_if_unlike(input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        if input.dtype is dst_ty:
            return input
        source, target = input.dtype.name, dst_ty.scalar.name
        plain = source in numbers and (target in wide_numbers or (target in integers and source in integers))
        if not plain or source == target or fp_downcast_rounding is not None:
            return cast(input, dst_ty, fp_downcast_rounding)
        result = input.type.with_element_ty(dst_ty.scalar)
        return tensor(builder.cast_impl(input.handle, result), result)

    def to_tensor_if_none(x: Any, check_type: bool = True) -> Any:
        return x if type(x) is tensor else to_tensor(x, check_type)

    @functools.cache
    def in_types(
        first: str, first_is_scalar: bool, second: str, second_is_scalar: bool, divided: bool
    ) -> Any:
        return computed_in(named[first], first_is_scalar, named[second], second_is_scalar, divided)

    def computed_in_once(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, divided: bool) -> Any:
        return in_types(a.name, a_is_scalar, b.name, b_is_scalar, divided)

    semantic.broadcast_impl_value = broadcast_if_unlike
    semantic.cast = cast_if_unlike
    semantic.to_tensor = to_tensor_if_none
    semantic.computation_type_impl = computed_in_once


def _take_operands_as_they_are() -> None:
    """Operands of one type are neither converted nor broadcast, and a number becomes a block once for each type."""
    from triton.language import core
    from triton.runtime import interpreter

    semantic, tensor, handle = interpreter.interpreter_semantic, core.tensor, interpreter.TensorHandle
    match, kinds = semantic.binary_op_type_checking_impl, core.dtype
    broadcast, cast, computed_in = (
        semantic.broadcast_impl_value,
        semantic.cast,
        semantic.computation_type_impl,
    )
    alike = {*kinds.SINT_TYPES, *kinds.UINT_TYPES, "fp32", "fp64"}  # what two of a type are computed in
    alike_unless_divided = {*alike, "fp16", "bf16"}

    def beside(operand: Any, number: Any, first: bool, divided: bool) -> Any:
        """The two with the number as a tensor like the operand, or both as another type that they are computed in."""
        kept = operand.type
        try:
            known = kept.numbers
        except AttributeError:
            known = kept.numbers = {}
        key = (type(number), number, divided)
        data = known.get(key)
        if data is None:
            pair = (number, operand) if first else (operand, number)
            lhs, rhs = match(*pair, False, False, True, divided)
            mine, other = (rhs, lhs) if first else (lhs, rhs)
            if (
                mine is not operand
                or other.type != kept
                or math.isnan(number)
                or operand.numel.value > _LARGEST_NUMBER
            ):
                return lhs, rhs
            if len(known) >= _MOST_NUMBERS:
                known.clear()
            data = known[key] = other.handle.data
            data.setflags(write=False)
        other = tensor(handle(data, operand.dtype), kept)
        return (other, operand) if first else (operand, other)

    def match_if_unlike(
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if not (arithmetic_check and (left or right)):
            return match(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if left and right and lhs.dtype.is_ptr() and allow_lhs_ptr and rhs.dtype.is_int():
            return broadcast(lhs, rhs)
        usual = alike if div_or_mod else alike_unless_divided
        if left and right:
            if lhs.dtype is rhs.dtype and lhs.dtype.name in usual:
                return broadcast(lhs, rhs)
            if not (lhs.dtype.is_ptr() or rhs.dtype.is_ptr()):
                result = computed_in(lhs.dtype, False, rhs.dtype, False, div_or_mod)
                return broadcast(cast(lhs, result), cast(rhs, result))
        elif left and type(rhs) in (int, float) and lhs.dtype.name in usual:
            return beside(lhs, rhs, False, div_or_mod)
        elif right and type(lhs) in (int, float) and rhs.dtype.name in usual:
            return beside(rhs, lhs, True, div_or_mod)
        return match(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantic.binary_op_type_checking_impl = match_if_unlike


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
