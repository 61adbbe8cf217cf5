"""Compiles the kernels of one warp for compute capability 9.0, where there is no GPU; a command of its own.

Prints JSON, by kernel: bytes of shared and of local memory, and whether a processor has room for eight programs.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from decode_engine.kernels.coarse.warp import warp_cut, warp_pass, warp_sample

_TYPES = {
    "q_ptr": "*bf16", "records_ptr": "*i64", "cuts_ptr": "*i32", "ids_ptr": "*i32",
    "counts_ptr": "*i32", "normalisers_ptr": "*fp32", "sums_ptr": "*fp32", "peaks_ptr": "*fp32",
    "totals_ptr": "*fp32", "sampled_ptr": "*fp32", "scale_log2": "fp32", "width": "i32",
    "slots": "i32",
}  # fmt: skip
_COMMON = {"HEADS": 8, "GROUP": 4, "X": 8, "TILE": 32, "AHEAD": 2, "CHAINED": True}
_EVERYTHING = {"ATTEND": True, "EXACT": True}
_LIST = {"ATTEND": False, "EXACT": False}
_ATTEND = {"ATTEND": True, "EXACT": False}
_4, _4_2, _2, _3, _4_3 = (
    {"KEY_BITS": keys, "VALUE_BITS": values} for keys, values in ((4, 4), (4, 2), (2, 2), (3, 3), (4, 3))
)
_SAMPLE = {"TAKEN": 512, "RUNS": 4, "RUN": 16}
_KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "everything": (warp_pass.pass_kernel, {"DIM": 128, **_4, **_EVERYTHING}),
    "everything-3": (warp_pass.pass_kernel, {"DIM": 128, **_3, **_EVERYTHING}),
    "everything-4-3": (warp_pass.pass_kernel, {"DIM": 128, **_4_3, **_EVERYTHING}),
    "attend-3": (warp_pass.pass_kernel, {"DIM": 128, **_3, **_ATTEND}),
    "everything-64": (warp_pass.pass_kernel, {"DIM": 64, **_4, **_EVERYTHING}),
    "list": (warp_pass.pass_kernel, {"DIM": 128, **_2, **_LIST}),
    "list-64": (warp_pass.pass_kernel, {"DIM": 64, **_4, **_LIST}),
    "attend": (warp_pass.pass_kernel, {"DIM": 128, **_4_2, **_ATTEND}),
    "attend-64": (warp_pass.pass_kernel, {"DIM": 64, **_4, **_ATTEND}),
    "cut": (warp_cut.cut_kernel, {"CHUNKS": 16, "SAMPLED": 4096}),
    "sample": (warp_sample.sample_kernel, {"DIM": 128, **_4, **_SAMPLE}),
    "sample-3": (warp_sample.sample_kernel, {"DIM": 128, **_3, **_SAMPLE}),
    "sample-64": (warp_sample.sample_kernel, {"DIM": 64, **_4, **_SAMPLE}),
}
_REGISTERS, _WARPS = 65536, 8


def figures(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    constants = {name: value for name, value in (_COMMON | constants).items() if name in kernel.arg_names}
    signature = {name: _TYPES.get(name, "constexpr") for name in kernel.arg_names}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": constants.get("CHUNKS", 1)}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.findall(f"{name}:([0-9]+)", usage)[-1]) for name in ("REG", "STACK"))
    return {
        "shared": compiled.metadata.shared,
        "local": stack,
        "programs": -(-registers // 8) * 8 * 32 * _WARPS <= _REGISTERS,
    }


if __name__ == "__main__":
    print(json.dumps({name: figures(*given) for name, given in _KERNELS.items()}))  # noqa: T201
