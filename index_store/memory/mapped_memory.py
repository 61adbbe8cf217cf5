"""Host memory that a GPU reads through large pages: CUDA's managed memory, kept on the host.

A kernel that reads rows here and there in page-locked memory needs an entry of the GPU's page tables for nearly every
row, since such memory is mapped in small pages, whatever the host's own pages are. The entries come from the GPU's
memory as soon as anything else has filled its second-level cache, and then limit the gathers (docs/log.md). CUDA
hands out managed memory in pieces of 2 MiB where the system has them, and maps it so. It is told to stay on the host
and to be read there by the GPU, so that it never moves, and it cannot be swapped out.

The system hands the memory out when it is first touched; zeros until something is written.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

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
