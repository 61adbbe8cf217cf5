"""Which vectors compiled loops take."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json
import index_store.launch
import numba
import numpy as np
from numba.core import codegen

@numba.njit
def add(a, b):
    for i in range(len(a)):
        a[i] += b[i]

add(np.zeros(64, np.uint16), np.ones(64, np.uint16))
print(json.dumps(["zmm" in add.inspect_asm(add.signatures[0]), "+avx512bw" in codegen.get_host_cpu_features()]))
"""


def wide_and_possible(features: str | None) -> tuple[bool, bool]:
    """Whether a loop took vectors of 512 bits, and whether the processor has them."""
    environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CPU_FEATURES"}
    if features is not None:
        environment["NUMBA_CPU_FEATURES"] = features
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    wide, possible = json.loads(result.stdout)
    return wide, possible


def test_loops_take_512_bits_where_the_processor_has_them() -> None:
    wide, possible = wide_and_possible(None)
    assert wide == possible


def test_what_the_environment_says_about_the_processor_counts() -> None:
    wide, _ = wide_and_possible("-avx512f")
    assert not wide
