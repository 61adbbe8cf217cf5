"""Loops compiled by numba: how they are compiled, where they run, and how several threads start them."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import PYFUNCTYPE, c_int
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir
from numba import carray, get_num_threads, set_num_threads, threading_layer, types
from numba.core import cgutils, event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import AnalysisPass, register_pass
from numba.core.typed_passes import NativeLowering
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from index_store.compiled.loop_cache import LoopCache


class PartCompiler(CompilerBase):  # type: ignore[misc]
    """The usual passes, but the code is only kept for those that call the function."""

    def define_pipelines(self) -> list[Any]:
        state = self.state
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        passes = DefaultPassBuilder.define_nopython_pipeline(state)
        passes.add_pass_after(_OfferPart, NativeLowering)
        passes.finalize()
        return [passes]


class _Part(JITCodeLibrary):  # type: ignore[misc]
    """Code that is neither optimised nor made machine code by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=False, analysis_only=True)
class _OfferPart(AnalysisPass):  # type: ignore[misc]
    """Lets compiled functions call this one."""

    _name = "offer_part"

    def __init__(self) -> None:
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        never: dict[str, str] = {}
        entry = (
            never.popitem
        )  # numba knows functions by what Python calls; this raises KeyError, should somebody do so
        state["cr"] = state["cr"]._replace(cfunc=entry)
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        return False


_SIZE, _BYTES = ir.IntType(64), cgutils.voidptr_t
_RUN = ir.FunctionType(ir.VoidType(), [_BYTES.as_pointer(), _SIZE.as_pointer(), _SIZE.as_pointer(), _BYTES])
"""What numba's threads call: arguments' places, counts, bytes from one to the next, and data."""


@intrinsic
def spread(typing: Any, task: Any, count: Any, arguments: Any) -> tuple[Any, Callable[..., Any]]:
    """`spread(task, count, arguments)`: task(n, *arguments) for all n below count, on as many threads as are set.

    Each thread gets consecutive ones; where one thread is set, it takes them all without a parallel loop, which takes
    several microseconds to begin. To be called in loops that `launch` starts; task is compiled, too, and returns
    nothing. Raises RuntimeError where one raises.
    """
    packed = types.BaseTuple.from_types([types.unliteral(each) for each in arguments])
    task.get_call_type(typing, (types.int64, *packed), {})
    compiled = task.dispatcher.overloads[(types.int64, *packed)]
    get_num_threads()  # names the functions that are called below

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        context.add_linking_libs([compiled.library])
        shared = ir.LiteralStructType([context.get_value_type(packed), _SIZE, _SIZE, _SIZE])
        run = _emit_run(context, builder.module, compiled, shared, len(packed))
        threads = builder.call(_external(builder.module, "get_num_threads", ir.FunctionType(_SIZE, [])), [])
        data = cgutils.alloca_once(builder, shared)
        given = context.cast(builder, values[2], arguments, packed)
        for place, value in enumerate((given, values[1], threads, _SIZE(0))):
            builder.store(value, cgutils.gep_inbounds(builder, data, 0, place))
        # A thread's only argument is its number: a place from nowhere on, one byte from the next one's.
        numbers, steps = cgutils.alloca_once(builder, _BYTES), cgutils.alloca_once(builder, _SIZE)
        builder.store(_BYTES(None), numbers)
        builder.store(_SIZE(1), steps)
        counts = cgutils.alloca_once(builder, _SIZE, size=2)
        builder.store(threads, counts)
        builder.store(_SIZE(0), builder.gep(counts, [_SIZE(1)]))
        kind = ir.FunctionType(ir.VoidType(), [_BYTES] * 5 + [_SIZE] * 3)
        parallel_for = _external(builder.module, "numba_parallel_for", kind)
        parts = [builder.bitcast(each, _BYTES) for each in (run, numbers, counts, steps, data)]
        with builder.if_else(builder.icmp_signed("==", threads, _SIZE(1))) as (alone, together):
            with alone:
                builder.call(run, [numbers, counts, steps, parts[-1]])
            with together:
                builder.call(parallel_for, [*parts, _SIZE(1), _SIZE(1), threads])
        failed = builder.load(cgutils.gep_inbounds(builder, data, 0, 3))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", failed, _SIZE(0))):
            context.call_conv.return_user_exc(builder, RuntimeError, ("a task of a compiled loop raised",))
        return context.get_dummy_value()

    return types.void(task, types.int64, arguments), generate


