"""One request's state: a shared context, a method, and the tail that it adds."""

from __future__ import annotations

from decode_engine.figures import Figures
from decode_engine.selector import DenseLayer, LayerAttention, SparseLayer
from index_store.context import ResidentContext
from index_store.errors import MethodUnsupportedError
from index_store.indexes.base import LayerIndex
from index_store.indexes.registry import INDEX_KINDS
from index_store.manifest import Manifest
from index_store.methods import IndexSpec, Method


class Session:
    """Decoding state over a resident context. The context is shared and never written.

    position: tokens so far, context included; the next token gets this position.
    Raises MethodUnsupportedError when the context lacks the method's index.
    """

    def __init__(self, context: ResidentContext, method: Method) -> None:
        self.context = context
        self.method = method
        self.figures = Figures()
        self.position = context.manifest.token_count
        require_index(context.manifest, method)
        self.layers: list[LayerAttention] = [
            self._layer(layer) for layer in range(context.manifest.model.layers)
        ]

    def _layer(self, layer: int) -> LayerAttention:
        kv = self.context.kv(layer)
        spec = self.method.index
        if spec is None or layer in self.context.manifest.dense_layers:
            return DenseLayer(kv, self.figures)
        return SparseLayer(kv, self._index(spec, layer), self.method, self.figures)

    def _index(self, spec: IndexSpec, layer: int) -> LayerIndex:
        if spec.stored:
            return self.context.index(spec.name, layer)
        return INDEX_KINDS[spec.kind].from_arrays(spec.parameters, {}, self.context.keys(layer))

    def close(self) -> None:
        """Drops the tail and every reference to the context's memory; the session cannot be used afterwards."""
        self.layers.clear()

    @property
    def nbytes(self) -> int:
        """Bytes that the session holds besides the shared context: its tail, and what was appended to the index."""
        return sum(layer.nbytes for layer in self.layers)


def require_index(manifest: Manifest, method: Method) -> None:
    """Raises MethodUnsupportedError unless the context holds what the method searches."""
    spec = method.index
    if spec is None or not spec.stored:
        return
    entry = manifest.index(spec.name)
    if entry is None:
        available = ", ".join(e.name for e in manifest.indexes) or "none"
        raise MethodUnsupportedError(
            f"method {method.name!r} needs index {spec.name!r}, context {manifest.id} has {available}; "
            f"prefill it again with --method {method.name}",
            method=method.name,
            context=manifest.id,
        )
    INDEX_KINDS[entry.kind].check_options(entry.parameters, method.search)
