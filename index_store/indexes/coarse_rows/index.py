"""Coarse rows: every key and value in 2 to 4 bits a channel, all scored, and all that are not selected attended.

The coarse copy is a search and a partition of its own: a query's products with the coarse keys rank all keys, and the
remainder `coarse` takes the same products for the logits of those that were not selected.

Shape legend: H KV heads, T positions, G group heads, N keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from index_store.compiled.launch import on_host
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.appended import (
    AppendedProducts,
    AppendedScalars,
)
from index_store.indexes.coarse_rows.best_rows import Searched, attend_best
from index_store.indexes.coarse_rows.parameters import CoarseKind, CoarseParameters
from index_store.indexes.coarse_rows.product_rows import ProductRows, code_products
from index_store.indexes.coarse_rows.scalars.coding_numba import code_rows
from index_store.indexes.coarse_rows.scalars.row_sizes import value_groups
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.scored_codes import CodedRows, ScoredCodes, score_rows
from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    Asked,
    Best,
    LayerIndex,
    LayerSource,
    check_keys,
)
from index_store.selection.ranking import Items, Ranking
from index_store.store.description.json_fields import Scalar


class CoarseRows(CoarseKind, LayerIndex):
    """The coarse copy of one layer's keys and values."""

    def __init__(self, parameters: CoarseParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(arrays, arrays["key_codes"].shape[1])
        self.rows = _rows(parameters, arrays)

    @property
    def scalars(self) -> ScalarRows:
        """The rows of scalar codes. Raises InvalidArgumentError for product codes."""
        if not isinstance(self.rows, ScalarRows):
            raise InvalidArgumentError("the coarse copy has product codes, expected scalar ones")
        return self.rows

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = CoarseParameters.parse(parameters)
        check_keys(source.keys_HND)
        return cls(parsed, _build_arrays(parsed, source, seed))

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(CoarseParameters.parse(parameters), arrays)

    def start_appending(self) -> AppendedScalars | AppendedProducts:
        return (
            AppendedScalars(self.rows) if isinstance(self.rows, ScalarRows) else AppendedProducts(self.rows)
        )

    @property
    def shares(self) -> bool:
        """Loops over scalar codes on a host do: no row of theirs depends on those beside it."""
        return isinstance(self.rows, ScalarRows) and on_host(self.rows.key_codes_HNC)

    def best_together(self, asked: Sequence[Asked], keeps: Sequence[int]) -> Best:
        if not self.shares:
            return super().best_together(asked, keeps)
        for each in asked:
            self._check_held(each.end_key, each.appended)
            self.parse_search(each.search)
        searched = [self._searched(each) for each in asked]
        ids, counts, others = attend_best(self.scalars, searched, keeps)
        ids += torch.tensor([each.first_key for each in asked], dtype=torch.int32, device="cpu")[:, None]
        keys = [max(0, each.end_key - each.first_key) for each in asked]
        return Best(
            ids,
            counts,
            others,
            [float(count) for count in keys],
            [self.rows.key_bytes(count) for count in keys],
            [self.rows.value_bytes(count) for count in keys],
        )

    @cached_property
    def _no_rows(self) -> ScalarRows:
        """What a session has appended that has appended nothing."""
        return AppendedScalars(self.scalars).rows

    def _searched(self, asked: Asked) -> Searched:
        own = self._no_rows if asked.appended is None else self._own(asked.appended, AppendedScalars).rows
        shared = range(asked.first_key, min(asked.end_key, self.rows.count))
        appended = range(max(0, asked.first_key - own.first_id), max(0, asked.end_key - own.first_id))
        return Searched.of(asked.queries_HTGD[:, 0], shared, own, appended)

    def _score(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        search: Mapping[str, Scalar],
        position: int | None,
    ) -> Ranking:
        self.parse_search(search)
        logits, pieces = self._scored(queries_HTGD, first_key, end_key, appended)
        count = logits.shape[3]
        items = Items(first_key, end_key)
        return Ranking(logits, items, pieces, float(count), self.rows.key_bytes(count))

    def pieces(
        self,
        queries_HTGD: Tensor,
        first_key: int,
        end_key: int,
        appended: AppendedKeys | None,
        position: int | None = None,
    ) -> tuple[ScoredCodes, ...]:
        return self._scored(queries_HTGD, first_key, end_key, appended)[1]

    def _scored(
        self, queries_HTGD: Tensor, first_key: int, end_key: int, appended: AppendedKeys | None
    ) -> tuple[Tensor, tuple[ScoredCodes, ...]]:
        """Logits [H, T, G, M] of keys first_key..end_key-1, and the pieces whose logits are views of them."""
        logits = queries_HTGD.new_empty(*queries_HTGD.shape[:3], max(0, end_key - first_key))
        pieces = []
        for rows in (self.rows, self._own_rows(appended)):
            first = max(0, first_key - rows.first_id)
            end = min(rows.count, end_key - rows.first_id)
            if first < end:
                begin = rows.first_id + first - first_key
                pieces.append(score_rows(rows, queries_HTGD, first, logits[..., begin : begin + end - first]))
        return logits, tuple(pieces)

    def _own_rows(self, appended: AppendedKeys | None) -> CodedRows:
        if isinstance(self.rows, ScalarRows):
            return self._own(appended, AppendedScalars).rows
        return self._own(appended, AppendedProducts).rows


def _rows(parameters: CoarseParameters, arrays: Mapping[str, Tensor]) -> CodedRows:
    if parameters.coding == "product":
        return ProductRows(
            arrays["key_codes"],
            arrays["key_codebooks"],
            arrays["value_codes"],
            arrays["value_codebooks"],
        )
    return ScalarRows(
        arrays["key_codes"],
        arrays["key_scales"],
        arrays["key_offsets"],
        arrays["value_codes"],
        arrays["value_scales"],
        arrays["value_offsets"],
        parameters.key_bits,
        parameters.value_bits,
    )


def _build_arrays(parameters: CoarseParameters, source: LayerSource, seed: int) -> dict[str, Tensor]:
    """What is stored, made where keys and values are."""
    if parameters.coding == "product":
        widths = parameters.key_slice, parameters.value_slice
        products = code_products(source.kv_HN2D, *widths, parameters.iterations, seed)
        return {
            "key_codes": products.key_codes_HNS,
            "key_codebooks": products.key_codebooks_HSWw,
            "value_codes": products.value_codes_HNS,
            "value_codebooks": products.value_codebooks_HSWw,
        }
    groups = value_groups(source.kv_HN2D.shape[3], parameters.value_group)
    rows = code_rows(source.kv_HN2D, 0, parameters.key_bits, parameters.value_bits, groups)
    return {
        "key_codes": rows.key_codes_HNC,
        "key_scales": rows.key_scales_HBD,
        "key_offsets": rows.key_offsets_HBD,
        "value_codes": rows.value_codes_HNC,
        "value_scales": rows.value_scales_HNV,
        "value_offsets": rows.value_offsets_HNV,
    }
