"""Which device computes, and how much of its memory contexts may take."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from index_store.errors import InvalidArgumentError
from index_store.memory.placement import MemoryBytes

HOST_BUDGET = 8 * 2**30
"""Bytes for contexts in host memory unless told otherwise."""

DEVICE_SHARE = 0.5
"""Of memory that is free once the model is loaded, a GPU's and the host's beside it, for contexts unless told
otherwise. The rest is for sessions, for what steps compute with, and for what is derived from contexts."""


def pick_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means; auto is cuda where there is one.

    Raises InvalidArgumentError for another name, and for cuda without a CUDA device.
    """
    available = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise InvalidArgumentError(f"--device is {name!r}, expected auto, cpu or cuda", field="device")
    if name == "cuda" and not available:
        raise InvalidArgumentError(
            "--device is cuda, but torch sees no CUDA device; use cpu or auto", field="device"
        )
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def describe_device(device: torch.device) -> str:
    """For people: `cpu`, or `cuda (NVIDIA H200)`."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def context_device(device: torch.device) -> torch.device | None:
    """Whose memory contexts are loaded into (see `context_loading`) for a model on this device; None for the host's."""
    return None if device.type == "cpu" else device


def default_budget(device: torch.device) -> int:
    """Bytes for contexts; on a GPU a share of what is free now."""
    if device.type == "cpu":
        return HOST_BUDGET
    free, _ = torch.cuda.mem_get_info(device)
    return int(DEVICE_SHARE * free)


def memory_budget(
    device: torch.device, host: int | None, on_device: int | None, free_host: int
) -> MemoryBytes:
    """Byte budgets of contexts where both are told, or by default where they are None.

    free_host: bytes of host memory that are free now; beside a GPU half of them are the default.
    """
    if device.type == "cpu":
        return MemoryBytes(host=HOST_BUDGET if host is None else host)
    return MemoryBytes(
        host=int(DEVICE_SHARE * free_host) if host is None else host,
        device=default_budget(device) if on_device is None else on_device,
    )


def finish(device: torch.device) -> None:
    """Returns when the device has done all that it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
