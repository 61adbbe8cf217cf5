"""Loading a context from its files into one block of host memory, verifying every checksum on the way.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from index_store.context import Context, IndexKinds, ResidentContext
from index_store.dtypes import STORED_DTYPES
from index_store.host_memory import HostBlock, PageLocker, aligned
from index_store.manifest import ArrayEntry, Manifest

_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class LoadedContext:
    """A context in memory and the block that holds it."""

    resident: ResidentContext
    block: HostBlock

    def release(self) -> None:
        """Lets go of all memory."""
        self.resident.release()
        self.block.release()


def resident_bytes(manifest: Manifest) -> int:
    """Bytes that a context takes in memory: every array, aligned, and its token ids as int64."""
    parts = sum(aligned(_layer_bytes(array)) for _, _, array in _parts(manifest))
    return parts + aligned(manifest.token_count * torch.int64.itemsize)


def load_context(
    context: Context, locker: PageLocker | None = None, kinds: IndexKinds | None = None
) -> LoadedContext:
    """Reads every array into memory, head by head, in parallel.

    Each layer's keys and values are one contiguous [H, N, 2, d] tensor, each index array of a layer [H, ...]. Raises
    the matching ContextCorruptError, or MemoryBudgetError; nothing is kept then.
    """
    manifest = context.manifest
    block = HostBlock(resident_bytes(manifest), locker)
    try:
        tokens = block.take((manifest.token_count,), torch.int64)
        tokens.copy_(context.tokens())
        kv: dict[int, Tensor] = {}
        arrays: dict[tuple[str, int], dict[str, Tensor]] = defaultdict(dict)
        reads = []
        for index, layer, entry in _parts(manifest):
            tensor = block.take(entry.shape[1:], STORED_DTYPES[entry.dtype].torch_dtype)
            if index is None:
                kv[layer] = tensor
            else:
                arrays[index, layer][entry.path.rpartition("/")[2]] = tensor
            reads += [
                partial(context.read_head, entry.path, layer, head, tensor[head])
                for head in range(entry.shape[1])
            ]
        _run(reads)
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


def _layer_bytes(entry: ArrayEntry) -> int:
    return entry.nbytes // entry.shape[0]


def _run(reads: list[partial[None]]) -> None:
    """Runs all reads on a few threads; the first error stops the rest."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(read) for read in reads]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
