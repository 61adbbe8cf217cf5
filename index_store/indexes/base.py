"""What every index of one layer's keys can do: build, store, rank, append.

Shape legend: H KV heads, G query heads per KV head (the group), T query positions of one forward pass,
N keys of the context, M ranked keys (a slice of context plus appended keys), P sampled query positions, d head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

Scalar = str | int | float | bool


@dataclass(frozen=True, slots=True)
class QuerySample:
    """Queries of one layer kept for building indexes: a bounded, seeded sample of the context's own queries.

    queries_HPGD: [H, P, G, d] float32, after RoPE, not scaled by 1/sqrt(d).
    positions_P: [P] int64, the token position of each sampled row, ascending. Rows of calibration prompts have
        positions >= the context's token count.
    """

    queries_HPGD: Tensor
    positions_P: Tensor


@dataclass(frozen=True, slots=True)
class Ranking:
    """Scores of candidate keys, higher is better, for every (KV head, query position).

    scores_HTM: [H, T, M] float32; -inf marks a key that the index did not retrieve. Column j is key `first_key + j`
        (key ids count the context first, then the session's appended tokens). Only order matters: scores are
        comparable inside one row, not between rows, and are not probabilities.
    """

    scores_HTM: Tensor
    first_key: int


class AppendedKeys(ABC):
    """Session-private extension of a shared index by keys that arrived while decoding. Never touches the index."""

    @abstractmethod
    def append(self, keys_HTD: Tensor) -> None:
        """Adds T keys [H, T, d] (any float dtype, after RoPE); their ids continue those already present."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of appended keys."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Host memory held, in bytes."""


class LayerIndex(ABC):
    """The index of one layer: all KV heads, immutable, shared by every session of the context."""

    kind: ClassVar[str]

    @classmethod
    @abstractmethod
    def check_options(cls, parameters: Mapping[str, Scalar], search: Mapping[str, Scalar]) -> None:
        """Raises InvalidArgumentError unless build parameters and search options are complete, known and fit."""

    @classmethod
    @abstractmethod
    def build(
        cls, parameters: Mapping[str, Scalar], keys_HND: Tensor, queries: QuerySample, seed: int
    ) -> Self:
        """Builds from the layer's keys [H, N, d] (after RoPE) and a sample of its queries.

        Raises InvalidArgumentError for a parameter that is missing, unknown or out of range.
        """

    @abstractmethod
    def arrays(self) -> dict[str, Tensor]:
        """What is stored: name -> [H, ...] tensor (contiguous; int8, int16, int32, float16 or float32)."""

    @classmethod
    @abstractmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], keys_HND: Tensor
    ) -> Self:
        """The index over stored arrays, without copying them. `keys_HND` is the context's own key view."""

    @abstractmethod
    def start_appending(self) -> AppendedKeys:
        """A fresh, empty session-private extension."""

    @abstractmethod
    def rank(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        search: Mapping[str, Scalar],
    ) -> Ranking:
        """Scores keys first_key..end_key-1 for queries [H, T, G, d] float32, already scaled by 1/sqrt(d).

        Ids >= N address appended keys; `end_key` never exceeds N + appended.count. `search` holds the method's
        search options (for example pooling of the group, backoff).
        """

    @property
    def nbytes(self) -> int:
        """Bytes of all stored arrays."""
        return sum(array.numel() * array.element_size() for array in self.arrays().values())


def check_keys(keys_HND: Tensor) -> None:
    """Raises InvalidArgumentError unless the tensor is a finite, non-empty [H, N, d]."""
    from index_store.errors import InvalidArgumentError

    if keys_HND.dim() != 3 or 0 in keys_HND.shape:
        raise InvalidArgumentError(
            f"keys must be a non-empty [heads, keys, dim], got {tuple(keys_HND.shape)}"
        )
    if not bool(torch.isfinite(keys_HND).all()):
        raise InvalidArgumentError("keys contain NaN or infinity; the model or its dtype overflowed")
