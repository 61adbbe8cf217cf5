"""Which cores are near a GPU: those of its NUMA node, divided among the GPUs of that node.

A process that runs there before it takes memory gets that of the node, too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")
_ASK = ("nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")


@dataclass(frozen=True, slots=True)
class _Gpu:
    """names: its number and its UUID. cores: of its node, ascending."""

    names: tuple[str, ...]
    cores: tuple[int, ...]


def cores_near(
    environment: Mapping[str, str], ask: Callable[[], str] | None = None, devices: Path = _DEVICES
) -> set[int] | None:
    """Cores for a process that sees one GPU by CUDA_VISIBLE_DEVICES, of those that this one may use.

    None where there is no such GPU, or nobody tells its node. ask: gives what `nvidia-smi` says.
    """
    seen = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not seen or "," in seen:
        return None
    try:
        told = (ask or _ask)()
        gpus = [_read(line, devices) for line in told.splitlines() if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    own = next((each for each in gpus if seen in each.names), None)
    if own is None or not own.cores:
        return None
    beside = [each for each in gpus if each.cores == own.cores]
    share, place = len(own.cores) // len(beside), beside.index(own)
    return set(own.cores[place * share : (place + 1) * share]) or None


def _ask() -> str:
    return subprocess.run(_ASK, capture_output=True, text=True, check=True, timeout=30).stdout


def _read(line: str, devices: Path) -> _Gpu:
    """Of a line "0, GPU-..., 00000000:18:00.0"."""
    index, uuid, bus = (part.strip() for part in line.split(","))
    listed = (devices / bus.lower()[-12:] / "local_cpulist").read_text().strip()
    usable = os.sched_getaffinity(0)
    return _Gpu((index, uuid), tuple(core for core in _cores(listed) if core in usable))


def _cores(listed: str) -> list[int]:
    """Of a list such as 0-15,32-47."""
    found: list[int] = []
    for part in filter(None, listed.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
