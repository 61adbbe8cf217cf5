"""The machine: which one a figure was measured on, and memory for commands that use one context at a time."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from index_store.memory.arena import Arena
from index_store.memory.context_loading import choose_placement, placed_bytes
from index_store.memory.devices import context_device, default_budget, processor_name
from index_store.memory.placement import MemoryBytes, Placement, parse_placement
from index_store.store.description.manifest import Manifest


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


def arena_for(manifests: Iterable[Manifest], device: torch.device, placement: str) -> Arena:
    """An arena in which each of the contexts has room, one at a time, for a model on this device.

    placement: a name of `Placement`, or `auto`: on a GPU all of each context that fits into the memory which is for
    contexts by default, otherwise as `choose_placement` says. Raises InvalidArgumentError for another one, and for one
    that needs a GPU where there is none.
    """
    wanted, where = parse_placement(placement), context_device(device)
    listed = list(manifests)
    room = default_budget(device) if where is not None and wanted is None else None
    needed = []
    for manifest in listed:
        chosen = wanted or Placement.DEVICE
        if where is not None and room is not None:
            chosen = choose_placement(manifest, where, room)[0]
        needed.append(placed_bytes(manifest, where, chosen))
    budget = MemoryBytes(max(each.host for each in needed), max(each.device for each in needed))
    if room is not None:
        budget = MemoryBytes(budget.host, max(budget.device, room))
    return Arena(budget, device=where, placement=wanted)
