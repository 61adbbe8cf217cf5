"""Compiles the kernels of one warp for compute capability 9.0, where there is no GPU; a command of its own.

Prints JSON, by kernel: bytes of shared and of local memory, and whether a processor has room for eight programs.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from decode_engine.kernels.coarse import search, warp_pass, warp_values
from decode_engine.kernels.coarse.search import CUT_REGISTERS, most_runs
from decode_engine.kernels.coarse.sizes import RUN, CoarseSizes
from index_store.indexes.coarse_rows.parameters import value_groups

_TYPES = {
    "q_ptr": "*bf16", "records_ptr": "*i64", "cuts_ptr": "*i32", "normalisers_ptr": "*fp32", "sampled_ptr": "*fp32",
    "lists": ("*i32", "*i32"), "leaves": ("*i32", "*i32", "*i32", "*fp32"), "partials": ("*fp32", "*fp32", "*fp32"),
    "scale_log2": "fp32", "width": "i32", "slots": "i32", "segments": "i32", "shares": "i32",
}  # fmt: skip
_COMMON = {"HEADS": 8, "EARLY": 1, "SEGMENTS": 256, "CHAINED": True}
_SIZES = {
    "weigh": (
        (4, 128, 4, 4), (4, 128, 3, 3), (4, 128, 2, 2), (8, 128, 4, 4), (4, 64, 4, 4), (16, 128, 3, 4), (16, 64, 4, 4),
        (8, 256, 4, 4), (8, 256, 2, 2),
    ),
    "list": ((4, 128, 4, 4), (16, 128, 3, 3), (8, 256, 4, 4)),
    "values": ((4, 128, 4, 2), (4, 128, 2, 3), (4, 64, 4, 4), (8, 256, 3, 3)),
    "everything": (
        (4, 128, 4, 4), (4, 128, 3, 3), (4, 128, 2, 2), (8, 128, 4, 4), (4, 64, 4, 4), (16, 128, 3, 4), (16, 64, 4, 4),
        (8, 256, 4, 4), (8, 256, 2, 2),
    ),
    "sample": ((4, 128, 4, 4), (4, 64, 4, 4), (16, 128, 3, 3), (8, 256, 4, 4)),
}  # fmt: skip
"""Query heads of a KV head, channels, and bits of keys and of values."""
_REGISTERS, _SHARED, _RESERVED, _PROGRAMS = 65536, 227 * 1024, 1024, 8
"""Of a processor, in bytes the last three: what programs share, and what each has besides; programs that are to fit, or
more where they are held to few registers."""


def kernels() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """What is compiled: a name, a kernel, what it is compiled for, and options."""
    launch = {"num_warps": 16, "maxnreg": CUT_REGISTERS}
    yield "cut", search.cut_kernel, {"CHUNKS": 16, "SAMPLED": 4096, "GROUP": 4}, launch
    for kind, sizes in _SIZES.items():
        for group, head_dim, key_bits, value_bits in sizes:
            groups = value_groups(head_dim, 128)
            layer = CoarseSizes(8, group, head_dim, key_bits, value_bits, groups, 2**17)
            if kind == "sample":
                runs = most_runs(head_dim, layer.columns)
                constants = {"TAKEN": 512, "RUNS": runs, "K": layer.constants(key_bits, RUN)}
                yield (
                    f"sample-{group}-{head_dim}-{key_bits}",
                    search.sample_kernel,
                    constants,
                    {"num_warps": 1},
                )
            else:
                of_keys = kind in ("weigh", "list")
                kernel = warp_pass.pass_kernel if of_keys else warp_values.values_kernel
                constants = {
                    "WEIGH": kind != "list",
                    "EXACT": kind == "everything",
                    "K": layer.passes(of_keys),
                }
                yield (
                    f"{kind}-{group}-{head_dim}-{key_bits}-{value_bits}",
                    kernel,
                    constants,
                    layer.launch(keys=of_keys),
                )


def figures(kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    constants = {name: value for name, value in (_COMMON | constants).items() if name in kernel.arg_names}
    signature = {name: _TYPES.get(name, "constexpr") for name in kernel.arg_names}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return resources(
        compiled, {128: 2 * _PROGRAMS, 168: 3 * _PROGRAMS // 2}.get(options.get("maxnreg", 0), _PROGRAMS)
    )


def resources(compiled: Any, programs: int) -> dict[str, Any]:
    """What a compiled kernel takes, and whether a processor has room for so many programs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(f"{name}:([0-9]+)", usage)[-1]) for name in ("REG", "STACK"))
    threads = 32 * compiled.metadata.num_warps * programs
    return {
        "shared": compiled.metadata.shared,
        "local": stack,
        "programs": -(-registers // 8) * 8 * threads <= _REGISTERS
        and (compiled.metadata.shared + _RESERVED) * programs <= _SHARED,
    }


if __name__ == "__main__":
    print(json.dumps({name: figures(*given) for name, *given in kernels()}))  # noqa: T201
