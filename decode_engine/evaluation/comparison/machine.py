"""Which machine and which software a figure was measured on."""

from __future__ import annotations

import ctypes
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from index_store.memory.devices import processor_name


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores and threads in use, and versions, for writing beside measured figures."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": version("numba"),
        "transformers": version("transformers"),
        "sparsekv": version("sparsekv"),
    }


def _memory_gib() -> int:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError):
        return 0


def return_free_memory() -> None:
    """Gives memory that was freed back to the operating system, where the C library is glibc.

    A long evaluation frees blocks of a hundred sizes between small results that stay; left alone, the holes between
    them add up to gigabytes.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
