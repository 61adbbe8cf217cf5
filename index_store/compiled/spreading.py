"""How a compiled loop shares its tasks out among threads.

numba's own way, `parallel=True`, compiles what tasks run three times, each time with all that it calls, and checks of
shapes besides: more than half of all the time that loops took to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import get_num_threads, types
from numba.core import cgutils
from numba.extending import intrinsic

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
