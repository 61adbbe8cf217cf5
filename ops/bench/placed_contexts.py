"""Random contexts of which a copy lies in every memory, so that placements are compared over the same contents.

Pinning gigabytes takes seconds: contexts of all shapes take turns in two ranges of host memory, one for keys and values
and one for query tables, which are page-locked once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from random_model import DTYPE, QUERY_STD
from torch import Tensor

from decode_engine.warm_up import made_up_context
from index_store.context import ResidentContext
from index_store.dtypes import stored_dtype
from index_store.host_memory import HostBlock, aligned, default_page_locker
from index_store.manifest import ModelIdentity
from index_store.methods import Method
from index_store.placement import Placement


class HostRange:
    """Host memory, page-locked where there is a GPU, that is filled from its front and then used anew."""

    def __init__(self, nbytes: int, huge_pages: bool = False) -> None:
        """Raises RuntimeError where there is a GPU and the pages cannot be locked."""
        locker = default_page_locker()
        self._block = HostBlock(nbytes, locker, own_pages=True, huge_pages=huge_pages)
        self._raw = self._block.take(
            (nbytes,), torch.uint8
        ).zero_()  # by all cores; locking would do it with one
        self._block.lock()
        if locker is not None and not self._block.locked:
            raise RuntimeError(f"{nbytes} bytes of host memory cannot be page-locked; try less (--host-gb)")
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self._raw.numel()

    def put(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of the tensor here."""
        start, nbytes = self._used, tensor.numel() * tensor.element_size()
        if start + nbytes > self.nbytes:
            raise RuntimeError(f"{nbytes} bytes do not fit behind {start} of {self.nbytes}")
        self._used = start + aligned(nbytes)
        return self._raw[start : start + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def clear(self) -> None:
        """Forgets what is in it; tensors that were put here change when others are."""
        self._used = 0


class PlacedContexts:
    """A context for each session of a batch, in any placement; those of one placement at a time are alive."""

    def __init__(
        self,
        identity: ModelIdentity,
        methods: Sequence[Method],
        length: int,
        batch: int,
        ranges: tuple[HostRange, HostRange],
        device: str = "cuda",
    ) -> None:
        """With the indexes of all methods. ranges: for keys and values, and for indexes; what was there is lost."""
        row_bytes = 2 * identity.head_dim * stored_dtype(DTYPE).torch_dtype.itemsize
        per_layer = batch * identity.kv_heads * length * row_bytes
        self.distinct = max(1, min(identity.layers, ranges[0].nbytes // per_layer))
        for each in ranges:
            each.clear()
        self._ranges = ranges
        first, *others = methods
        self._sources = [
            made_up_context(
                identity, DTYPE, first, length, also=others, distinct=self.distinct, device=device, seed=row,
                calibrated_for=QUERY_STD,
            )
            for row in range(batch)
        ]  # fmt: skip
        self._kv: dict[tuple[int, int], Tensor] = {}
        self._tables: dict[tuple[int, str, int], dict[str, Tensor]] = {}

    def make(self, placement: Placement) -> list[ResidentContext]:
        """Contexts of that placement, which the caller releases."""
        return [self._make(row, source, placement) for row, source in enumerate(self._sources)]

    def release(self) -> None:
        """Lets go of all memory of the device."""
        for source in self._sources:
            source.release()

    def _make(self, row: int, source: ResidentContext, placement: Placement) -> ResidentContext:
        manifest = source.manifest
        kv = {
            layer: self._keys_values(row, source, layer, placement) for layer in range(manifest.model.layers)
        }
        arrays = {
            (entry.name, layer): self._index(
                row, source, entry.name, layer, placement.index_on_host(entry.kind)
            )
            for entry in manifest.indexes
            for layer in entry.layers
        }
        return ResidentContext(
            manifest, source.tokens(), kv, arrays, placement=placement, device=source.device
        )

    def _keys_values(self, row: int, source: ResidentContext, layer: int, placement: Placement) -> Tensor:
        own = layer % self.distinct
        if not placement.kv_on_host:
            return source.kv(own)
        if (row, own) not in self._kv:
            self._kv[row, own] = self._ranges[0].put(source.kv(own))
        return self._kv[row, own]

    def _index(
        self, row: int, source: ResidentContext, name: str, layer: int, on_host: bool
    ) -> dict[str, Tensor]:
        own = layer % self.distinct
        arrays = source.index(name, own).arrays()
        if not on_host:
            return arrays
        if (row, name, own) not in self._tables:
            put = self._ranges[1].put
            self._tables[row, name, own] = {key: put(array) for key, array in arrays.items()}
        return self._tables[row, name, own]


def make_ranges(gigabytes: float, huge_pages: bool) -> tuple[HostRange, HostRange]:
    """Ranges for keys and values and for query tables, which take as much at most, and little more for centroids.

    huge_pages: for keys and values; tables have them, as those of a loaded context.
    """
    nbytes = math.ceil(gigabytes * 1e9)
    return HostRange(nbytes, huge_pages), HostRange(nbytes + nbytes // 16, huge_pages=True)
