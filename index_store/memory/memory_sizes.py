"""Sizes of memory: as people write them, and how much of it is free."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_CGROUP = Path("/sys/fs/cgroup")
_CONTAINER_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Of version 2 of control groups and of version 1: limit, use, and where of it files are that can be dropped."""
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([KMGT]i?B|)")


def parse_size(text: str) -> int:
    """Bytes from "8GiB", "500MB" or "1048576". Raises InvalidArgumentError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise InvalidArgumentError(
            f"size is {text!r}, expected a positive number of bytes with an optional unit, such as 8GiB or 500MB"
        )
    return size


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a GPU, or available to this process on the machine."""
    if device.type == "cuda":
        import torch  # takes seconds, which whoever only reads sizes need not wait for

        return int(torch.cuda.mem_get_info(device)[0])
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    sizes += _numbers(Path("/proc/meminfo"), "MemAvailable:", 1024)
    return max(0, min(sizes + _free_in_container()))


def _free_in_container() -> list[int]:
    """What the limit of a container leaves, nothing without one. Cached files that nobody used lately count as free."""
    free = []
    for limit_name, used_name, stat_name, label in _CONTAINER_FILES:
        used = _numbers(_CGROUP / used_name, "", 1)
        cached = _numbers(_CGROUP / stat_name, f"{label} ", 1)
        free += [limit - sum(used) + sum(cached) for limit in _numbers(_CGROUP / limit_name, "", 1)]
    return free


def _numbers(path: Path, label: str, unit: int) -> list[int]:
    """The number after the label at the beginning of a line, in bytes; nothing where file or number are not there."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    words = [line.removeprefix(label).split() for line in lines if line.startswith(label)]
    return [int(found[0]) * unit for found in words if found and found[0].isdigit()]
