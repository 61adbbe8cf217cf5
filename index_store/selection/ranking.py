"""What a search yields: estimated logits of items, each of which stands for one key or for several.

Shape legend: H KV heads, T query positions, G group heads (1 where a search pooled the group's queries), M items,
X keys listed by items, d head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from index_store.attention.attention_state import AttentionState, LogitForm
from index_store.attention.rows_in_line_numba import pooled_weights
from index_store.selection.budgets import CLUSTERS, COARSE_ROWS, PieceKind


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


@dataclass(frozen=True, slots=True)
class ClusteredKeys:
    """Moments of disjoint clusters of keys and their values.

    counts_HC: [H, C] float32, keys in each; 0 where a KV head has fewer clusters. means_HCD: [H, C, d] float32, mean of
        the raw keys. value_sums_HCD: [H, C, d] float32. variances_HCD: [H, C, d] float32, of the keys around their
        mean, per dimension.
    assignment_HX: [H, X] int32, the cluster of key `first_id + x`, -1 where a key belongs to none.
    parents_HC: coarse clusters are found through fine ones: assignment_HX names a fine cluster and parents_HC
        [H, fine clusters] int32 its coarse one. None otherwise.
    """

    counts_HC: Tensor
    means_HCD: Tensor
    value_sums_HCD: Tensor
    assignment_HX: Tensor
    first_id: int = 0
    variances_HCD: Tensor | None = None
    parents_HC: Tensor | None = None

    def cluster_of(self, ids_HK: Tensor) -> Tensor:
        """[H, K] int64: the cluster of every key id, -1 for keys that are in none."""
        local = ids_HK.long() - self.first_id
        known = (local >= 0) & (local < self.assignment_HX.shape[1])
        found = self.assignment_HX.gather(1, torch.where(known, local, 0)).long()
        if self.parents_HC is not None:
            coarse = self.parents_HC.gather(1, found.clamp(min=0)).long()
            found = torch.where(found >= 0, coarse, found)
        return torch.where(known, found, -1)

    def heads(self, part: slice) -> ClusteredKeys:
        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[part]

        return ClusteredKeys(
            self.counts_HC[part],
            self.means_HCD[part],
            self.value_sums_HCD[part],
            self.assignment_HX[part],
            self.first_id,
            some(self.variances_HCD),
            some(self.parents_HC),
        )


@dataclass(frozen=True, slots=True)
class ScoredClusters(Piece):
    """Clusters and what queries make of them. Their keys may lie outside of the searched range.

    logits_HTGC: [H, T, G, C] float32, q . mean key of every cluster; -inf where another piece stands for the cluster's
        keys (a tree: either a coarse cluster counts or its fine ones), and for clusters without keys.
    queries_HTGD: the queries as compared, [H, T, G, d] float32 scaled by 1/sqrt(d): moved to one relative position
        where the clusters are (windowed RoPE), the true ones otherwise.
    """

    clusters: ClusteredKeys
    logits_HTGC: Tensor
    queries_HTGD: Tensor

    kind = CLUSTERS

    def part(self, heads: slice, positions: slice) -> ScoredClusters:
        every = heads.start == 0 and heads.stop >= len(self.clusters.counts_HC)
        return ScoredClusters(
            self.clusters if every else self.clusters.heads(heads),
            self.logits_HTGC[heads, positions],
            self.queries_HTGD[heads, positions],
        )

    def remainder_bytes(self, moments: str, searched: bool) -> float:
        """Of a tree at most: what is not expanded is not read."""
        clusters = self.clusters
        arrays = [clusters.counts_HC, clusters.value_sums_HCD, None if searched else clusters.means_HCD]
        if moments != "none":
            arrays.append(clusters.variances_HCD)
        return float(sum(array[0].numel() * array.element_size() for array in arrays if array is not None))


@dataclass(frozen=True, slots=True)
class Selection:
    """Keys kept for every (KV head, query position) of one layer.

    ids_HTK: [H, T, K] int32 key ids, ascending and unique within the first `counts` entries of a row; entries
        beyond are undefined but valid ids.
    counts_HT: [H, T] int32, how many entries of a row count.
    """

    ids_HTK: Tensor
    counts_HT: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What a budget may know besides the ranking.

    length: tokens of sinks, searched keys and recent window together. thresholds: for a wanted fraction of the keys,
        the threshold that was calibrated offline for this context and index; None without a calibration.
    read_logits: exact q.k for key ids [H, T, G, K] of the searched range -> [H, T, G, K] float32.
    exact_lse_HTG: [H, T, G] float32, log-sum-exp of the logits of all keys outside the searched range (sinks, recent
        window, tail).
    """

    length: int
    thresholds: Callable[[float], float] | None
    read_logits: Callable[[Tensor], Tensor]
    exact_lse_HTG: Tensor


