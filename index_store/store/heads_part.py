"""A part of every layer's KV heads: what one of several GPUs that share a model has of a context.

What is stored is the same however many share: an array has a chunk for each KV head, and a rank reads those of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.manifest import Manifest
from index_store.store.stored_context import Context
from index_store.store.zarr_io import Pieces


@dataclass(frozen=True, slots=True)
class HeadsPart:
    """The part of one rank, numbered from 0, of so many."""

    rank: int = 0
    ranks: int = 1

    def of(self, heads: int) -> slice:
        """Which of so many heads. Raises InvalidArgumentError where they cannot be divided."""
        if heads % self.ranks:
            raise InvalidArgumentError(f"{heads} KV heads cannot be divided among {self.ranks} GPUs")
        each = heads // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)

    def identity(self, model: ModelIdentity) -> ModelIdentity:
        """The model with the part's heads alone. Raises InvalidArgumentError as `of` does, and for one with states."""
        if model.states is not None:
            raise InvalidArgumentError(f"model {model.name!r} has states, which are not divided among GPUs")
        if self.ranks == 1:
            return model
        if model.index_keys:
            raise InvalidArgumentError(
                f"model {model.name!r} has an index of its own, which is not divided among GPUs"
            )
        window = model.window
        if window is not None:
            own = self.of(window.kv_heads)
            heads = own.stop - own.start
            query_heads = window.query_heads // self.ranks
            window = replace(window, kv_heads=heads, query_heads=query_heads)
        own = self.of(model.kv_heads)
        return replace(
            model, kv_heads=own.stop - own.start, query_heads=model.query_heads // self.ranks, window=window
        )

    def manifest(self, manifest: Manifest) -> Manifest:
        """What describes the part in memory: without checksums, under the same id."""
        if self.ranks == 1:
            return manifest

        def cut(entry: ArrayEntry) -> ArrayEntry:
            own = self.of(entry.shape[1])
            shape = (entry.shape[0], own.stop - own.start, *entry.shape[2:])
            return replace(entry, shape=shape, checksums=None)

        return replace(
            manifest, model=self.identity(manifest.model), **manifest.changed_arrays(cut, layered=True)
        )

    def context(self, context: Context) -> Context:
        """The part of a stored context."""
        return context if self.ranks == 1 else _ContextPart(context, self)


class _ContextPart(Context):
    """Heads are counted from the part's first one on; every checksum is the whole context's."""

    def __init__(self, context: Context, part: HeadsPart) -> None:
        super().__init__(context._folder, context._manifest, context.read_limit_s)
        self._part, self._own = part, part.manifest(context.manifest)

    @property
    def manifest(self) -> Manifest:
        return self._own

    def array(self, path: str, layer: int, head: int) -> Tensor:
        return super().array(path, layer, self._head(path, head))

    def read_head(self, path: str, layer: int, head: int, out: Tensor | Pieces) -> None:
        super().read_head(path, layer, self._head(path, head), out)

    def _head(self, path: str, head: int) -> int:
        first: int = self._part.of(self._entry(path).shape[1]).start
        return first + head
