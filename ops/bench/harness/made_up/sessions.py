"""How many sessions a GPU serves at once, by the engine's own accounting of memory; nothing of that size is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import typer

from decode_engine.engine.session_memory import session_bytes
from decode_engine.kernels.clusters.lookup import DeviceClusters
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.host_steps import HostSteps
from decode_engine.steps.batch_kinds import step_attention_for
from decode_engine.steps.stepper import MAX_ROWS
from harness.made_up.contexts import DTYPE
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import SLOT_SHARE, MemoryBytes, Placement
from index_store.methods.method import IndexSpec, Method
from index_store.store.description.array_entry import index_array_entry, kv_entry, plane_entry, tokens_entry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import AS_DTYPE, INT8, stored_dtype
from index_store.store.description.manifest import IndexEntry, Manifest

BLOCK = 8192
"""Keys that are clustered together, so that arrays grow in proportion from one multiple to the next."""
MOST = 4096
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
    slot_share: int = SLOT_SHARE

    @cached_property
    def context(self) -> MemoryBytes:
        """Of a context, with what kernels derive from it."""
        placed = placed_bytes(self.manifest, GPU, self.placement, self.slot_share)
        return placed + MemoryBytes(device=self.derived)

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


def describe_context(identity: ModelIdentity, method: Method, tokens: int, rows: str = AS_DTYPE) -> Manifest:
    """The manifest of a context of the method: its arrays grow in proportion, as two small ones show.

    Raises typer.BadParameter unless tokens are a multiple of BLOCK.
    """
    if tokens % BLOCK or tokens < BLOCK:
        raise typer.BadParameter(f"tokens are {tokens}, expected a multiple of {BLOCK}")
    narrow = replace(identity, layers=1, query_heads=1, kv_heads=1)
    small, twice = (
        made_up_context(narrow, DTYPE, method, count, rows=rows).manifest for count in (BLOCK, 2 * BLOCK)
    )
    indexes = []
    for first, second in zip(small.indexes, twice.indexes, strict=True):
        arrays = []
        for one, two in zip(first.arrays, second.arrays, strict=True):
            grown = [
                a + (b - a) * (tokens // BLOCK - 1) for a, b in zip(one.shape[2:], two.shape[2:], strict=True)
            ]
            shape = (identity.kv_heads, *grown)
            arrays.append(
                index_array_entry(first.name, one.path.rpartition("/")[2], identity.layers, shape, one.dtype)
            )
        layers = tuple(range(identity.layers))
        indexes.append(
            IndexEntry(first.name, first.kind, first.parameters, layers, tuple(arrays), first.thresholds)
        )
    return replace(
        small,
        model=identity,
        token_count=tokens,
        tokens=tokens_entry(tokens),
        kv=plane_entry(identity, tokens) if rows == INT8 else kv_entry(identity, tokens, DTYPE),
        indexes=tuple(indexes),
    )


def most_sessions(served: Served, budget: MemoryBytes, shared: bool) -> tuple[int, str]:
    """The largest number that fits into what the weights leave, and the memory that one more would overflow."""
    count = 0
    while count < MOST:
        needed = served.needed(count + 1, 1 if shared else count + 1)
        if not needed.fits(budget):
            return count, "device" if needed.device > budget.device else "host"
        count += 1
    return count, "neither"
