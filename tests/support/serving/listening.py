"""Where processes take connections."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same in IPv6, and ::1, as the kernel writes them."""


def listeners(root: int) -> list[str]:
    """Addresses at which a process and all that come from it take connections."""
    parents = {
        int(entry.name): int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (entry / "stat").exists()
    }
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    sockets: set[str] = set()
    for pid in family:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                sockets.add(os.readlink(entry))
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
