"""Which files the system keeps in memory: asked, filled and emptied, for benchmarks of what is read from a disk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path


def files_below(folder: Path) -> list[Path]:
    """Every file in the folder and those in it."""
    return [path for path in folder.rglob("*") if path.is_file()]


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Asks the system to forget the files; it may not."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(files: Sequence[Path]) -> float | None:
    """The share of the files' pages that is in the page cache; None where the system does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = total = 0
    for path in files:
        size = path.stat().st_size
        if not size:
            continue
        pages = -(-size // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * pages)()
        with path.open("rb") as file:
            mapped = mmap.mmap(
                file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        place = ctypes.c_char.from_buffer(mapped)
        told = libc.mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(size), states)
        del place
        mapped.close()
        if told:
            return None
        cached += sum(state & 1 for state in states)
        total += pages
    return cached / total if total else 0.0
