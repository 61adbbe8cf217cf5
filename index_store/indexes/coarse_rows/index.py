"""Coarse rows: every key and value in 2 to 4 bits a channel, all scored, and all that are not selected attended.

The coarse copy is a search and a partition of its own: a query's products with the coarse keys rank all keys, and the
remainder `coarse` takes the same products for the logits of those that were not selected.

Rows that a session adds are coded block by block. Scales and offsets of keys belong to blocks of positions
that do not depend on how keys arrive: the first block goes from the end of the context to the next multiple of 128. A
block that is not full is kept as it came and coded anew whenever keys join it, so rows appended in pieces equal rows
appended at once.

Shape legend: H KV heads, T positions, G group heads, N keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from index_store.compiled.launch import on_host
from index_store.indexes.coarse_rows.best_rows import Searched, attend_best
from index_store.indexes.coarse_rows.parameters import CoarseKind, CoarseParameters
from index_store.indexes.coarse_rows.scalars.coding_numba import code_rows
from index_store.indexes.coarse_rows.scalars.row_sizes import BLOCK, value_groups
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.scored_codes import ScoredCodes, score_rows
from index_store.indexes.interface.growing import GrowingRows
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

_ADDRESSED = 32_768
"""Rows up to which a decode step copies none of those before: copies of 16,384 take 10 ms in a layer of 8 KV heads."""


class AppendedRows(AppendedKeys):
    """Rows with scales and offsets of their own. shared: rows of the context, whose shapes and bits they have.

    Those of a block that is not full are held besides in float32.
    """

    def __init__(self, shared: ScalarRows) -> None:
        heads, device = len(shared.key_codes_HNC), shared.key_codes_HNC.device
        super().__init__(heads, shared.head_dim)
        self._first_id = shared.count
        self._key_bits, self._value_bits = shared.key_bits, shared.value_bits
        self._groups = shared.value_scales_HNV.shape[2]

        def growing(like: Tensor) -> GrowingRows:
            return GrowingRows(heads, like.shape[2], dtype=like.dtype, addressed=_ADDRESSED, device=device)

        self._key_codes, self._value_codes = growing(shared.key_codes_HNC), growing(shared.value_codes_HNC)
        self._key_scales, self._key_offsets = growing(shared.key_scales_HBD), growing(shared.key_offsets_HBD)
        self._value_scales = growing(shared.value_scales_HNV)
        self._value_offsets = growing(shared.value_offsets_HNV)
        self._open = GrowingRows(heads, 2, shared.head_dim, device=device, limit=BLOCK)
        self._rows: ScalarRows | None = None

    @property
    def rows(self) -> ScalarRows:
        """All of them: the same views until there are more."""
        if self._rows is None:
            self._rows = self._view_rows()
        return self._rows

    def fork(self) -> Self:
        other = super().fork()
        other._rows = None  # those are views of this one's
        return other

    def _view_rows(self) -> ScalarRows:
        return ScalarRows(
            self._key_codes.rows,
            self._key_scales.rows,
            self._key_offsets.rows,
            self._value_codes.rows,
            self._value_scales.rows,
            self._value_offsets.rows,
            self._key_bits,
            self._value_bits,
            self._first_id,
        )

    def _extend(self, kv_HT2D: Tensor) -> None:
        if not kv_HT2D.shape[1]:
            return
        raw = torch.cat([self._open.rows, kv_HT2D.float()], dim=1)
        end = self.count + kv_HT2D.shape[1]
        first = end - raw.shape[1]
        coded = code_rows(raw, self._first_id + first, self._key_bits, self._value_bits, self._groups)
        block = (self._first_id % BLOCK + first) // BLOCK
        for growing, start, rows in (
            (self._key_codes, first, coded.key_codes_HNC),
            (self._key_scales, block, coded.key_scales_HBD),
            (self._key_offsets, block, coded.key_offsets_HBD),
            (self._value_codes, first, coded.value_codes_HNC),
            (self._value_scales, first, coded.value_scales_HNV),
            (self._value_offsets, first, coded.value_offsets_HNV),
        ):
            growing.put(start, rows)
        left = min(raw.shape[1], (self._first_id + end) % BLOCK)
        if left:
            self._open.reserve(
                BLOCK
            )  # for good: how much room there is depends on no more than where keys end
        self._open.put(0, raw[:, raw.shape[1] - left :])
        self._rows = None

    @property
    def nbytes(self) -> int:
        held = (
            self._key_codes,
            self._key_scales,
            self._key_offsets,
            self._value_codes,
            self._value_scales,
            self._value_offsets,
            self._open,
        )
        return sum(rows.nbytes for rows in held)


class CoarseRows(CoarseKind, LayerIndex):
    """The coarse copy of one layer's keys and values."""

    def __init__(self, parameters: CoarseParameters, arrays: Mapping[str, Tensor]) -> None:
        super().__init__(arrays, arrays["key_codes"].shape[1])
        self.rows = _rows(parameters, arrays)

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = CoarseParameters.parse(parameters)
        check_keys(source.keys_HND)
        return cls(parsed, _build_arrays(parsed, source))

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(CoarseParameters.parse(parameters), arrays)

    def start_appending(self) -> AppendedRows:
        return AppendedRows(self.rows)

    @property
    def shares(self) -> bool:
        """Loops on a host do: no row of theirs depends on those beside it."""
        return on_host(self.rows.key_codes_HNC)

    def best_together(self, asked: Sequence[Asked], keeps: Sequence[int]) -> Best:
        if not self.shares:
            return super().best_together(asked, keeps)
        for each in asked:
            self._check_held(each.end_key, each.appended)
            self.parse_search(each.search)
        searched = [self._searched(each) for each in asked]
        ids, counts, others = attend_best(self.rows, searched, keeps)
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
        return AppendedRows(self.rows).rows

    def _searched(self, asked: Asked) -> Searched:
        own = self._no_rows if asked.appended is None else self._own(asked.appended, AppendedRows).rows
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
        for rows in (self.rows, self._own(appended, AppendedRows).rows):
            first = max(0, first_key - rows.first_id)
            end = min(rows.count, end_key - rows.first_id)
            if first < end:
                begin = rows.first_id + first - first_key
                pieces.append(score_rows(rows, queries_HTGD, first, logits[..., begin : begin + end - first]))
        return logits, tuple(pieces)


def _rows(parameters: CoarseParameters, arrays: Mapping[str, Tensor]) -> ScalarRows:
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


def _build_arrays(parameters: CoarseParameters, source: LayerSource) -> dict[str, Tensor]:
    """What is stored, made where keys and values are."""
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
