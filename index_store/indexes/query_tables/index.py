"""Query tables: keys scored offline against centroids of the prefill queries (CSAttention sections 3.1-3.3).

The head dimension is split into m subspaces. In each, the prefill queries of a KV head's whole group are clustered by
spherical k-means into C unit centroids, and every key's slice is scored against every centroid. Decoding picks the
nearest centroid per subspace and adds m table rows, weighted by the query's projection on each centroid, which
approximates the true product of query and key.

Two layouts: `dense` keeps every score as int8 with one scale per subspace (m*C bytes per token and head);
`lists` keeps the Top-L keys per centroid, L = alpha*N, as int32 ids and 16-bit scores (6*m*C*alpha bytes).

Shape legend: H KV heads, T positions, G group heads, R = T*G query rows, N keys, m subspaces, C centroids, S = m*C
table rows, D head dim, B = D/m slice width, J rows read per query row, L list capacity, M ranked keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from index_store.indexes.interface.index_kind import grown
from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    Asked,
    LayerIndex,
    LayerSource,
    are_many,
    by_tiles,
    check_keys,
    subspace_dims,
)
from index_store.indexes.query_tables.build import INT8_MAX, INT16_MAX, build_tables
from index_store.indexes.query_tables.parameters import LEAST_ENTRIES, TableKind, TableParameters, TableSearch
from index_store.indexes.query_tables.search_numba import (
    Lists,
    TableReads,
    insert_keys,
    score_lists,
    softmax_sum_rows,
    sum_rows,
)
from index_store.selection.ranking import Items, Ranking
from index_store.store.description.json_fields import Scalar


def sum_rows_by_products(reads: TableReads) -> Tensor:
    """`sum_rows`: [H, T, G, M] float32, the weighted sum of table rows for keys first..end-1."""
    heads, positions, group, _ = reads.rows_HTGJ.shape
    stored = reads.tables_HSN.shape[1]
    weights = torch.zeros(heads, positions * group, stored, device=reads.weights_HTGJ.device)
    weights.scatter_add_(2, reads.rows_HTGJ.flatten(1, 2).long(), reads.weights_HTGJ.flatten(1, 2))

    def tile(begin: int, end: int) -> Tensor:
        count = reads.tables_HSN.shape[2]
        own = reads.appended_HSA[..., max(begin - count, 0) : max(end - count, 0)]
        return torch.cat([reads.tables_HSN[..., begin:end], own], dim=2).float()

    found = by_tiles(weights, tile, reads.first, reads.end, stored)
    return found.view(heads, positions, group, -1)


@dataclass(frozen=True, slots=True)
class _KeyScorer:
    """Scores keys against the centroids, in units of the tables' scales."""

    centroids_HMCB: Tensor
    scales_HM: Tensor
    dims_MB: Tensor
    cosine: bool

    def score(self, keys_HTD: Tensor, limit: int) -> Tensor:
        """[H, T, S] float32 whole numbers, clamped to +-limit, where the centroids are."""
        slices = keys_HTD.to(self.centroids_HMCB.device).float()[..., self.dims_MB]
        if self.cosine:
            slices = torch.nn.functional.normalize(slices, dim=-1)
        scores = torch.einsum("htmb,hmcb->htmc", slices, self.centroids_HMCB)
        units = (scores / self.scales_HM[:, None, :, None]).round_().clamp_(-limit, limit)
        return units.flatten(2)


