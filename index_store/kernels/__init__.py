"""Loops compiled by numba, and kernels that build indexes on a GPU."""

from numba.core import codegen, config


def _prefer_wide_vectors() -> None:
    """Lets loops take vectors of 512 bits where the processor has them, unless NUMBA_CPU_FEATURES says something else.

    LLVM takes 256 on Intel's, for the sake of old ones whose clock fell with 512. Sums of tables on current ones take
    a quarter less time with 512 (docs/offload.md).
    """
    features = codegen.get_host_cpu_features()
    if config.CPU_FEATURES is None and "+avx512bw" in features.split(","):
        config.CPU_FEATURES = f"{features},-prefer-256-bit"


_prefer_wide_vectors()
