"""Where keys and values lie while a model reads a context, and exact causal attention of a chunk of queries to them.

In host memory they are page-locked, one contiguous range a layer. Every chunk's keys and values are copied there while
the layer attends, and later chunks read them back in blocks, of which one is on its way while the one before it is
attended to (`index_store.memory.host_memory`). Where the device is the CPU, the same code makes plain copies.
Of layers whose queries see a sliding window, no more than a window's rows are kept, always on the device.

Scores are never materialised: fused kernels return each part's output with its log-sum-exp, and the parts (blocks of
the past, which need no mask, and the chunk itself, which is causal) merge exactly. On a CPU this is also about half
the time of one call with an explicit [T, S] mask. On a GPU cuDNN's kernel takes the blocks of the past: it is about
twice as fast as the flash kernel there, but prepares 40 ms for every length that it has not seen, so blocks are a few
powers of two and what is left goes to the other.

Shape legend: H KV heads, G query heads per KV head, T tokens of a chunk, S keys before the chunk, N tokens of the
context, n tokens of a block, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import (
    attend_masked,
    attend_to_all,
    attend_to_themselves,
    cudnn_takes,
    divide_past,
)
from index_store.memory.host_memory import BlockReader, HostBlock, default_page_locker

PAST_BLOCK = 65_536
"""Keys of the past that are attended to, and converted to the compute dtype, at a time."""

_CUDNN_BLOCK = 8_192  # the smallest that is worth a length of its own
_CUDNN_QUERIES = 1_024


def attend_causally(
    queries_HGTD: Tensor,
    pasts: Sequence[Tensor | HostPast],
    chunk_HT2D: Tensor,
    past_block: int = PAST_BLOCK,
    cap: float | None = None,
) -> AttentionState:
    """Attention of T queries to all earlier tokens and, causally, to themselves.

    queries_HGTD: [H, G, T, d], after RoPE, not scaled. pasts, chunk_HT2D: keys and values, pieces of the past
    [H, S, 2, d] or where they come from, and the queries' own [H, T, 2, d], in any float dtype; they are converted to
    the queries' dtype, one block at a time. Blocks that are divided alike give the same bits wherever they come from.
    cap: see `LogitForm`; capped logits are held in memory, some at a time. Returns out [H, G, T, d] and lse [H, G, T],
    float32.
    """
    by_cudnn = _cudnn_takes(queries_HGTD) and cap is None
    own = _attend_own(queries_HGTD, chunk_HT2D, cap)
    state = AttentionState(own.out.float(), own.lse.float())
    for past in pasts:
        for block_HS2D in _blocks(past, past_block, by_cudnn):
            if cap is None:
                fast = by_cudnn and block_HS2D.shape[1] >= _CUDNN_BLOCK
                state = state.merge_(attend_to_all(queries_HGTD, block_HS2D, cudnn=fast))
            else:
                state = state.merge_(attend_masked(queries_HGTD, block_HS2D, block_HS2D.shape[1], cap=cap))
    return state


def _attend_own(queries_HGTD: Tensor, chunk_HT2D: Tensor, cap: float | None) -> AttentionState:
    if cap is None:
        return attend_to_themselves(queries_HGTD, chunk_HT2D)
    return attend_masked(queries_HGTD, chunk_HT2D, 0, cap=cap)


def _blocks(past: Tensor | HostPast, largest: int, by_cudnn: bool) -> Iterator[Tensor]:
    if isinstance(past, Tensor):
        count = past.shape[1]
    else:
        count, largest = past.count, min(largest, past.largest)
    ranges = list(divide_past(count, largest, min(_CUDNN_BLOCK, largest) if by_cudnn else largest))
    if isinstance(past, Tensor):
        yield from (past[:, start:end] for start, end in ranges)
    else:
        yield from past.blocks(ranges)


def _cudnn_takes(queries_HGTD: Tensor) -> bool:
    """Whether cuDNN's kernel is there for these queries, and worth its preparations."""
    sample = queries_HGTD[:1, 0][None]
    return queries_HGTD.shape[2] >= _CUDNN_QUERIES and cudnn_takes(sample, sample, sample, causal=False)


