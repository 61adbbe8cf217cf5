"""Loading a context from its files into one block of memory, verifying every checksum on the way.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from index_store.context import Context, IndexKinds, ResidentContext
from index_store.device_memory import DeviceBlock, StagedArray, StagingBuffers, device_bytes
from index_store.dtypes import STORED_DTYPES
from index_store.host_memory import HostBlock, PageLocker, aligned
from index_store.manifest import ArrayEntry, Manifest

_MAX_THREADS = 4

_Read = tuple[str, int, int, Tensor]
"""Array, layer and KV head, and where they go."""


@dataclass(frozen=True, slots=True)
class LoadedContext:
    """A context in memory and the block that holds it."""

    resident: ResidentContext
    block: HostBlock | DeviceBlock

    def release(self) -> None:
        """Lets go of all memory."""
        self.resident.release()
        self.block.release()


def resident_bytes(manifest: Manifest, device: torch.device | None = None) -> int:
    """Bytes that a context takes in memory: every array, aligned, and its token ids as int64.

    In memory of a device (see `load_context`) with the padding of rows that some arrays have there.
    """
    parts = sum(aligned(_layer_bytes(array, device)) for _, _, array in _parts(manifest))
    return parts + aligned(manifest.token_count * torch.int64.itemsize)


def load_context(
    context: Context,
    locker: PageLocker | None = None,
    kinds: IndexKinds | None = None,
    device: torch.device | None = None,
) -> LoadedContext:
    """Reads every array into memory, head by head, in parallel.

    Each layer's keys and values are one contiguous [H, N, 2, d] tensor, each index array of a layer [H, ...]. Raises
    the matching ContextCorruptError, or MemoryBudgetError; nothing is kept then.

    device: whose memory it is read into, through a few staging buffers, with rows padded as `device_memory` says; None
    for host memory, which is then page-locked by `locker`.
    """
    manifest = context.manifest
    needed = resident_bytes(manifest, device)
    block = HostBlock(needed, locker) if device is None else DeviceBlock(needed, device)
    try:
        tokens = block.take((manifest.token_count,), torch.int64)
        tokens.copy_(context.tokens())
        kv: dict[int, Tensor] = {}
        arrays: dict[tuple[str, int], dict[str, Tensor]] = defaultdict(dict)
        reads: list[_Read] = []
        for index, layer, entry in _parts(manifest):
            tensor = block.take(entry.shape[1:], STORED_DTYPES[entry.dtype].torch_dtype)
            if index is None:
                kv[layer] = tensor
            else:
                arrays[index, layer][entry.path.rpartition("/")[2]] = tensor
            reads += [(entry.path, layer, head, tensor[head]) for head in range(entry.shape[1])]
        if device is None:
            _run([partial(context.read_head, *read) for read in reads])
        else:
            _read_to_device(context, reads, device)
        block.lock()
        return LoadedContext(ResidentContext(manifest, tokens, kv, arrays, kinds), block)
    except BaseException:
        block.release()
        raise


def _parts(manifest: Manifest) -> Iterator[tuple[str | None, int, ArrayEntry]]:
    """(index name or None, layer, array) in the order in which they lie in memory: layer by layer."""
    for layer in range(manifest.model.layers):
        yield None, layer, manifest.kv
        for index in manifest.indexes:
            if layer in index.layers:
                yield from ((index.name, layer, array) for array in index.arrays)


def _layer_bytes(entry: ArrayEntry, device: torch.device | None) -> int:
    if device is not None:
        return device_bytes(entry.shape[1:], STORED_DTYPES[entry.dtype].torch_dtype)
    return entry.nbytes // entry.shape[0]


def _read_to_device(context: Context, reads: Sequence[_Read], device: torch.device) -> None:
    """Reads through as many pairs of staging buffers as there are threads."""
    idle: SimpleQueue[StagingBuffers] = SimpleQueue()
    staging = [StagingBuffers(device) for _ in range(_threads())]
    for buffers in staging:
        idle.put(buffers)

    def read(path: str, layer: int, head: int, out: Tensor) -> None:
        buffers = idle.get()
        try:
            context.read_head_pieces(path, layer, head, StagedArray(out, buffers))
        finally:
            idle.put(buffers)

    try:
        _run([partial(read, *each) for each in reads])
    finally:
        # Also after an error: nothing may be written any more once the memory is given back.
        for buffers in staging:
            buffers.wait()


def _threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)


def _run(reads: list[partial[None]]) -> None:
    """Runs all reads on a few threads; the first error stops the rest."""
    with ThreadPoolExecutor(_threads()) as pool:
        futures = [pool.submit(read) for read in reads]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
