"""What sessions and their contexts take of a device's memory and of the host's, by the engine's own accounting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from decode_engine.engine.session_memory import session_bytes
from decode_engine.kernels.clusters.device_clusters import DeviceClusters
from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.attention.registry import step_attention_for
from decode_engine.steps.stepper import MAX_ROWS
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement, slot_bytes
from index_store.methods.index_specs import IndexSpec
from index_store.methods.method import Method
from index_store.store.dtypes import stored_dtype
from index_store.store.manifest import Manifest

METHODS = "full,csattention,csattention+dropped:0.01/m8/pooled,pq+dropped:0.01"
"""That are counted unless others are asked for."""
GPU = torch.device("cuda")
STEP_BYTES = MemoryBytes(host=9, device=13)
"""Of a batch, per row, KV head and token of the longest context; of the host's only where it searches."""


@dataclass(frozen=True)
class Served:
    """What sessions of a method on such contexts in a placement take."""

    manifest: Manifest
    method: Method
    placement: Placement
    tokens: int

    @cached_property
    def context(self) -> MemoryBytes:
        """Of a context, with what kernels derive from it."""
        placed = placed_bytes(self.manifest, GPU, self.placement)
        return placed + MemoryBytes(device=self.derived)

    @property
    def slots(self) -> int:
        """Of a context's bytes on the device, those that its first step takes."""
        return slot_bytes(self.manifest) if self.placement.kv_on_host else 0

    @cached_property
    def derived(self) -> int:
        """Bytes that kernels make of clusters, for all layers, where they search or approximate with any."""
        method = self.method.on(self.manifest).method
        partition = None if method.drops_remainder else method.partition or method.index
        specs = {spec.name: spec for spec in (method.index, partition) if spec is not None}
        captured = not isinstance(step_attention_for(method, self.manifest, self.placement), str)
        return sum(self._derived_from(spec) for spec in specs.values()) if captured else 0

    @cached_property
    def session(self) -> int:
        """Of the device's memory, beside the context."""
        return session_bytes(self.method.on(self.manifest), self.tokens)

    def needed(self, sessions: int, contexts: int) -> MemoryBytes:
        """Of so many sessions over so many contexts, the model's weights not included."""
        every = MemoryBytes(
            contexts * self.context.host, contexts * self.context.device + sessions * self.session
        )
        return every + self.batches(sessions)

    def batches(self, sessions: int) -> MemoryBytes:
        """Buffers of the batches that so many sessions step in."""
        whole, rest = divmod(sessions, MAX_ROWS)
        rows = whole * MAX_ROWS + (1 << (rest - 1).bit_length() if rest else 0)
        keys = rows * self.manifest.model.kv_heads * (1 << (self.manifest.token_count - 1).bit_length())
        host = STEP_BYTES.host * keys if self._searched_on_host else 0
        return MemoryBytes(host, STEP_BYTES.device * keys)

    @property
    def _searched_on_host(self) -> bool:
        method = self.method.on(self.manifest).method
        return step_attention_for(method, self.manifest, self.placement) is HostSteps

    def _derived_from(self, spec: IndexSpec) -> int:
        entry = self.manifest.index(spec.name)
        if entry is None or entry.kind != "key_clusters":
            return 0
        arrays = {
            array.path.rpartition("/")[2]: torch.empty(
                array.shape[1:], dtype=stored_dtype(array.dtype).torch_dtype, device="meta"
            )
            for array in entry.arrays
        }
        made = DeviceClusters.of(arrays, 0, stored_dtype(self.manifest.dtype).torch_dtype, "meta")
        own = (made.means_HCD, made.value_means_HCD, made.sizes_HC, made.variances)
        return len(entry.layers) * sum(tensor.nbytes for tensor in own if tensor is not None)
