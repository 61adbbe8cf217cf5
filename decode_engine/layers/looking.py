"""Where a session's searching layers look in the context while an answer is made.

Shape legend: H KV heads, T query positions, G group heads, K keys that are attended to exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from decode_engine.layers.selected_attention import Observation
from decode_engine.orders.events import LayersLooked, Looks

MOST_LOOKS = 256
"""Tokens of an answer that are told of."""
GROUPS = 4
"""Of layers."""
MOST_PLACES = 24
"""Of a group of layers, for one token."""


class Looking:
    """Collects what searching layers selected for one in `every` tokens of an answer (`Session.watch`).

    first: position of the query that the answer's first token comes from. tokens: of the context; what the layers look
    at behind it is not told. searching: the layers that search. Costs one more read of the selected keys for each of
    these tokens; and a session that is watched takes no captured steps. tell: is told of the first answer.
    """

    def __init__(
        self, first: int, every: int, tokens: int, searching: list[int], tell: Callable[[Looks], None]
    ) -> None:
        self._first, self._every, self._tokens, self._tell = first, every, tokens, tell
        size = max(1, math.ceil(len(searching) / GROUPS))
        self._groups = [searching[at : at + size] for at in range(0, len(searching), size)]
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def observe(self, layer: int, seen: Observation) -> None:
        """Takes in what a layer found; the last one of a token has it told."""
        place = max(0, -(-(seen.position - self._first) // self._every))
        row = self._first + place * self._every - seen.position
        if not 0 <= row < seen.q_HTGD.shape[1] or place >= MOST_LOOKS:
            return
        self._seen[layer] = looked_at(seen, row, self._tokens)
        if layer == self._groups[-1][-1]:
            seen_all, self._seen = self._seen, {}
            told = [
                _most(group, [seen_all[one] for one in group if one in seen_all]) for group in self._groups
            ]
            self._tell(Looks(0, place * self._every, told))


def looked_at(seen: Observation, row: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The context's keys that one query of an observation selected, as ids [n], and the attention that they got [n].

    tokens: of the context. The weights are shares of the attention to selection, sinks, recent window and tail, a mean
    over all query heads.
    """
    q_HTGD = seen.q_HTGD[:, row : row + 1].float()
    ids, counts = seen.selection.ids_HTK, seen.selection.counts_HT
    one = min(row, ids.shape[1] - 1)  # one selection may be for all positions
    heads, width = len(ids), max(1, int(counts[:, one].max()))
    device = ids.device
    always = torch.cat([torch.arange(seen.sinks), torch.arange(seen.search_end, seen.position + row + 1)]).to(
        device, torch.int32
    )
    ids_HTK = torch.cat([ids[:, one, :width], always.expand(heads, -1)], dim=1)[:, None]
    chosen_HTK = torch.arange(ids_HTK.shape[2], device=device) < counts[:, one, None, None]
    kept_HTK = chosen_HTK | (torch.arange(ids_HTK.shape[2], device=device) >= width)
    keys_HTKD = seen.rows.gather(ids_HTK)[..., 0, :].to(q_HTGD.device)
    logits_HTGK = seen.form.capped(q_HTGD @ keys_HTKD.transpose(-1, -2))
    logits_HTGK = logits_HTGK.masked_fill(~kept_HTK[:, :, None].to(logits_HTGK.device), -torch.inf)
    lse_HTG = logits_HTGK.logsumexp(-1)
    if seen.form.sink_HG is not None:
        lse_HTG = torch.logaddexp(lse_HTG, seen.form.sink_HG[:, None])
    weights_HTK = (logits_HTGK - lse_HTG[..., None]).exp().mean(2) / heads
    told = (chosen_HTK & (ids_HTK < tokens)).cpu()
    return ids_HTK.cpu()[told].long(), weights_HTK.cpu()[told]


def _most(group: list[int], seen: list[tuple[Tensor, Tensor]]) -> LayersLooked:
    """Where the layers of a group looked most."""
    if not seen:
        return LayersLooked(group[0], group[-1], (), ())
    places, where = torch.unique(torch.cat([ids for ids, _ in seen]), return_inverse=True)
    weights = torch.zeros(len(places)).index_add_(0, where, torch.cat([got for _, got in seen]) / len(seen))
    best = weights.topk(min(MOST_PLACES, len(places)))
    found = [round(weight, 6) for weight in best.values.tolist()]
    return LayersLooked(group[0], group[-1], places[best.indices].tolist(), found)
