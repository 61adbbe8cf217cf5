"""Pages of neighbouring keys, scored by an upper bound of their keys' products with the query (Quest).

A page keeps the smallest and the largest value of every dimension among its keys. sum_d max(q_d min_d, q_d max_d) is
at least q.k of each of them.

Shape legend: H KV heads, T positions, G group heads, N keys, P pages, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    Asked,
    GrowingRows,
    LayerIndex,
    LayerSource,
    check_keys,
)
from index_store.indexes.registry import PageKind, PageParameters
from index_store.selection.ranking import Items, Members, Ranking
from index_store.store.description.json_fields import Scalar

# Of the range of float32, in half its bytes, whatever the keys' own type; rounding goes away from the keys.
_BOUND_DTYPE = torch.bfloat16


class AppendedPages(AppendedKeys):
    """A session's own pages, of which the last one grows."""

    def __init__(self, heads: int, head_dim: int, size: int, device: torch.device | str = "cpu") -> None:
        super().__init__(heads, head_dim)
        self._size = size
        self.minima = GrowingRows(heads, head_dim, dtype=_BOUND_DTYPE, device=device)
        self.maxima = GrowingRows(heads, head_dim, dtype=_BOUND_DTYPE, device=device)

    def _extend(self, kv_HT2D: Tensor) -> None:
        keys = kv_HT2D[:, :, 0]
        room = -self.count % self._size
        if room > 0 and keys.shape[1] > 0:
            last = self.minima.count - 1
            minima, maxima = _bounds(keys[:, :room], self._size)
            self.minima.put(last, torch.minimum(self.minima.rows[:, last:], minima))
            self.maxima.put(last, torch.maximum(self.maxima.rows[:, last:], maxima))
        if keys.shape[1] > room:
            minima, maxima = _bounds(keys[:, room:], self._size)
            self.minima.append(minima)
            self.maxima.append(maxima)

    @property
    def nbytes(self) -> int:
        return self.minima.nbytes + self.maxima.nbytes


class Pages(PageKind, LayerIndex):
    """The pages of one layer's keys; the last one may be shorter than the others."""

    def __init__(self, parameters: PageParameters, arrays: Mapping[str, Tensor], key_count: int) -> None:
        super().__init__(arrays, key_count)
        self._size = parameters.size

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = PageParameters.parse(parameters)
        keys = source.keys_HND
        check_keys(keys)
        minima, maxima = _bounds(keys, parsed.size)
        return cls(parsed, {"minima": minima, "maxima": maxima}, keys.shape[1])

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(PageParameters.parse(parameters), arrays, kv_HN2D.shape[1])

    def start_appending(self) -> AppendedPages:
        minima = self._arrays["minima"]
        return AppendedPages(minima.shape[0], minima.shape[2], self._size, minima.device)

    def _score(self, asked: Asked) -> Ranking:
        """A page that lies in the range in part only is ranked whole, by the bound of all of its keys."""
        own = self._own(asked.appended, AppendedPages)
        minima, maxima = self._arrays["minima"], self._arrays["maxima"]
        parts = [self._part(minima, maxima, 0, self.key_count, asked.first_key, asked.end_key)]
        if asked.end_key > self.key_count:
            bounds = (own.minima.rows, own.maxima.rows)
            parts.append(self._part(*bounds, self.key_count, own.count, asked.first_key, asked.end_key))
        upper = torch.cat([_upper_bounds(asked.queries_HTGD, *vectors) for *vectors, _ in parts], dim=-1)
        items = Items(asked.first_key, asked.end_key, tuple(members for *_, members in parts))
        vectors_read = 2 * upper.shape[-1]
        bytes_read = vectors_read * asked.queries_HTGD.shape[-1] * _BOUND_DTYPE.itemsize
        return Ranking(upper, items, vectors_read=float(vectors_read), bytes_read=float(bytes_read))

    def _part(
        self, minima_HPD: Tensor, maxima_HPD: Tensor, first_id: int, keys: int, first_key: int, end_key: int
    ) -> tuple[Tensor, Tensor, Members]:
        """Bounds and members of those pages of keys first_id.. that touch the searched range."""
        low, high = (min(max(key - first_id, 0), keys) for key in (first_key, end_key))
        begin = low // self._size
        pages = slice(begin, -(-high // self._size) if low < high else begin)
        heads, count, _ = minima_HPD.shape
        device = minima_HPD.device
        offsets = torch.arange(count + 1, dtype=torch.int32, device=device).mul_(self._size).clamp_(max=keys)
        ids = torch.arange(first_id, first_id + keys, dtype=torch.int32, device=device)
        # Views of one row for all heads: pages are the same for every head.
        members = Members(offsets[pages.start : pages.stop + 1].expand(heads, -1), ids.expand(heads, -1))
        return minima_HPD[:, pages], maxima_HPD[:, pages], members


def _upper_bounds(queries_HTGD: Tensor, minima_HPD: Tensor, maxima_HPD: Tensor) -> Tensor:
    """[H, T, G, P] float32: at least the product of the query with any key of the page, up to rounding."""
    heads, positions, group, head_dim = queries_HTGD.shape
    flat = queries_HTGD.reshape(heads, positions * group, head_dim)
    bounds = torch.bmm(flat.clamp(min=0), maxima_HPD.float().transpose(1, 2))
    bounds += torch.bmm(flat.clamp(max=0), minima_HPD.float().transpose(1, 2))
    return bounds.view(heads, positions, group, -1)


def _bounds(keys_HND: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Minima and maxima [H, P, d] of pages of `size` keys, the last of which may be shorter, rounded outwards."""
    whole = keys_HND.shape[1] // size
    heads, _, head_dim = keys_HND.shape
    pages = keys_HND[:, : whole * size].reshape(heads, whole, size, head_dim)
    minima, maxima = [pages.amin(2)], [pages.amax(2)]
    if whole * size < keys_HND.shape[1]:
        rest = keys_HND[:, whole * size :]
        minima.append(rest.amin(1, keepdim=True))
        maxima.append(rest.amax(1, keepdim=True))
    return _rounded(torch.cat(minima, dim=1), -torch.inf), _rounded(torch.cat(maxima, dim=1), torch.inf)


def _rounded(bounds: Tensor, towards: float) -> Tensor:
    """The nearest value of the stored type that does not lie on the other side of the bound."""
    stored = bounds.to(_BOUND_DTYPE)
    error = stored.double() - bounds.double()
    falls_short = error > 0 if towards < 0 else error < 0
    return torch.where(falls_short, torch.nextafter(stored, torch.full_like(stored, towards)), stored)
