"""Keys and values in host memory, for queries on a device: streamed in blocks, or picked row by row.

On a GPU a side stream copies one block while attention reads the one before; where the device is the CPU, the same code
makes plain copies.

Shape legend: H KV heads, T query positions, N context tokens, n tokens of a block, K kept keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

STREAM_BYTES = 32 * 2**20
"""Of one of the two blocks in device memory that keys and values are streamed through."""


def stream_blocks(kv_HN2D: Tensor, device: torch.device) -> Iterator[Tensor]:
    """All rows in order as blocks [H, n, 2, d] on the device, each good until the next one is asked for."""
    stream = _BlockStream(kv_HN2D, device)
    try:
        yield from stream.blocks()
    finally:
        stream.end()


def copy_rows(kv_HN2D: Tensor, start: int, end: int, device: torch.device) -> Tensor:
    """A copy of rows start..end-1 on the device, [H, n, 2, d]."""
    heads, _, two, head_dim = kv_HN2D.shape
    out = torch.empty(heads, max(end - start, 0), two, head_dim, dtype=kv_HN2D.dtype, device=device)
    for head in range(heads):  # in one piece each
        out[head].copy_(kv_HN2D[head, start:end], non_blocking=device.type == "cuda")
    return out


def pick_rows(kv_HN2D: Tensor, ids_HTK: Tensor) -> Tensor:
    """Rows [H*T*K, 2*d] at the ids of every head, in the stored dtype, on the ids' device.

    They are picked where they are, and copied once if the ids are elsewhere.
    """
    device = ids_HTK.device
    heads = kv_HN2D.shape[0]
    # Rows between heads; more than N where a buffer has slack.
    stride = kv_HN2D.stride(0) // kv_HN2D.stride(1)
    width = kv_HN2D.shape[2] * kv_HN2D.shape[3]
    table = kv_HN2D.as_strided(
        ((heads - 1) * stride + kv_HN2D.shape[1], width), (width, 1), kv_HN2D.storage_offset()
    )
    offsets = (torch.arange(heads, device=kv_HN2D.device) * stride)[:, None, None]
    rows = (ids_HTK.to(kv_HN2D.device).long() + offsets).flatten()
    fetched = kv_HN2D.device.type == "cpu" and device.type == "cuda"
    picked = torch.empty(len(rows), width, dtype=kv_HN2D.dtype, device=kv_HN2D.device, pin_memory=fetched)
    torch.index_select(table, 0, rows, out=picked)
    return picked.to(device, non_blocking=fetched)


class _BlockStream:
    """Two blocks in device memory: one is filled while the other is read."""

    def __init__(self, kv_HN2D: Tensor, device: torch.device) -> None:
        heads, count, two, head_dim = kv_HN2D.shape
        self._kv_HN2D = kv_HN2D
        row_bytes = heads * two * head_dim * kv_HN2D.element_size()
        self._rows = min(max(1, STREAM_BYTES // row_bytes), max(count, 1))
        self._turns = -(-count // self._rows)
        self._buffers = [
            torch.empty(heads, self._rows, two, head_dim, dtype=kv_HN2D.dtype, device=device)
            for _ in range(min(2, self._turns))
        ]
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._main = torch.cuda.current_stream(device)
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._side.wait_stream(self._main)  # which may still use the buffers' memory for something else
            self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
            self._used = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def blocks(self) -> Iterator[Tensor]:
        if self._turns:
            self._send(0)
        for turn in range(self._turns):
            if turn + 1 < self._turns:
                self._send(turn + 1)
            if self._cuda:
                self._main.wait_event(self._copied[turn % 2])
            yield self._block(turn)
            if self._cuda:
                self._used[turn % 2].record(self._main)

    def end(self) -> None:
        """The buffers' memory is not given to others before all copies into it are done."""
        if self._cuda:
            self._main.wait_stream(self._side)

    def _block(self, turn: int) -> Tensor:
        rows = min(self._rows, self._kv_HN2D.shape[1] - turn * self._rows)
        return self._buffers[turn % 2][:, :rows]

    def _send(self, turn: int) -> None:
        """Copies a block, once the one before the last, whose memory it takes, has been read."""
        block, start = self._block(turn), turn * self._rows
        on_side: AbstractContextManager[object] = nullcontext()
        if self._cuda:
            if turn >= 2:
                self._side.wait_event(self._used[turn % 2])
            on_side = torch.cuda.stream(self._side)
        with on_side:
            for head in range(len(block)):  # in one piece each
                rows = self._kv_HN2D[head, start : start + block.shape[1]]
                block[head].copy_(rows, non_blocking=self._cuda)
            if self._cuda:
                self._copied[turn % 2].record(self._side)
