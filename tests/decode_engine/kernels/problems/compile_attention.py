"""Compiles kernels that attend to exact keys for compute capability 9.0, where there is no GPU; a command of its own.

Of groups and heads that are larger than the usual ones, and of lists in hundreds of segments. Prints JSON, by kernel
and shape: bytes of shared and of local memory, and whether a processor has room for as many programs as are launched.
"""

from __future__ import annotations

import json
from typing import Any

import triton.compiler
from triton.backends.compiler import GPUTarget

from decode_engine.kernels.attention.shared_attention import shared_shape
from decode_engine.kernels.families import coarse_refusal
from tests.decode_engine.kernels.problems import compile_for_gpu
from tests.decode_engine.kernels.problems.compile_warp_kernels import resources

SHAPES = ((4, 128), (9, 128), (16, 128), (2, 256), (8, 256), (9, 256), (16, 256))
"""Query heads of a KV head, and channels."""
KERNELS = ("shared_kernel", "attend_kernel", "window_kernel", "find_kernel")


def main() -> None:
    found: dict[str, dict[str, Any]] = {}
    compile_whole = triton.compiler.compile
    compile_for_gpu.pretend()
    where, shared = "", 2

    def compile_some(src: Any, target: GPUTarget, options: dict[str, Any]) -> object:
        name = src.fn.__name__
        if name in KERNELS:
            programs = shared if name == "shared_kernel" else 2
            found[f"{name} {where}"] = resources(compile_whole(src, target=target, options=options), programs)
        return object()

    triton.compiler.compile = compile_some
    with compile_for_gpu.InHostMemory():
        for shape in SHAPES:
            for planes in (False, True):
                where = f"{shape} {planes}"
                shared = shared_shape(*shape, planes, compile_for_gpu.SIZE).programs
                compile_for_gpu.take_steps(*shape, ("full",), planes=planes)
                if coarse_refusal(*shape, (4, 4), 1, compile_for_gpu.KEYS) is None:
                    compile_for_gpu.take_steps(*shape, ("refined",), "hybrid", planes=planes)
            compile_for_gpu.attend_window_of(*shape)
        where = "segments"
        compile_for_gpu.take_steps(4, 128, ("refined",), planes=True)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
