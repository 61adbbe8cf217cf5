"""The arrays of a context, and each one: its path, its shape, how it is cut into chunks, and the checksum of each.

Constructing one checks it. Errors are ManifestError and name field and value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from index_store.errors import InvalidArgumentError
from index_store.store.description.context_id import LayerShape, ModelIdentity
from index_store.store.description.dtypes import PLANE_DTYPE, STORED_DTYPES
from index_store.store.description.json_fields import MOST, field_error

PATH_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
HEX = re.compile(r"[0-9a-f]+")
_CHECKSUM_DIGITS = 8


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """One zarr array of a context. `dtype` is the logical name: "bfloat16" is stored as uint16.

    checksums: crc32c of every chunk, 8 hex digits each, in C order of the grid. They tie each file to its place: a
    chunk that is intact but belongs elsewhere is found. None while the array is planned or being written.
    """

    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    checksums: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not all(PATH_PART.fullmatch(part) for part in parts):
            raise field_error("path", self.path, "names of letters, digits, '_', '-', '.' joined by '/'")
        if self.dtype not in STORED_DTYPES:
            raise field_error(f"{self.path}.dtype", self.dtype, f"one of {', '.join(STORED_DTYPES)}")
        if not self.shape or not all(size > 0 for size in self.shape):
            raise field_error(f"{self.path}.shape", self.shape, "one or more positive sizes")
        if self.nbytes > MOST:
            raise field_error(f"{self.path}.shape", self.shape, f"at most {MOST} bytes")
        divides = len(self.chunks) == len(self.shape) and all(
            chunk > 0 and size % chunk == 0 for chunk, size in zip(self.chunks, self.shape, strict=True)
        )
        if not divides:
            raise field_error(f"{self.path}.chunks", self.chunks, f"sizes that divide the shape {self.shape}")
        if self.checksums is not None:
            count, given = math.prod(self.grid), len(self.checksums) / _CHECKSUM_DIGITS
            if given != count or not HEX.fullmatch(self.checksums):
                found = f"{given:g} checksums, {self.checksums}"
                expected = f"{count} of {_CHECKSUM_DIGITS} lower-case hex digits each, one per chunk"
                raise field_error(f"{self.path}.checksums", found, expected)

    @property
    def layout(self) -> ArrayEntry:
        """The array without its checksums: what is known before it is written."""
        return replace(self, checksums=None)

    def below(self, folder: str) -> ArrayEntry:
        """The array in a folder; "" for none."""
        return replace(self, path=f"{folder}/{self.path}") if folder else self

    @property
    def grid(self) -> tuple[int, ...]:
        """Chunks along each dimension."""
        return tuple(size // chunk for size, chunk in zip(self.shape, self.chunks, strict=True))

    @property
    def itemsize(self) -> int:
        return STORED_DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, without checksums."""
        return math.prod(self.shape) * self.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk, without its checksum."""
        return math.prod(self.chunks) * self.itemsize

    def chunk_indices(self) -> Iterator[tuple[int, ...]]:
        """Grid coordinates of every chunk, in C order."""
        return itertools.product(*map(range, self.grid))

    def checksum(self, indices: Sequence[int]) -> int:
        """The crc32c of the chunk at the given grid coordinates; coordinates left out are 0.

        Raises InvalidArgumentError when the array has no checksums, because it was not written yet.
        """
        if self.checksums is None:
            raise InvalidArgumentError(f"{self.path}: no checksums are known; the array was not published")
        position = 0
        for index, count in itertools.zip_longest(indices, self.grid, fillvalue=0):
            position = position * count + index
        start = position * _CHECKSUM_DIGITS
        return int(self.checksums[start : start + _CHECKSUM_DIGITS], 16)


def join_checksums(checksums: Iterable[int]) -> str:
    """Checksums in C order of their chunks, as an ArrayEntry keeps them."""
    return "".join(f"{checksum:0{_CHECKSUM_DIGITS}x}" for checksum in checksums)


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


def state_entry(model: ModelIdentity, dtype: str, marks: int = 0) -> ArrayEntry | None:
    """The states behind the last token, one part behind the other: uint8 [bytes], one chunk; None without states.

    marks: how many such chunks come before it, of states behind earlier tokens.
    """
    if model.states is None:
        return None
    size = model.states.nbytes(dtype)
    return ArrayEntry("state", ((marks + 1) * size,), (size,), "uint8")


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
