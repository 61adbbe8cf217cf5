"""The arrays that a context has: what shape and chunks each of them has, from the model and the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from index_store.attention.layer_shape import LayerShape
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.context_id import ModelIdentity
from index_store.store.description.dtypes import PLANE_DTYPE


def tokens_entry(token_count: int) -> ArrayEntry:
    """The array of token ids: uint32 [N], one chunk."""
    return ArrayEntry("tokens", (token_count,), (token_count,), "uint32")


def conversation_entry(nbytes: int) -> ArrayEntry:
    """The array of a conversation's messages: uint8 [bytes], one chunk."""
    return ArrayEntry("conversation", (nbytes,), (nbytes,), "uint8")


def kv_entry(model: ModelIdentity, token_count: int, dtype: str, *, whole: bool = True) -> ArrayEntry:
    """The array of keys and values: [layers, kv_heads, N, 2, d], one chunk per (layer, KV head).

    It has the layers whose queries see all keys. Where there are none, it has all layers, and the tokens that they
    keep. whole: False for a child, whose `token_count` own tokens are kept in every layer.
    """
    layers = model.full_layers or model.window_layers
    return _rows_entry("kv", layers, model.shape(layers[0]), token_count, dtype, whole)


def plane_entry(model: ModelIdentity, token_count: int) -> ArrayEntry:
    """The low plane of keys and values in 8 bits, in place of `kv_entry`: uint8 [layers, kv_heads, N, 2, d/2]."""
    rest = (token_count, 2, model.head_dim // 2)
    return ArrayEntry("kv", (len(model.full_layers), model.kv_heads, *rest), (1, 1, *rest), PLANE_DTYPE)


def window_entry(
    model: ModelIdentity, token_count: int, dtype: str, *, whole: bool = True
) -> ArrayEntry | None:
    """Keys and values of layers with a sliding window; None where all layers are in that of `kv_entry`, as there."""
    if model.window is None or not model.full_layers:
        return None
    return _rows_entry("window", model.window_layers, model.window.shape, token_count, dtype, whole)


def state_entry(model: ModelIdentity, dtype: str) -> ArrayEntry | None:
    """The states behind the last token, one part behind the other: uint8 [bytes], one chunk; None without states."""
    if model.states is None:
        return None
    size = model.states.nbytes(dtype)
    return ArrayEntry("state", (size,), (size,), "uint8")


def _rows_entry(
    path: str, layers: Sequence[int], shape: LayerShape, token_count: int, dtype: str, whole: bool
) -> ArrayEntry:
    rest = (shape.kept(token_count) if whole else token_count, 2, shape.head_dim)
    return ArrayEntry(path, (len(layers), shape.kv_heads, *rest), (1, 1, *rest), dtype)


def queries_entry(model: ModelIdentity, rows: int) -> ArrayEntry | None:
    """The array of sampled queries: float32 [layers, kv_heads, rows, group, d], one chunk per (layer, KV head).

    Of the layers whose queries see all keys; None without such layers, and without rows.
    """
    layers = len(model.full_layers)
    if not layers or not rows:
        return None
    rest = (rows, model.query_heads // model.kv_heads, model.head_dim)
    return ArrayEntry("queries", (layers, model.kv_heads, *rest), (1, 1, *rest), "float32")


def index_array_entry(
    index: str, array: str, layers: int, head_shape: Sequence[int], dtype: str
) -> ArrayEntry:
    """An index array: `head_shape` is [H, ...], the shape of one layer; stored as [layers, H, ...]."""
    shape = tuple(head_shape)
    return ArrayEntry(f"index/{index}/{array}", (layers, *shape), (1, 1, *shape[1:]), dtype)
