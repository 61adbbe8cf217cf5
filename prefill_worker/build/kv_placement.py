"""Where a job keeps keys and values: on the device if all it needs fits there, otherwise in host memory.

The estimate covers what a job holds beside the model's weights: docs/prefill.md has the terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from index_store.errors import MemoryBudgetError
from index_store.indexes.coarse_rows.scalar_rows import DEVICE_CODED_BYTES
from index_store.memory.memory_sizes import free_memory
from index_store.store.description.context_id import ModelIdentity
from prefill_worker.reading.kept_layers import PAST_BLOCK

FREE_SHARE = 0.9
"""Of the memory that is free on a device once the model is loaded, for the job unless it is told otherwise."""

SMALLEST_BLOCK = 1024
"""Tokens of a block of keys and values that comes from host memory; smaller ones cost more launches than bytes."""

INDEX_COPIES = 3
"""Of what one layer's indexes take: one is built, what it is made of is as large, and one waits for the disk."""

LIBRARY_BYTES = 2 * 32 * 2**20
"""That matrix libraries keep on a CUDA device from their first product on: 32 MiB on Hopper, for two streams."""


@dataclass(frozen=True, slots=True)
class JobSizes:
    """What decides how much memory a job needs.

    tokens: of the context. chunk: tokens of a pass. sampled: query positions that are kept. feed_forward: width of the
    model's widest layer. index_bytes: of all indexes of one layer. kv_dtype, compute_dtype: of what is stored, and of
    what the model computes in. approximation_bytes: of approximate attention to the past, which reads ranges of up to
    the whole context at a time (`muse.ranges.planned_bytes`); 0 for exact attention. library_bytes: that libraries keep
    for themselves on the device. pass_flag: what sets `chunk`.
    """

    identity: ModelIdentity
    tokens: int
    chunk: int
    sampled: int
    feed_forward: int
    index_bytes: int
    kv_dtype: torch.dtype
    compute_dtype: torch.dtype
    approximation_bytes: int = 0
    library_bytes: int = 0
    pass_flag: str = "--chunk"

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Keys and values of a token in one layer."""
        return self.identity.kv_heads * 2 * self.identity.head_dim * dtype.itemsize

    @property
    def layer_bytes(self) -> int:
        return self.tokens * self.row_bytes(self.kv_dtype)

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the layers that keep all of them."""
        return len(self.identity.full_layers) * self.layer_bytes

    @property
    def window_bytes(self) -> int:
        """Keys and values of layers with a sliding window, always on the device, and of one such layer in a pass."""
        window = self.identity.window
        if window is None:
            return 0
        row = window.kv_heads * 2 * window.head_dim * self.kv_dtype.itemsize
        return row * (len(window.layers) * window.shape.kept(self.tokens) + window.size + self.chunk)

    @property
    def fixed_bytes(self) -> int:
        """Wherever other keys and values are: the query sample, one pass, windows, clusters, one layer's indexes."""
        model, item = self.identity, self.compute_dtype.itemsize
        query = model.query_heads * model.head_dim * item
        one_pass = min(self.chunk, self.tokens) * (8 * query + 3 * self.feed_forward * item)
        numbers = self.tokens * self.row_bytes(torch.float32)
        building = INDEX_COPIES * self.index_bytes + numbers + min(numbers, DEVICE_CODED_BYTES)
        sample = len(model.full_layers) * self.sampled * query
        held = self.window_bytes + self.approximation_bytes + self.library_bytes
        return sample + one_pass + held + building

    def block_bytes(self, tokens: int, buffers: int) -> int:
        """So many blocks of so many tokens, and one of them in the dtype that the model computes in."""
        converted = 0 if self.kv_dtype == self.compute_dtype else self.row_bytes(self.compute_dtype)
        return min(tokens, self.tokens) * (buffers * self.row_bytes(self.kv_dtype) + converted)


@dataclass(frozen=True, slots=True)
class UsedMemory:
    """keys_and_values: "device" or "host", where they were kept. device_limit, device_peak: bytes beside the model's
    weights that the job might and did use; None where nothing limited it, and on a CPU.
    """

    keys_and_values: str
    device_limit: int | None
    device_peak: int | None


@dataclass(frozen=True, slots=True)
class KvPlacement:
    """limit: bytes of device memory that the job may use beside the weights, None for any number. needed: with
    everything on the device. block_tokens: keys and values are in host memory and read in blocks of so many tokens;
    None where they are on the device.
    """

    limit: int | None
    needed: int
    block_tokens: int | None

    def describe(self) -> str:
        """A sentence for people, of keys and values in host memory."""
        return (
            f"keys and values stay in host memory and are read in blocks of {self.block_tokens} tokens: on the device "
            f"the job would take {self.needed / 1e9:.2f} of {(self.limit or 0) / 1e9:.2f} GB beside the weights"
        )

    def used(self, peak: int | None) -> UsedMemory:
        return UsedMemory("device" if self.block_tokens is None else "host", self.limit, peak)


class DeviceMeter:
    """Measures the most device memory that is in use beside a model's weights, of this process. None on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """The weights are there, and what is there now is theirs."""
        self._device = device if device.type == "cuda" else None
        self._weights = self._most = 0
        if self._device is not None:
            self._weights = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def without(self, nbytes: int) -> None:
        """So many bytes of the weights have been freed."""
        self._most = self.peak() or 0
        self._weights -= nbytes
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        if self._device is None:
            return None
        return max(self._most, torch.cuda.max_memory_allocated(self._device) - self._weights)


def weight_bytes(model: torch.nn.Module) -> int:
    return sum(part.nbytes for part in (*model.parameters(), *model.buffers()))


def device_limit(device: torch.device, given: int | None) -> int | None:
    """Bytes that the job may use beside the weights, which are there already. None on a CPU unless it was told."""
    if given is not None or device.type == "cpu":
        return given
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(FREE_SHARE * (free_memory(device) + unused))


def place_kv(sizes: JobSizes, limit: int | None) -> KvPlacement:
    """Keys and values on the device where all fits there, otherwise in host memory, read in blocks as large as fit.

    Raises MemoryBudgetError when the limit is too small even so, and when keys and values do not fit into host memory.
    """
    approximate = sizes.approximation_bytes > 0
    converted = sizes.block_bytes(sizes.tokens if approximate else PAST_BLOCK, 0)
    needed = sizes.kv_bytes + sizes.fixed_bytes + converted
    if limit is None or needed <= limit:
        return KvPlacement(limit, needed, None)
    least = sizes.fixed_bytes + sizes.layer_bytes + sizes.block_bytes(SMALLEST_BLOCK, 2)
    least += sizes.block_bytes(sizes.tokens, 1) if approximate else 0
    if limit < least:
        raise MemoryBudgetError(
            f"--device-memory is {limit} bytes, reading {sizes.tokens} tokens takes at least {least} beside the "
            f"weights, with keys and values in host memory; give more, or lower {sizes.pass_flag} ({sizes.chunk}) or "
            "--query-sample",
            needed=least,
            budget=limit,
        )
    free = free_memory(torch.device("cpu"))
    if sizes.kv_bytes > free:
        raise MemoryBudgetError(
            f"keys and values take {sizes.kv_bytes} bytes; with them the job would use {needed} of the {limit} bytes "
            f"that it may of the device's memory, and of host memory {free} are free; free some of either",
            needed=sizes.kv_bytes,
            budget=free,
        )
    block = PAST_BLOCK
    while least - sizes.block_bytes(SMALLEST_BLOCK, 2) + sizes.block_bytes(block, 2) > limit:
        block //= 2
    return KvPlacement(limit, needed, block)