_LOCKERS = 4
"""Threads that fill layers with zeros and lock their pages, layer after layer."""


class DeviceLayers:
    """Keys and values of every layer of one context, [H, N, 2, d] in the dtype in which they are stored, in memory of
    the device that computes.
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._device = device
        self._kv: list[Tensor | None] = [
            torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)
        ]

    def write(self, layer: int, start: int, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        """Keeps a chunk's keys and values; returns them as they are stored, [H, T, 2, d] on the device."""
        chunk = self.kept(layer)[:, start : start + key_HTD.shape[1]]
        chunk[:, :, 0].copy_(key_HTD)
        chunk[:, :, 1].copy_(value_HTD)
        return chunk

    def past(self, layer: int, count: int) -> Tensor | HostPast:
        """The first `count` tokens of a layer, for attention."""
        return self.kept(layer)[:, :count]

    def part(self, layer: int, start: int, end: int) -> Tensor:
        """Tokens start..end-1 of a layer on the device: those that are kept, or a copy."""
        return self.kept(layer)[:, start:end]

    def settle(self) -> None:
        """Has the caller's stream wait until all that was written is where it is kept."""

    def settled(self) -> Callable[[], None]:
        """What keeps a thread, rather than a stream, until all that was written so far is where it is kept."""
        return _when_done(torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None)

    def kept(self, layer: int) -> Tensor:
        """A layer where it is kept. Raises ValueError once released."""
        kv = self._kv[layer]
        if kv is None:
            raise ValueError(f"keys and values of layer {layer} were released")
        return kv

    def on_device(self, layer: int) -> Tensor:
        """A layer on the device: the one that is kept, or a copy that the caller's stream makes."""
        return self.kept(layer)

    def release(self, layer: int) -> None:
        """Frees a layer, which nothing may read any more."""
        self._kv[layer] = None

    def close(self) -> None:
        """Frees everything."""
        self._kv = [None] * len(self._kv)


