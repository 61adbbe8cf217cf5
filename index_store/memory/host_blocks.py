"""Keys and values in host memory, read by a device block by block.

Two blocks of device memory take turns: a side stream copies into one while the other is read. Which pieces come after
one another is told in advance, so that the first piece of the next layer is on its way while this layer computes. Where
the device is the CPU, the same code makes plain copies.

Shape legend: H KV heads, n tokens of a piece, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from index_store.memory.host_memory import copy_source


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
