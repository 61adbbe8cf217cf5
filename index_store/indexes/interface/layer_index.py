"""What every index of one layer's keys can do: build, store, rank, append.

Shape legend: H KV heads, G query heads per KV head (the group), T query positions of one forward pass,
N keys of the context, P sampled query positions, d head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self, TypeVar

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.compiled.launch import on_host
from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.indexes.interface.index_kind import SMALLEST, IndexKind, SubspaceParameters, grown
from index_store.selection.ranking import Piece, Ranking
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample

MANY = 64
"""Queries of a KV head from which on tables and codes are multiplied and not looked up, on a device."""

_TILE_BYTES = 256 * 2**20  # of one tile's numbers as float32


def are_many(queries_HTG_: Tensor) -> bool:
    """Whether so many queries [H, T, G, ...] on a device are searched for by products."""
    return not on_host(queries_HTG_) and queries_HTG_.shape[1] * queries_HTG_.shape[2] >= MANY


def by_tiles(
    queries_HQK: Tensor, tile: Callable[[int, int], Tensor], first: int, end: int, width: int
) -> Tensor:
    """[H, Q, M] float32: products of the queries with keys first..end-1, which come as tiles [H, K, n] float32."""
    heads, queries, _ = queries_HQK.shape
    out = torch.empty(heads, queries, max(0, end - first), device=queries_HQK.device)
    step = max(1, _TILE_BYTES // (heads * width * 4))
    for begin in range(first, end, step):
        stop = min(begin + step, end)
        out[..., begin - first : stop - first] = torch.bmm(queries_HQK, tile(begin, stop))
    return out


def subspace_dims(parameters: SubspaceParameters, head_dim: int) -> Tensor:
    """[m, d / m] int64 on the CPU: the dimensions of each subspace.

    Raises InvalidArgumentError when the head dimension is no multiple of m.
    """
    if head_dim % parameters.subspaces:
        raise InvalidArgumentError(
            f"head dimension {head_dim} does not split into {parameters.subspaces} subspaces; "
            f"choose a divisor of {head_dim}"
        )
    order = torch.arange(head_dim, device="cpu")
    if parameters.split == "strided":
        return order.view(-1, parameters.subspaces).t().contiguous()
    return order.view(parameters.subspaces, -1)


Do = Callable[[Callable[[], object]], None]
"""Is given what is to be done, at once or behind other work."""


def do_now(work: Callable[[], object]) -> None:
    """Does it at once."""
    work()


class GrowingRows:
    """Rows [H, n, ...] at the start of a buffer that grows by doubling, so that room depends on n alone.

    room: rows that there is room for from the beginning. limit: rows that there will be at most, when that is known;
    a buffer never grows beyond it. addressed: rows that host memory has addresses for from the first row on; up to
    there rows stay where they are, and no growth copies them. What is beyond the room is not touched, so a system that
    gives memory when it is first written to has given none for it, and it does not count as held.
    count: n. Whoever writes rows into the buffer himself makes room for them before, and sets it after.
    """

    def __init__(
        self,
        heads: int,
        *row: int,
        dtype: torch.dtype = torch.float32,
        room: int = 0,
        limit: int | None = None,
        addressed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.buffer = torch.empty(heads, room, *row, dtype=dtype, device=device)
        self.count = 0
        self._limit = limit
        self._addressed = addressed if self.buffer.device.type == "cpu" else 0
        self._room = room

    @property
    def rows(self) -> Tensor:
        """View of the rows, [H, n, ...]: writing rows changes it, growing detaches it."""
        return self.buffer[:, : self.count]

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return self._room if self._addressed else self.buffer.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the room, rows still unused included."""
        return self.buffer[:, : self.capacity].numel() * self.buffer.element_size()

    def append(self, rows: Tensor) -> None:
        """Adds rows [H, k, ...] behind the last one."""
        self.put(self.count, rows)

    def put(self, start: int, rows: Tensor) -> None:
        """Puts rows [H, k, ...] at start..start+k-1; what stood from there on is gone.

        Raises InvalidArgumentError when rows before `start` are missing.
        """
        if start > self.count:
            raise InvalidArgumentError(f"rows {self.count}..{start - 1} were never written")
        end = start + rows.shape[1]
        self.reserve(end)
        self.buffer[:, start:end] = rows
        self.count = end

    def reserve(self, count: int, do: Do = do_now) -> None:
        """Makes room for `count` rows; those written so far may move.

        do: is given the copying, where a device may have yet to write rows behind the last one.
        """
        if count > self.capacity:
            reserve_together((self,), count, do)

    def fork(self) -> Self:
        """The same rows in a buffer of their own, with as much room."""
        other = copy(self)
        other.buffer = torch.empty_like(self.buffer)
        other.rows[:] = self.rows
        return other


