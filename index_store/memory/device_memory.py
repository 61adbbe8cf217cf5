"""Blocks of device memory that hold contexts, and how bytes from files get there.

Rows of int8 index arrays with at least three dimensions start at multiples of 256 bytes: kernels that add up table rows
read them in whole aligned pieces. Such a tensor's rows are farther apart than they are long, its last dimension has
stride 1, and what lies between rows is arbitrary but allocated. All other tensors are contiguous.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from index_store.errors import MemoryBudgetError
from index_store.memory.host_memory import aligned

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PIECE_BYTES = 4 * 2**20
"""Of one staging buffer; a file is read and copied in pieces of this size."""


def row_length(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Elements from one row of an array [H, ...] in device memory to the next, padding included."""
    padded = dtype == torch.int8 and len(shape) >= 3
    return aligned(shape[-1]) if padded else shape[-1]


def device_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that an array takes in device memory, padding included."""
    return torch.Size(shape[:-1]).numel() * row_length(shape, dtype) * dtype.itemsize


class DeviceBlock:
    """One contiguous range of device memory, cut into tensors from its front, with padded rows (see above)."""

    locked_bytes = 0

    def __init__(self, nbytes: int, device: torch.device | str) -> None:
        """Reserves `nbytes`. Raises MemoryBudgetError when the device has not that much left."""
        self._device = torch.device(device)
        try:
            self._raw = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except RuntimeError as error:
            raise MemoryBudgetError(
                f"device {self._device} refused {nbytes} bytes of memory; lower --device-memory or free some",
                needed=nbytes,
            ) from error
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next part of the block as an uninitialised tensor, its rows padded where the array's kind asks for it."""
        start, nbytes = self._used, device_bytes(shape, dtype)
        self._used = start + aligned(nbytes)
        whole = self._raw[start : start + nbytes].view(dtype).view(*shape[:-1], row_length(shape, dtype))
        return whole[..., : shape[-1]]

    def lock(self) -> None:
        """Nothing to do: device memory stays where it is."""

    def release(self) -> None:
        """Lets go of the memory once the device has done what was asked of it in the stream that all threads use.

        Waiting for the whole device would spoil a graph that another thread captures meanwhile, and fail itself.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._raw = torch.empty(0, dtype=torch.uint8, device="cpu")


class StagingBuffers:
    """Two page-locked host buffers: one is filled from a file while the other is copied to the device.

    For one thread at a time. Copies are made in a stream of their own, after what the device was asked before.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=self._cuda) for _ in range(2)
        ]
        self._turn = 0
        if self._cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._copied = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]

    def next(self, nbytes: int) -> Tensor:
        """The first bytes of the buffer whose turn it is, once its last copy is done."""
        if self._cuda:
            self._copied[self._turn].synchronize()
        return self._buffers[self._turn][:nbytes]

    def send(self, nbytes: int, out: Tensor) -> None:
        """Copies the buffer's first bytes to a uint8 tensor of as many elements; then it is the other one's turn."""
        staged = self._buffers[self._turn][:nbytes].view(out.shape)
        if self._cuda:
            with torch.cuda.stream(self._stream):
                out.copy_(staged, non_blocking=True)
                self._copied[self._turn].record(self._stream)
        else:
            out.copy_(staged)
        self._turn = 1 - self._turn

    def wait(self) -> None:
        """Returns when every copy is done."""
        if self._cuda:
            self._stream.synchronize()


class StagedArray:
    """Takes the bytes of a stored array and puts them into device memory (`zarr_io.Pieces`)."""

    def __init__(self, out: Tensor, buffers: StagingBuffers) -> None:
        """out: contiguous, or int8 with padded rows."""
        flat = out.reshape(1, -1) if out.is_contiguous() else out.flatten(0, -2)
        self._rows_RW = flat.view(torch.uint8)
        self._buffers = buffers

    def buffer(self, start: int, left: int) -> NDArray[np.uint8]:
        width = self._rows_RW.shape[1]
        inside = width - start % width
        count = min(left, PIECE_BYTES)
        if count > inside:
            # Whole rows, or the rest of one.
            count = inside if start % width else count // width * width
        array: NDArray[np.uint8] = self._buffers.next(count).numpy()
        return array

    def filled(self, start: int, count: int) -> None:
        row, column = divmod(start, self._rows_RW.shape[1])
        if column + count <= self._rows_RW.shape[1]:
            out = self._rows_RW[row, column : column + count]
        else:
            out = self._rows_RW[row : row + count // self._rows_RW.shape[1]]
        self._buffers.send(count, out)
