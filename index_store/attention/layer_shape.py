"""The shape of one layer's attention, and of the layers whose queries see a sliding window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads of one layer. head_dim: d of queries, keys and values.

    window: a query sees so many keys, its own included, and no context keeps more of the layer; None for all keys.
    chunked: a query sees those of its own chunk, of so many tokens, instead.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query_heads // self.kv_heads

    def kept(self, tokens: int) -> int:
        """How many of a context's tokens are kept of the layer: the last ones."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True, slots=True)
class WindowLayers:
    """The layers with a sliding window, all of one shape.

    layers: ascending. size: keys that a query sees, its own included. chunked: those of its own chunk of so many.
    """

    layers: tuple[int, ...]
    size: int
    query_heads: int
    kv_heads: int
    head_dim: int
    chunked: bool = False

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Fields that a manifest says nothing of."""
        return () if self.chunked else ("chunked",)

    @property
    def shape(self) -> LayerShape:
        """Of each of them."""
        return LayerShape(self.query_heads, self.kv_heads, self.head_dim, self.size, self.chunked)