def _emit_run(context: Any, module: Any, compiled: Any, shared: Any, count: int) -> Any:
    """A function that runs the tasks of some threads."""
    name = module.get_unique_name(f"run.{compiled.fndesc.llvm_func_name}")
    function = ir.Function(module, _RUN, name=name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    places, counts, _, pointer = function.args
    data = builder.bitcast(pointer, shared.as_pointer())
    given, tasks, threads, failed = (cgutils.gep_inbounds(builder, data, 0, place) for place in range(4))
    arguments = cgutils.unpack_tuple(builder, builder.load(given), count)
    tasks, threads = builder.load(tasks), builder.load(threads)
    first, some = builder.ptrtoint(builder.load(places), _SIZE), builder.load(counts)
    begin = builder.sdiv(builder.mul(tasks, first), threads)
    end = builder.sdiv(builder.mul(tasks, builder.add(first, some)), threads)
    callee = context.declare_function(module, compiled.fndesc)
    with cgutils.for_range_slice(builder, begin, end, _SIZE(1)) as (number, _):
        status, _ = context.call_conv.call_function(
            builder, callee, compiled.fndesc.restype, compiled.fndesc.argtypes, [number, *arguments]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            builder.store(_SIZE(1), failed)
    builder.ret_void()
    return function


def _external(module: Any, name: str, kind: Any) -> Any:
    return cgutils.get_or_insert_function(module, kind, name)


__all__ = [
    "byte_table",
    "compiling_told",
    "get_num_threads",
    "int16_table",
    "launch",
    "njit",
    "on_host",
    "set_num_threads",
    "spread",
    "task_loop",
    "thread_count",
]

_NUMBERS = {
    "f4": types.float32,
    "i8": types.int64,
    "i4": types.int32,
    "i2": types.int16,
    "i1": types.int8,
    "u2": types.uint16,
    "u1": types.uint8,
    "b1": types.boolean,
}

F4 = NDArray[np.float32]
B1 = NDArray[np.bool_]
I1 = NDArray[np.int8]
I2 = NDArray[np.int16]
I4 = NDArray[np.int32]
I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
U4 = NDArray[np.uint32]
"""Arrays in loops, by numpy's names of their numbers, as `task_loop` has them."""

_workqueue_guard = threading.Lock()

_WORTH = 100_000
"""Nanoseconds of work that other threads are woken for, which takes about half as long."""


def njit(declared: str = "", *, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compiles a function when it is first called. The GIL is free while it runs.

    declared: types of the arguments of a loop that Python calls: a number's kind (`i8`), or `f4x3` for contiguous
    arrays of three dimensions. Such a loop is kept on disk (`index_store.compiled`), and can be compiled before it is
    called. What loops call needs no declaration and becomes part of them. cache: keeps a loop without one.
    """

    def compiled(function: Callable[..., Any]) -> Any:
        entry = declared or cache
        own = {} if entry else {"pipeline_class": PartCompiler}
        loop = numba.njit(nogil=True, **own, **options)(function)
        if entry:
            loop.declared = tuple(_type_of(each) for each in declared.split())
            loop._cache = LoopCache(function)
        return loop

    return compiled


def task_loop(declared: str, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Compiles a task, a function of its number and of arguments, to a loop that Python calls.

    Called with a count and the arguments, it runs all tasks of a number below the count, as `spread` does. declared:
    types of the arguments. numba compiles functions of named arguments alone, so that one is written for every task.
    """

    def compiled(task: Callable[..., None]) -> Any:
        name, names = task.__name__, ", ".join(list(inspect.signature(task).parameters)[1:])
        scope = {"spread": spread, "task": njit(**options)(task), "__name__": task.__module__}
        exec(f"def {name}(count, {names}):\n    spread(task, count, ({names},))", scope)
        return njit(f"i8 {declared}")(scope[name])

    return compiled


def _type_of(word: str) -> Any:
    number, _, dimensions = word.partition("x")
    return types.Array(_NUMBERS[number], int(dimensions), "C") if dimensions else _NUMBERS[number]


def on_host(tensor: Tensor) -> bool:
    """Whether the compiled kernels can read the tensor; their eager references run on any device."""
    return tensor.device.type == "cpu"


def thread_count() -> int:
    """How many threads a parallel kernel of this thread takes."""
    return _thread_numbers()[0]()


def launch(kernel: Callable[..., None], *args: object, work: float = math.inf) -> None:
    """Runs a parallel kernel; the GIL is free meanwhile.

    work: nanoseconds that one thread takes for it, to within a factor of two or so; of several parallel loops, for one
    of them on average. It says whether one thread takes all of it or all threads share it: OpenMP ends threads that a
    smaller team has no use for, and starts them anew. What a kernel computes does not depend on their number.

    numba's fallback threading layer, workqueue, aborts the process when two threads enter it at once, so there launches
    take turns.
    """
    ask, tell, by_turns = _thread_numbers()
    most = ask()
    alone = work < _WORTH and most > 1
    if alone:
        tell(1)
    try:
        if not by_turns:
            kernel(*args)
        else:
            with _workqueue_guard:
                kernel(*args)
    finally:
        if alone:
            tell(most)


@cache
def _thread_numbers() -> tuple[Callable[[], int], Callable[[int], None], bool]:
    """What says how many threads this thread's loops take, what sets it, and whether launches have to take turns.

    They are what numba's own functions call after two locks and a check, which a step would pass a thousand times.
    """
    get_num_threads()  # chooses the layer, where that was not done yet
    ask = PYFUNCTYPE(c_int)(llvm.address_of_symbol("get_num_threads"))
    tell = PYFUNCTYPE(None, c_int)(llvm.address_of_symbol("set_num_threads"))
    return ask, tell, threading_layer() == "workqueue"


@intrinsic
def _pointer(typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@njit()
def int16_table(address: int, rows: int, width: int) -> I2:
    """[rows, width] int16 at an address, for loops over tables of many sessions; whoever calls keeps them alive."""
    return carray(_pointer(address), (rows, width), np.int16)  # type: ignore[no-any-return]


@njit()
def byte_table(address: int, rows: int, width: int) -> U1:
    """[rows, width] uint8 at an address, likewise."""
    return carray(_pointer(address), (rows, width), np.uint8)  # type: ignore[no-any-return]


@contextmanager
def compiling_told(say: Callable[[str, str], None]) -> Iterator[None]:
    """Inside, each loop that this process compiles is told by its name, as a part of the phase "compile loops"."""

    class Told(event.Listener):  # type: ignore[misc]
        def on_start(self, found: Any) -> None:
            say("compile loops", found.data["dispatcher"].py_func.__name__)

        def on_end(self, found: Any) -> None:
            pass

    with event.install_listener("numba:compile", Told()):
        yield