class HostLayers(DeviceLayers):
    """All layers in host memory, read by the device in blocks of at most `block_tokens` tokens.

    Pages are locked in the background, before a layer is first written to; copies from and to those that cannot be
    locked are slower. Raises MemoryBudgetError when the machine refuses the memory.
    """

    def __init__(
        self,
        layers: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        block_tokens: int,
    ) -> None:
        self.block_tokens = block_tokens
        self._device = device
        on_gpu = device.type == "cuda"
        locker = default_page_locker() if on_gpu else None
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._blocks = [HostBlock(nbytes, locker, huge_pages=True) for _ in range(layers)]
        with torch.inference_mode(False):  # other threads write to what is made here, in any mode
            self._kv = [block.take(shape, dtype) for block in self._blocks]
        heads, count, two, head_dim = shape
        largest = (heads, min(block_tokens, count), two, head_dim)
        self._reader = BlockReader(largest, dtype, device)
        self._expected: tuple[int, Sequence[tuple[int, int]]] | None = None
        self._writes = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._lockers = ThreadPoolExecutor(_LOCKERS, thread_name_prefix="lock")
        self._locked: list[Future[None]] = []
        self._refused = False
        if on_gpu:
            self._locked = [self._lockers.submit(self._lock, layer) for layer in range(layers)]

    def write(self, layer: int, start: int, key_HTD: Tensor, value_HTD: Tensor) -> Tensor:
        kept = self.kept(layer)
        if self._locked:
            self._locked[layer].result()
        chunk = torch.stack([key_HTD, value_HTD], dim=2).to(kept.dtype)
        place = kept[:, start : start + chunk.shape[1]]
        if self._writes is None:
            place.copy_(chunk)
            return chunk
        self._writes.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._writes):
            for head in range(len(chunk)):  # in one piece each
                place[head].copy_(chunk[head], non_blocking=True)
        chunk.record_stream(self._writes)  # its memory is nobody else's before the copy is done
        return chunk

    def past(self, layer: int, count: int) -> HostPast:
        return HostPast(self, layer, count)

    def part(self, layer: int, start: int, end: int) -> Tensor:
        self.settle()
        kept = self.kept(layer)[:, start:end]
        copy = torch.empty(kept.shape, dtype=kept.dtype, device=self._device)
        for own, head in zip(copy, kept, strict=True):  # in one piece each
            own.copy_(head, non_blocking=True)
        return copy

    def read(self, layer: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Blocks [H, n, 2, d] of a layer on the device, each good until the next one is asked for.

        A pass reads the same ranges of one layer after the other, so the next layer's first block is sent for early.
        """
        if self._expected != (layer, ranges):
            self._reader.start(self._pieces(layer, ranges), self._writes)
        self._expected = (layer + 1, ranges)
        for _ in ranges:
            yield self._reader.next()

    def settle(self) -> None:
        if self._writes is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._writes)

    def settled(self) -> Callable[[], None]:
        return _when_done(self._writes)

    def on_device(self, layer: int) -> Tensor:
        return self.kept(layer).to(self._device, non_blocking=True)

    def release(self, layer: int) -> None:
        super().release(layer)
        if self._locked and not self._locked[layer].cancel():
            self._locked[layer].result()
        self._blocks[layer].release()

    def close(self) -> None:
        self._lockers.shutdown(wait=True, cancel_futures=True)
        if self._writes is not None:
            self._writes.synchronize()
        self._reader.end()
        self._expected = None
        for layer in range(len(self._kv)):
            self.release(layer)

    def _pieces(self, layer: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        for later in range(layer, len(self._kv)):
            for start, end in ranges:
                yield self.kept(later)[:, start:end]

    def _lock(self, layer: int) -> None:
        # The system hands out pages when they are first touched. That is faster in all cores than while they are
        # locked, which holds up whoever asks the device for something meanwhile.
        self.kept(layer).zero_()
        if not self._refused:  # what was refused once would be refused again, and is logged
            self._blocks[layer].lock()
            self._refused = not self._blocks[layer].locked


@dataclass(frozen=True, slots=True)
class HostPast:
    """The first tokens of one layer in host memory, which come to the queries' device block by block."""

    layers: HostLayers
    layer: int
    count: int

    @property
    def largest(self) -> int:
        """Tokens of a block at most."""
        return self.layers.block_tokens

    def blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """[H, end - start, 2, d] on the device for every range, good until the next one is asked for."""
        return self.layers.read(self.layer, ranges)


def _when_done(stream: torch.cuda.Stream | None) -> Callable[[], None]:
    """What keeps a thread until the stream has done what it was asked for so far; nothing without one."""
    if stream is None:
        return lambda: None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # the thread sleeps meanwhile
    event.record(stream)
    done: Callable[[], None] = event.synchronize
    return done


class WindowRows:
    """Rows [H, <= window, 2, d] of some layers, in the dtype in which they are stored."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._rows: dict[int, Tensor] = {}

    def add(self, layer: int, chunk_HT2D: Tensor) -> Tensor:
        """Keeps a chunk; returns what was kept before and the chunk, [H, <= window + T, 2, d]."""
        kept = self._rows.get(layer)
        rows = chunk_HT2D if kept is None else torch.cat([kept, chunk_HT2D], dim=1)
        # A copy, so that a long chunk does not stay with its last rows.
        self._rows[layer] = rows[:, max(0, rows.shape[1] - self._window) :].clone()
        return rows

    def kept(self, layer: int) -> Tensor:
        """What is kept of a layer. Raises ValueError before anything was added, and once released."""
        if layer not in self._rows:
            raise ValueError(f"the window of layer {layer} has not seen any key, or was released")
        return self._rows[layer]

    def release(self, layer: int) -> None:
        """Frees a layer."""
        self._rows.pop(layer, None)
