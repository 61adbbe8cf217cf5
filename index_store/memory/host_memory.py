"""Blocks of host memory, locked where a GPU will read them.

What a GPU reads row by row lies in memory that it maps in large pages (`map_memory`), where CUDA has it. Other
memory is allocated first and page-locked after it has been filled: torch's own pinned allocator rounds every size up to
a power of two, and locking pages that are already there is fast.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from index_store.errors import MemoryBudgetError

_ATTACH_GLOBAL = 1
_STAY_AT, _READ_BY = 3, 5  # CU_MEM_ADVISE_SET_PREFERRED_LOCATION, CU_MEM_ADVISE_SET_ACCESSED_BY
_HOST = -1  # CU_DEVICE_CPU
_CONCURRENT = 89  # CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
_IS_MANAGED = 8  # CU_POINTER_ATTRIBUTE_IS_MANAGED

logger = logging.getLogger(__name__)


def map_memory(nbytes: int, device: torch.device) -> Tensor:
    """`nbytes` of host memory, uint8, which the device reads in place; freed when no tensor refers to it.

    Raises RuntimeError when CUDA has no such memory, or refuses it.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with _context(index):
        possible = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(possible), ctypes.c_int(_CONCURRENT), ctypes.c_int(index))
        if not possible.value:
            raise RuntimeError("host and GPU cannot use managed memory at the same time on this system")
        address = ctypes.c_uint64()
        size = ctypes.c_size_t(nbytes)
        _call("cuMemAllocManaged", ctypes.byref(address), size, ctypes.c_uint(_ATTACH_GLOBAL))
        try:
            _call("cuMemAdvise", address, size, ctypes.c_int(_STAY_AT), ctypes.c_int(_HOST))
            _call("cuMemAdvise", address, size, ctypes.c_int(_READ_BY), ctypes.c_int(index))
        except BaseException:
            _driver().cuMemFree_v2(address)
            raise
    owner = (ctypes.c_ubyte * nbytes).from_address(address.value)
    # The tensor's storage refers to the owner.
    weakref.finalize(owner, _free, index, address.value).atexit = False
    return torch.frombuffer(owner, dtype=torch.uint8)


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor of the host lies in memory that `map_memory` gave."""
    if tensor.device.type != "cpu" or not torch.cuda.is_available() or not tensor.numel():
        return False
    managed = ctypes.c_uint()
    asked, into = (ctypes.c_int * 1)(_IS_MANAGED), (ctypes.c_void_p * 1)(ctypes.addressof(managed))
    with _context(torch.cuda.current_device()):  # any, but a thread that has called nothing yet has none
        # Of memory that CUDA does not know, every attribute is 0; asked for one alone, it would report an error.
        _call("cuPointerGetAttributes", ctypes.c_uint(1), asked, into, ctypes.c_uint64(tensor.data_ptr()))
    return bool(managed.value)


class _Interface:
    """A range of bytes, as other libraries offer arrays on a GPU."""

    def __init__(self, owner: Tensor, nbytes: int) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (owner.untyped_storage().data_ptr(), False),
            "version": 3,
        }


def device_view(tensor: Tensor, device: torch.device) -> Tensor:
    """The same memory as a tensor of the device, which reads it in place. tensor: in memory of `map_memory`.

    Copies from it run at the speed of copies from page-locked memory; those from the tensor of the host do not.
    """
    nbytes = tensor.untyped_storage().nbytes()
    raw = torch.as_tensor(_Interface(tensor, nbytes), device=device)
    whole = raw[: nbytes - nbytes % tensor.element_size()].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(f"CUDA's driver library cannot be loaded: {error}") from error


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} returned CUDA error {code}")


@cache
def _primary_context(index: int) -> ctypes.c_void_p:
    """The context that torch uses of a GPU. Kept as long as the process lives: memory goes when it goes."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(index))
    return context


@contextmanager
def _context(index: int) -> Iterator[None]:
    """That context, for this thread."""
    _call("cuCtxPushCurrent_v2", _primary_context(index))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _free(index: int, address: int) -> None:
    try:
        with _context(index):
            _call("cuMemFree_v2", ctypes.c_uint64(address))
    except RuntimeError as error:
        logger.warning("host memory that a GPU had mapped could not be freed: %s", error)


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


class BlockReader:
    """Pieces [H, n, 2, d] of host memory, one after the other, as blocks of device memory.

    shape: (H, the most tokens of a piece, 2, d). For one thread, and one stream that the blocks are read on.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._shape, self._dtype, self._device = shape, dtype, device
        self._cuda = device.type == "cuda"
        self._buffers: list[Tensor] = []
        self._pieces: Iterator[Tensor] = iter(())
        self._coming: Tensor | None = None
        self._turn = 0
        if self._cuda:
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._used = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that there are."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def start(self, pieces: Iterator[Tensor], after: torch.cuda.Stream | None = None) -> None:
        """From here on `next` gives these pieces, none of an earlier start. The first one is sent at once.

        after: a stream whose work so far fills the pieces. They are asked for one ahead of `next`.
        """
        if self._cuda:
            # What was asked of the main stream may still read the blocks, or use their memory for something else.
            self._side.wait_stream(torch.cuda.current_stream(self._device))
            if after is not None:
                self._side.wait_stream(after)
        self._pieces, self._turn = pieces, 0
        self._coming = self._send(0)

    def next(self) -> Tensor:
        """The next piece on the device, good until the next call. Raises ValueError when there is none."""
        block = self._coming
        if block is None:
            raise ValueError("all pieces were read")
        turn = self._turn
        main = torch.cuda.current_stream(self._device) if self._cuda else None
        if main is not None and turn:
            self._used[(turn - 1) % 2].record(main)
        self._turn = turn + 1
        self._coming = self._send(turn + 1)
        if main is not None:
            main.wait_event(self._copied[turn % 2])
        return block

    def end(self) -> None:
        """Lets go of the blocks. Their memory is not given to others before all copies into it are done."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        self._pieces, self._coming = iter(()), None
        self._buffers.clear()

    def _send(self, turn: int) -> Tensor | None:
        """Copies a piece into the block whose turn it is, once what was there before the last one has been read."""
        piece = next(self._pieces, None)
        if piece is None:
            return None
        if turn >= len(self._buffers) and len(self._buffers) < 2:
            self._buffers.append(torch.empty(self._shape, dtype=self._dtype, device=self._device))
            if self._cuda:  # the memory was perhaps somebody else's a moment ago
                self._side.wait_stream(torch.cuda.current_stream(self._device))
        block = self._buffers[turn % 2][:, : piece.shape[1]]
        on_side: AbstractContextManager[object] = nullcontext()
        if self._cuda:
            if turn >= 2:
                self._side.wait_event(self._used[turn % 2])
            on_side = torch.cuda.stream(self._side)
        with on_side:
            source = copy_source(piece, self._device)
            for head in range(len(block)):  # in one piece each
                block[head].copy_(source[head], non_blocking=self._cuda)
            if self._cuda:
                self._copied[turn % 2].record(self._side)
        return block
