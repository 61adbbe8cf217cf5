"""Coded rows that a session adds to those of its context, block by block.

Scales and offsets of scalar-coded keys belong to blocks of positions that do not depend on how keys arrive: the first
block goes from the end of the context to the next multiple of 128. A block that is not full is kept as it came and
coded anew whenever keys join it, so rows appended in pieces equal rows appended at once.

Shape legend: H KV heads, T appended rows, d head dim.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from index_store.indexes.coarse_rows.product_rows import ProductRows, find_codes
from index_store.indexes.coarse_rows.scalars.coding_numba import code_rows
from index_store.indexes.coarse_rows.scalars.row_sizes import BLOCK
from index_store.indexes.coarse_rows.scalars.scalar_rows import ScalarRows
from index_store.indexes.interface.growing import GrowingRows
from index_store.indexes.interface.layer_index import AppendedKeys

_ADDRESSED = 32_768
"""Rows up to which a decode step copies none of those before: copies of 16,384 take 10 ms in a layer of 8 KV heads."""


class AppendedScalars(AppendedKeys):
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


class AppendedProducts(AppendedKeys):
    """Rows coded with the codebooks of the context's."""

    def __init__(self, shared: ProductRows) -> None:
        heads, device = len(shared.key_codes_HNS), shared.key_codes_HNS.device
        super().__init__(heads, shared.head_dim)
        self._shared = shared

        def growing(like: Tensor) -> GrowingRows:
            return GrowingRows(heads, like.shape[2], dtype=torch.uint8, device=device)

        self._keys, self._values = growing(shared.key_codes_HNS), growing(shared.value_codes_HNS)

    @property
    def rows(self) -> ProductRows:
        """All of them."""
        shared = self._shared
        return ProductRows(
            self._keys.rows,
            shared.key_codebooks_HSWw,
            self._values.rows,
            shared.value_codebooks_HSWw,
            shared.count,
        )

    def _extend(self, kv_HT2D: Tensor) -> None:
        keys, values = kv_HT2D.unbind(2)
        self._keys.append(find_codes(keys, self._shared.key_codebooks_HSWw))
        self._values.append(find_codes(values, self._shared.value_codebooks_HSWw))

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes
