"""What a search yields: estimated logits of items, each of which stands for one key or for several.

Shape legend: H KV heads, T query positions, G group heads (1 where a search pooled the group's queries), M items,
X keys listed by items, d head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.attention.logit_form import LogitForm
from index_store.attention.pooled_weights_numba import pooled_weights
from index_store.selection.pieces import Piece


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
        sized = logits if not self.items.groups else logits + self._log_sizes_HM()[:, None, None]
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

    def _log_sizes_HM(self) -> Tensor:
        sizes = torch.cat([group.sizes_HM for group in self.items.groups], dim=1)
        return sizes.float().log()