def reserve_together(growing: Sequence[GrowingRows], count: int, do: Do = do_now) -> None:
    """`GrowingRows.reserve` of several. Those that are alike come into one block, and one call copies all of them.

    Every call gives up the interpreter's lock and waits for it after, which takes long while other threads work.
    """
    moving: dict[tuple[torch.Size, torch.dtype, int, int], list[GrowingRows]] = defaultdict(list)
    for each in growing:
        before, held = each.capacity, each.buffer.shape
        if count > before:
            each._room = grown(count, max(SMALLEST, before), each._limit)
            if each._room > held[1]:
                moving[held, each.buffer.dtype, max(each._room, each._addressed), before].append(each)
    for (held, _, rows, before), alike in moving.items():
        buffers = [each.buffer for each in alike]
        block = buffers[0].new_empty(len(alike), held[0], rows, *held[2:])
        old = buffers if before == held[1] else [buffer[:, :before] for buffer in buffers]
        do(partial(torch.stack, old, out=block[:, :, :before]))
        for each, buffer in zip(alike, block.unbind(), strict=True):
            each.buffer = buffer


@dataclass(frozen=True, slots=True)
class LayerSource:
    """What an index of one layer is built from.

    kv_HN2D: [H, N, 2, d], keys (after RoPE) and values of the context in the stored dtype.
    queries: sample of the layer's queries. inverse_frequencies: [d/2] float32 of the model's rotary embedding (angle
        of dimensions i and i + d/2 at position p: p * inverse_frequencies[i]); None for a model whose embedding
        is of another form.
    """

    kv_HN2D: Tensor
    queries: QuerySample
    inverse_frequencies: Tensor | None = None

    @property
    def keys_HND(self) -> Tensor:
        """View of the keys."""
        return self.kv_HN2D[:, :, 0]

    @property
    def values_HND(self) -> Tensor:
        """View of the values."""
        return self.kv_HN2D[:, :, 1]


@dataclass(frozen=True, slots=True)
class Asked:
    """What one session asks of an index: the arguments of `LayerIndex.rank`. position: -1 where none was told."""

    queries_HTGD: Tensor
    first_key: int
    end_key: int
    appended: AppendedKeys | None
    search: Mapping[str, Scalar]
    position: int


@dataclass(frozen=True)
class Best:
    """The best keys of S sessions, and what stands for all others that each has searched.

    ids_HSK: [H, S, K] int32, ascending within the first `counts` entries of a row; others are valid ids. counts_HS:
    [H, S] int32. others: attention to the others, out [H, S, G, d] and lse [H, S, G]. vectors_read, bytes_read: of the
    index for each session's search, per KV head. remainder_bytes: for the others besides.
    """

    ids_HSK: Tensor
    counts_HS: Tensor
    others: AttentionState
    vectors_read: Sequence[float]
    bytes_read: Sequence[float]
    remainder_bytes: Sequence[float]

    @cached_property
    def kept(self) -> list[int]:
        """How many keys each session selects, over all KV heads."""
        return self.counts_HS.sum(0).tolist()

    def of(self, sessions: Sequence[int]) -> Best:
        """The same of some sessions, in that order."""
        rows = list(sessions)
        return Best(
            self.ids_HSK[:, rows],
            self.counts_HS[:, rows],
            self.others.columns(rows),
            [self.vectors_read[row] for row in rows],
            [self.bytes_read[row] for row in rows],
            [self.remainder_bytes[row] for row in rows],
        )


class AppendedKeys(ABC):
    """Session-private extension of a shared index by keys that arrived while decoding. Never touches the index.

    count: number of appended keys.
    """

    def __init__(self, heads: int, head_dim: int) -> None:
        self.count = 0
        self._heads, self._head_dim = heads, head_dim

    def append(self, kv_HT2D: Tensor) -> None:
        """Adds T keys and values [H, T, 2, d] (any float dtype, after RoPE); ids continue those already present.

        Raises InvalidArgumentError for another shape.
        """
        heads, head_dim = self._heads, self._head_dim
        if kv_HT2D.dim() != 4 or kv_HT2D.shape[::2] != (heads, 2) or kv_HT2D.shape[3] != head_dim:
            raise InvalidArgumentError(
                f"appended keys and values are {tuple(kv_HT2D.shape)}, expected [{heads}, T, 2, {head_dim}]"
            )
        self._extend(kv_HT2D)
        self.count += kv_HT2D.shape[1]

    def fork(self) -> Self:
        """The same extension for another session: what is appended to one of them does not change the other.

        Copies growing rows and random generators, and shares all else. An extension that writes into tensors of
        another kind copies these as well.
        """
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, GrowingRows):
                setattr(other, name, value.fork())
            elif isinstance(value, torch.Generator):
                setattr(other, name, value.clone_state())
        return other

    @abstractmethod
    def _extend(self, kv_HT2D: Tensor) -> None:
        """Does what `append` promises for keys of the right shape; `count` is still that of the keys before them."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Host memory held, in bytes."""


