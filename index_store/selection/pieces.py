"""Pieces: keys that a remainder is computed over, with what queries make of them.

An index that covers every key with one kind of piece (`IndexKind.pieces`) can be a remainder's partition.

Shape legend: H KV heads, T query positions, G group heads, X keys, K key ids, d head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.selection.remainders import COARSE_ROWS, PieceKind


class Piece(ABC):
    """Some of the keys of a layer, scored."""

    kind: ClassVar[PieceKind]

    @abstractmethod
    def part(self, heads: slice, positions: slice) -> Self:
        """The same for some KV heads and query positions; logits are views of these."""

    @abstractmethod
    def remainder_bytes(self, moments: str, searched: bool) -> float:
        """Bytes of one KV head that a remainder with such `moments` reads of it, for all queries of a position.

        searched: the logits are a search's, which has read what they took.
        """


@dataclass(frozen=True, slots=True)
class ScoredRows(Piece):
    """Keys that each stand for themselves, approximately: those of the searched range, and no others.

    logits_HTGX: [H, T, G, X] float32, approximate q.k of keys first_id, first_id + 1, ...; whoever computes with them
        may overwrite them. Where the ranking of a search has the same ones, it has been cut before.
    """

    logits_HTGX: Tensor
    first_id: int

    kind = COARSE_ROWS

    @abstractmethod
    def attend(self, logits_HTGX: Tensor, elsewhere_HTG: Tensor) -> AttentionState:
        """Attention to approximate values by the given logits, -inf for keys that do not count.

        elsewhere_HTG: log-sum-exp of the logits of keys of the piece that count elsewhere: next to what these and the
        others weigh, keys may be too light to be read. Returns out [H, T, G, d] and lse [H, T, G].
        """
