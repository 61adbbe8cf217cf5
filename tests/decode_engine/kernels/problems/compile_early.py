"""Compiles the readers of announcements for compute capability 9.0, where there is no GPU; a command of its own.

Prints JSON: how often cells are looked at in a round, and bytes of local memory, by rows of a tile.
"""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decode_engine.kernels.slots.early_rows import REGISTERS, early_kernel
from tests.decode_engine.kernels.problems.compile_warp_kernels import resources

_TYPES = {
    "records_ptr": "*i64", "cells_ptr": "*i64", "counts_ptr": "*i32", "brought_ptr": "*i32", "rows": "i32",
    "searchers": "i32", "limit_ns": "i64",
}  # fmt: skip
_CONSTANTS = {"QUEUES": 48, "CELLS": 512, "HEADS": 8, "ON_DEVICE": True}
_SIZES = ((4, 256), (8, 128), (16, 64), (32, 32))
"""Rows of a tile, and their words."""

if __name__ == "__main__":
    signature = {name: _TYPES.get(name, "constexpr") for name in early_kernel.arg_names}
    found = {}
    for tile, words in _SIZES:
        for shared in (False, True):
            constants = _CONSTANTS | {"TILE": tile, "WORDS": words, "SHARED": shared}
            source = ASTSource(fn=early_kernel, signature=signature, constexprs=constants)
            options = {"num_warps": 1, "maxnreg": REGISTERS}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            looks = len(re.findall(r"tt\.atomic_rmw or, .*i64", compiled.asm["ttgir"]))
            found[f"{tile}-{words}-{shared}"] = {"looks": looks, **resources(compiled, 16)}
    print(json.dumps(found))  # noqa: T201