class AppendedDense(AppendedKeys):
    """A session's own table columns, grown by doubling."""

    def __init__(self, scorer: _KeyScorer) -> None:
        heads, subspaces, centroids, width = scorer.centroids_HMCB.shape
        super().__init__(heads, subspaces * width)
        self._scorer = scorer
        device = scorer.centroids_HMCB.device
        self.rows_HSN = torch.empty(heads, subspaces * centroids, 0, dtype=torch.int8, device=device)

    def _extend(self, kv_HT2D: Tensor) -> None:
        scores_HTS = self._scorer.score(kv_HT2D[:, :, 0], INT8_MAX).to(torch.int8)
        new = scores_HTS.shape[1]
        if self.count + new > self.rows_HSN.shape[2]:
            heads, rows, _ = self.rows_HSN.shape
            buffer = self.rows_HSN.new_empty(heads, rows, grown(self.count + new))
            buffer[:, :, : self.count] = self.rows_HSN[:, :, : self.count]
            self.rows_HSN = buffer
        self.rows_HSN[:, :, self.count : self.count + new] = scores_HTS.transpose(1, 2)

    def fork(self) -> Self:
        other = super().fork()
        other.rows_HSN = self.rows_HSN.clone()
        return other

    @property
    def nbytes(self) -> int:
        return self.rows_HSN.numel()


class AppendedLists(AppendedKeys):
    """What streaming inserts changed in the shared lists: shorter stored parts and sorted insert buffers."""

    def __init__(self, scorer: _KeyScorer, ids_HSL: Tensor, values_HSL: Tensor, first_id: int) -> None:
        heads, rows, capacity, device = *ids_HSL.shape, ids_HSL.device
        super().__init__(heads, scorer.dims_MB.numel())
        self._scorer = scorer
        self._first_id = first_id
        self.lists = Lists(
            ids_HSL,
            values_HSL,
            torch.full((heads, rows), capacity, dtype=torch.int32, device=device),
            torch.empty(heads, rows, LEAST_ENTRIES, dtype=torch.int32, device=device),
            torch.empty(heads, rows, LEAST_ENTRIES, dtype=torch.int16, device=device),
            torch.zeros(heads, rows, dtype=torch.int32, device=device),
        )

    def _extend(self, kv_HT2D: Tensor) -> None:
        scores_HTS = self._scorer.score(kv_HT2D[:, :, 0], INT16_MAX).to(torch.int16)
        self._reserve(int(self.lists.inserted_HS.max()) + scores_HTS.shape[1])
        insert_keys(self.lists, scores_HTS, self._first_id + self.count)

    def fork(self) -> Self:
        other, own = super().fork(), self.lists
        other.lists = replace(
            own,
            kept_HS=own.kept_HS.clone(),
            inserted_ids_HSE=own.inserted_ids_HSE.clone(),
            inserted_values_HSE=own.inserted_values_HSE.clone(),
            inserted_HS=own.inserted_HS.clone(),
        )
        return other

    def _reserve(self, entries: int) -> None:
        capacity = self.lists.inserted_ids_HSE.shape[2]
        if entries <= capacity:
            return
        pad = (0, grown(entries, LEAST_ENTRIES) - capacity)
        self.lists = replace(
            self.lists,
            inserted_ids_HSE=torch.nn.functional.pad(self.lists.inserted_ids_HSE, pad),
            inserted_values_HSE=torch.nn.functional.pad(self.lists.inserted_values_HSE, pad),
        )

    @property
    def nbytes(self) -> int:
        return self.lists.inserted_ids_HSE.numel() * 6 + self.lists.kept_HS.numel() * 8