Own = TypeVar("Own", bound=AppendedKeys)


class LayerIndex(IndexKind, ABC):
    """The index of one layer: all KV heads, immutable, shared by every session of the context.

    key_count: keys of the context, N.
    """

    def __init__(self, arrays: Mapping[str, Tensor], key_count: int) -> None:
        self._arrays = dict(arrays)
        self.key_count = key_count

    @classmethod
    @abstractmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        """Builds the index of one layer.

        Raises InvalidArgumentError for a parameter that is missing, unknown or out of range.
        """

    def arrays(self) -> dict[str, Tensor]:
        """What is stored: name -> [H, ...] tensor (contiguous, of a dtype in `STORED_DTYPES`)."""
        return dict(self._arrays)

    @classmethod
    @abstractmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        """The index over stored arrays, without copying them. `kv_HN2D` are the context's own keys and values."""

    @abstractmethod
    def start_appending(self) -> AppendedKeys:
        """A fresh, empty session-private extension."""

    def rank(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        search: Mapping[str, Scalar],
        position: int | None = None,
    ) -> Ranking:
        """Scores keys first_key..end_key-1 for queries [H, T, G, d] float32, already scaled by 1/sqrt(d).

        Ids >= N address appended keys; `end_key` never exceeds N + appended.count. `search` holds the method's
        search options (for example pooling of the group, backoff). position: of the first query, the others follow;
        needed by indexes that undo the rotary embedding.
        Raises InvalidArgumentError for keys that the index does not hold, for an extension of another kind of index,
        for search options that do not fit, and without a position that is needed.
        """
        self._check_held(end_key, appended)
        place = -1 if position is None else position
        return self._score(Asked(queries_HTGD, first_key, end_key, appended, search, place))

    def _check_held(self, end_key: int, appended: AppendedKeys | None) -> None:
        """Raises InvalidArgumentError for keys that the index does not hold."""
        held = self.key_count + (0 if appended is None else appended.count)
        if end_key > held:
            raise InvalidArgumentError(f"keys up to {end_key} were asked for, the index holds {held}")

    @property
    def shares(self) -> bool:
        """Whether `best_together` reads the index once for several sessions."""
        return False

    def best_together(self, asked: Sequence[Asked], keeps: Sequence[int]) -> Best:
        """The keys with the largest weights, added up over a group's heads, of sessions that decode one token each.

        keeps: how many of each. Each gets the bits that it gets alone. Only where the index `shares`; raises
        MethodUnsupportedError otherwise.
        """
        raise MethodUnsupportedError(f"index kind {self.kind!r} does not attend to what is not selected")

    @abstractmethod
    def _score(self, asked: Asked) -> Ranking:
        """Does what `rank` promises for keys that the index holds; `_own` tells what was appended."""

    def _own(self, appended: AppendedKeys | None, extension: type[Own]) -> Own:
        """What was appended, if only nothing, as the index's kind of extension.

        Raises InvalidArgumentError for another kind.
        """
        own = self._nothing_appended if appended is None else appended
        if isinstance(own, extension):
            return own
        raise InvalidArgumentError(
            f"index kind {self.kind!r} got appended keys of type {type(own).__name__}, "
            "expected those that start_appending() returned"
        )

    @cached_property
    def _nothing_appended(self) -> AppendedKeys:
        return self.start_appending()

    def pieces(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        position: int | None = None,
    ) -> tuple[Piece, ...]:
        """Scored pieces that together hold keys first_key..end_key-1, and maybe others.

        Only for indexes that partition the keys; raises MethodUnsupportedError otherwise.
        """
        raise MethodUnsupportedError(f"index kind {self.kind!r} has no pieces to compute a remainder over")

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(array.numel() * array.element_size() for array in self._arrays.values())


def check_keys(keys_HND: Tensor) -> None:
    """Raises InvalidArgumentError unless the tensor is a finite, non-empty [H, N, d]."""
    if keys_HND.dim() != 3 or 0 in keys_HND.shape:
        raise InvalidArgumentError(
            f"keys must be a non-empty [heads, keys, dim], got {tuple(keys_HND.shape)}"
        )
    if not all_finite(keys_HND):
        raise InvalidArgumentError("keys contain NaN or infinity; the model or its dtype overflowed")


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass and without a copy."""
    if tensor.numel() == 0:
        return True
    # NaN is both the least and the largest of what it is among.
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
