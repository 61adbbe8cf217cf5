"""Blocks of host memory, page-locked where a GPU will read them.

Memory is allocated first and locked after it has been filled: torch's own pinned allocator rounds every size up to a
power of two, and locking pages that are already there is fast.
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

ALIGNMENT = 256
"""Offsets inside a block are multiples of this many bytes, whatever the element type."""

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every CUDA context of the process

logger = logging.getLogger(__name__)


class PageLocker(Protocol):
    """Keeps a tensor's pages in physical memory, readable by a device. Both raise RuntimeError on failure."""

    def lock(self, tensor: Tensor) -> None: ...

    def unlock(self, tensor: Tensor) -> None: ...


class CudaPageLocker:
    """Registers memory with CUDA."""

    def __init__(self) -> None:
        runtime: Callable[[], Any] = torch.cuda.cudart
        self._runtime = runtime()

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


def default_page_locker() -> PageLocker | None:
    """CUDA's page locking where there is a GPU, otherwise none."""
    return CudaPageLocker() if torch.cuda.is_available() else None


class HostBlock:
    """One contiguous range of host memory, cut into tensors from its front."""

    def __init__(
        self,
        nbytes: int,
        locker: PageLocker | None = None,
        *,
        own_pages: bool = False,
        huge_pages: bool = False,
    ) -> None:
        """Reserves `nbytes`. Raises MemoryBudgetError when the machine refuses them.

        own_pages: the range shares no page with anything else, as ranges must that are locked one by one. huge_pages:
        of its own, and large ones where the system has them, for memory that cores read in short runs or that is to be
        touched and locked at once.
        """
        try:
            self._raw = (
                _map_pages(nbytes, huge_pages)
                if own_pages or huge_pages
                else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            )
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
        """Whether the pages are locked."""
        return self._unlock is not None and self._unlock.alive

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