class QueryTables(TableKind, LayerIndex):
    """The tables of one layer in either layout."""

    def __init__(self, parameters: TableParameters, arrays: Mapping[str, Tensor], keys_HND: Tensor) -> None:
        super().__init__(arrays, keys_HND.shape[1])
        self._parameters = parameters
        self._scores_HSN = arrays["scores"].flatten(1, 2)
        self._ids_HSL = arrays["ids"].flatten(1, 2) if parameters.layout == "lists" else None
        self._scorer = _KeyScorer(
            arrays["centroids"],
            arrays["scales"],
            subspace_dims(parameters, keys_HND.shape[2]).to(arrays["centroids"].device),
            parameters.scores == "cosine",
        )

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = TableParameters.parse(parameters)
        check_keys(source.keys_HND)
        return cls(parsed, build_tables(parsed, source, seed), source.keys_HND)

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(TableParameters.parse(parameters), arrays, kv_HN2D[:, :, 0])

    def start_appending(self) -> AppendedDense | AppendedLists:
        # An extension knows the tensors that it needs and not the index: a cycle would keep an evicted context's
        # memory until the garbage collector comes by.
        if self._ids_HSL is None:
            return AppendedDense(self._scorer)
        return AppendedLists(self._scorer, self._ids_HSL, self._scores_HSN, self.key_count)

    def _score(self, asked: Asked) -> Ranking:
        options = TableSearch.parse(asked.search)
        # Tables in host memory are searched there, also for queries on a device.
        device = asked.queries_HTGD.device
        queries_HTGD = asked.queries_HTGD.to(self._scores_HSN.device)
        if options.group == "pooled":
            queries_HTGD = queries_HTGD.mean(2, keepdim=True)
        rows, weights = self._nearest(queries_HTGD, options)
        items = Items(asked.first_key, asked.end_key)
        if self._ids_HSL is None:
            own_HSN = self._own(asked.appended, AppendedDense).rows_HSN
            reads = TableReads(self._scores_HSN, own_HSN, rows, weights, asked.first_key, asked.end_key)
            return _TableRanking(reads, items, device)
        scores = torch.empty(*rows.shape[:3], asked.end_key - asked.first_key, device=rows.device)
        floor_missing = options.weights == "projection"
        lists, flat = (
            self._own(asked.appended, AppendedLists).lists,
            (rows.flatten(1, 2), weights.flatten(1, 2)),
        )
        score_lists(lists, *flat, asked.first_key, floor_missing, scores.flatten(1, 2))
        return Ranking(scores.to(device), items)

    def _nearest(self, queries_HTGD: Tensor, options: TableSearch) -> tuple[Tensor, Tensor]:
        """Table rows [H, T, G, J] int32 and their weights [H, T, G, J] float32, in units of the stored integers."""
        slices = queries_HTGD[..., self._scorer.dims_MB]
        products = torch.einsum("htgmb,hmcb->htgmc", slices, self._scorer.centroids_HMCB)
        centroids = products.shape[-1]
        offsets_M = torch.arange(products.shape[-2], device=products.device) * centroids
        scales_HM = self._scorer.scales_HM[:, None, None]
        if options.backoff_centroids == 1:
            best = products.max(-1)
            rows = best.indices + offsets_M
            weights = (
                best.values.clamp_(min=0) if options.weights == "projection" else torch.ones_like(best.values)
            )
            return rows.to(torch.int32), weights * scales_HM
        # Sorted, so that of equally near centroids (a query of zeros) every device takes the same.
        nearest = (products + 0.0).sort(dim=-1, descending=True, stable=True)
        shared_by = min(options.backoff_centroids, centroids)
        values, found = nearest.values[..., :shared_by], nearest.indices[..., :shared_by]
        cosine = values[..., 0] / slices.norm(dim=-1).clamp_(min=1e-12)
        back_off = (cosine < options.backoff_cosine).unsqueeze(-1)
        first_only = values.new_zeros(shared_by)
        first_only[0] = 1.0
        shared = torch.full_like(first_only, 1.0 / len(first_only))
        weights = torch.where(back_off, shared, first_only) * scales_HM[..., None]
        rows = found + offsets_M[:, None]
        return rows.flatten(3).to(torch.int32), weights.flatten(3).contiguous()


class _TableRanking(Ranking):
    """Scores of a table, added up only in the form that a budget asks for, and then brought to the device."""

    def __init__(self, reads: TableReads, items: Items, device: torch.device) -> None:
        rows = float(reads.rows_HTGJ.shape[2:].numel())
        super().__init__(reads.weights_HTGJ, items, bytes_read=rows * (items.end_key - items.first_key))
        self._reads = reads
        self._device = device

    @property
    def logits_HTGM(self) -> Tensor:
        many = are_many(self._reads.rows_HTGJ)
        return (sum_rows_by_products if many else sum_rows)(self._reads).to(self._device)

    def scores(self) -> Tensor:
        if self._reads.rows_HTGJ.shape[2] > 1:
            return softmax_sum_rows(self._reads).to(self._device)
        return super().scores()