@dataclass(frozen=True, slots=True)
class Members:
    """Keys of items: item c holds keys_HX[h, offsets_HM[h, c] : offsets_HM[h, c + 1]].

    offsets_HM: [H, M + 1] int32, ascending. keys_HX: [H, X] int32 key ids, every key at most once.
    """

    offsets_HM: Tensor
    keys_HX: Tensor

    @property
    def sizes_HM(self) -> Tensor:
        """Keys per item, [H, M] int32."""
        return self.offsets_HM.diff(dim=1)


@dataclass(frozen=True, slots=True)
class Items:
    """Which keys the columns of a ranking stand for.

    first_key, end_key: the searched range; keys outside it are never selected, whatever item lists them.
    groups: the columns' members, one group's columns after another's. Empty when column j is the single key
        first_key + j.
    """

    first_key: int
    end_key: int
    groups: tuple[Members, ...] = ()


class Ranking:
    """Estimated logits of candidate items for every (KV head, query position, group head).

    logits_HTGM: [H, T, G, M] float32, q.k of a key or of a cluster's mean key; -inf marks an item that the index did
        not retrieve. Where the index's scores are no estimates of q.k (`LayerIndex.estimates_logits`), only their
        order inside one row means something.
    pieces: the index's own clusters or coarse rows, scored, when it has some.
    vectors_read: vectors of the index compared with the queries, per KV head and position on average. bytes_read: bytes
        of the index read for it, likewise.
    """

    def __init__(
        self,
        logits_HTGM: Tensor,
        items: Items,
        pieces: Sequence[Piece] = (),
        vectors_read: float = 0.0,
        bytes_read: float = 0.0,
    ) -> None:
        self._logits_HTGM = logits_HTGM
        self.items = items
        self.pieces = tuple(pieces)
        self.vectors_read = vectors_read
        self.bytes_read = bytes_read

    @property
    def logits_HTGM(self) -> Tensor:
        return self._logits_HTGM

    def capped(self, form: LogitForm) -> Ranking:
        """The same with the layer's cap on its logits, where it has one; the pieces' stay as they are."""
        if form.cap is None:
            return self
        logits = self.logits_HTGM
        capped = form.capped(logits).masked_fill_(torch.isneginf(logits), -torch.inf)
        return Ranking(capped, self.items, self.pieces, self.vectors_read, self.bytes_read)

    def log_weights_HTGM(self) -> Tensor:
        """Logarithm of the estimated attention weight of a single key of every item.

        S_i = exp(q.c_i) / sum_j N_j exp(q.c_j) with N_j keys in item j (Squeezed Attention eq. 1).
        """
        logits = self.logits_HTGM
        sized, groups = logits, self.items.groups
        if groups:
            sizes_HM = torch.cat([group.sizes_HM for group in groups], dim=1)
            sized = logits + sizes_HM.float().log()[:, None, None]
        total = sized.logsumexp(-1, keepdim=True)
        # Where nothing was retrieved -inf - -inf would be nan.
        return logits - total.masked_fill_(torch.isneginf(total), 0.0)

    def weights(self) -> Tensor:
        """Estimated attention weight of a single key of every item, averaged over the group's heads: [H, T, M]."""
        return self.log_weights_HTGM().exp_().mean(2)

    def scores(self) -> Tensor:
        """[H, T, M] in the order of `weights`; their scale means nothing. Cheaper where the index knows a way."""
        logits = self.logits_HTGM
        if logits.shape[2] == 1:
            return logits[:, :, 0]
        if not self.items.groups:
            return pooled_weights(logits)
        scores = self.weights()
        # exp() of a retrieved item may underflow to the 0 of one that was not.
        return scores.masked_fill_(torch.isneginf(logits).all(2), -torch.inf)
