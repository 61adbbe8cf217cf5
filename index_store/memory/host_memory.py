"""Blocks of host memory, locked where a GPU will read them.

What a GPU reads row by row lies in memory that it maps in large pages (`mapped_memory`), where CUDA has it. Other
memory is allocated first and page-locked after it has been filled: torch's own pinned allocator rounds every size up to
a power of two, and locking pages that are already there is fast.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from index_store.errors import MemoryBudgetError
from index_store.memory.mapped_memory import device_view, is_mapped, map_memory

ALIGNMENT = 256
"""Offsets inside a block are multiples of this many bytes, whatever the element type."""

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of the process

logger = logging.getLogger(__name__)


class PageLocker(Protocol):
    """Keeps memory where it is, readable by a device. `lock` and `unlock` raise RuntimeError on failure."""

    def map(self, nbytes: int) -> Tensor | None:
        """Memory that is locked as long as it lives, and that the device maps in large pages; None if there is none."""

    def lock(self, tensor: Tensor) -> None: ...

    def unlock(self, tensor: Tensor) -> None: ...


class CudaPageLocker:
    """Locks memory by CUDA. device: that reads what is mapped."""

    def __init__(self, device: torch.device | None = None) -> None:
        runtime: Callable[[], Any] = torch.cuda.cudart
        self._runtime = runtime()
        self._device = device or torch.device("cuda")
        self._refused = False

    def map(self, nbytes: int) -> Tensor | None:
        try:
            return map_memory(nbytes, self._device)
        except RuntimeError as error:
            if not self._refused:  # once is enough
                logger.warning(
                    "host memory is page-locked instead of mapped, gathers will be slower: %s", error
                )
            self._refused = True
            return None

    def lock(self, tensor: Tensor) -> None:
        code = self._runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), _PORTABLE)
        self._check(int(code), "cudaHostRegister")

    def unlock(self, tensor: Tensor) -> None:
        self._check(int(self._runtime.cudaHostUnregister(tensor.data_ptr())), "cudaHostUnregister")

    @staticmethod
    def _check(code: int, call: str) -> None:
        if code == 0:
            return
        # CUDA also remembers the error and gives it to whoever launches next: let that be this launch.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise RuntimeError(f"{call} returned CUDA error {code}")


def default_page_locker(device: torch.device | None = None) -> PageLocker | None:
    """CUDA's where there is a GPU, otherwise none. device: that reads; the current GPU by default."""
    return CudaPageLocker(device) if torch.cuda.is_available() else None


def is_readable(tensor: Tensor) -> bool:
    """Whether a GPU can read a tensor of the host in place."""
    return tensor.is_pinned() or is_mapped(tensor)


def copy_source(tensor: Tensor, device: torch.device) -> Tensor:
    """What to copy from to have a tensor of the host on a device: itself, or the device's view of it."""
    return device_view(tensor, device) if device.type == "cuda" and is_mapped(tensor) else tensor


class HostBlock:
    """One contiguous range of host memory, cut into tensors from its front."""

    def __init__(
        self,
        nbytes: int,
        locker: PageLocker | None = None,
        *,
        huge_pages: bool = False,
        gathered: bool = False,
    ) -> None:
        """Reserves `nbytes`. Raises MemoryBudgetError when the machine refuses them.

        huge_pages: the range shares no page with anything else, as ranges must that are locked one by one, and has
        large pages where the system has them, for memory that cores read in short runs or that is to be touched and
        locked at once. gathered: pages of its own, too, for a device that reads rows of it in place; mapped by the
        locker if it can, and locked from the beginning then.
        """
        mapped = locker.map(paged(nbytes)) if gathered and locker is not None else None
        self._mapped = mapped is not None
        try:
            if mapped is not None:
                self._raw = mapped
            elif huge_pages or gathered:
                self._raw = _map_pages(nbytes, huge_pages)
            else:
                self._raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except (RuntimeError, OSError, OverflowError) as error:
            raise MemoryBudgetError(
                f"the machine refused {nbytes} bytes of host memory; free some, or ask for less (--memory of a server)",
                needed=nbytes,
            ) from error
        self._locker = locker
        self._unlock: weakref.finalize[..., HostBlock] | None = None
        self._used = 0

    @property
    def locked(self) -> bool:
        """Whether the pages are locked, so that a device can read them."""
        return self._mapped or (self._unlock is not None and self._unlock.alive)

    @property
    def locked_bytes(self) -> int:
        """Bytes whose pages are locked."""
        return self._raw.numel() if self.locked else 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part of the block as an uninitialised contiguous tensor."""
        start = self._used
        count = torch.Size(shape).numel() * dtype.itemsize
        self._used = start + aligned(count)
        return self._raw[start : start + count].view(dtype).view(shape)

    def lock(self) -> None:
        """Locks the pages. Where that fails the block stays usable, pageable; the reason is logged."""
        if self._locker is None or self.locked:
            return
        try:
            self._locker.lock(self._raw)
        except RuntimeError as error:
            logger.warning("%d bytes stay pageable, transfers will be slower: %s", self._raw.numel(), error)
            return
        # The finalizer refers to the memory, which therefore is never freed while it is locked.
        self._unlock = weakref.finalize(self, _unlock, self._locker, self._raw)
        self._unlock.atexit = False

    def release(self) -> None:
        """Unlocks and lets go of the memory, which is freed once no tensor refers to it."""
        if self._unlock is not None:
            self._unlock()
        self._mapped = False
        self._raw = torch.empty(0, dtype=torch.uint8, device="cpu")


def _map_pages(nbytes: int, huge: bool) -> Tensor:
    """Whole pages of their own, which go back to the system when no tensor refers to them."""
    pages = mmap.mmap(-1, paged(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):  # not everywhere
        with suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _unlock(locker: PageLocker, raw: Tensor) -> None:
    try:
        locker.unlock(raw)
    except RuntimeError as error:
        logger.warning("%d bytes could not be unlocked: %s", raw.numel(), error)


def aligned(nbytes: int) -> int:
    """The size rounded up to the alignment of a block's parts."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def paged(nbytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
