"""Query tables as the kernels find them, through records.

Shape legend: H KV heads, N keys of a context, m subspaces, C centroids, W = d/m slice width, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.families import QUERY_TABLES
from decode_engine.kernels.tables.sizes import MINI_KEYS
from index_store.errors import InvalidArgumentError

_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class TableContext:
    """One layer of a context in device memory.

    kv_HN2D: [H, N, 2, d] in a float dtype. tables_HMCN: [H, m, C, N] int8 whose rows are a multiple of MINI_KEYS bytes
    apart (`padded_rows`); what lies between them may be anything. centroids_HMCW: [H, m, C, W] float32. scales_HM:
    [H, m] float32. Raises InvalidArgumentError where shapes, types or strides are others.
    """

    kv_HN2D: Tensor
    tables_HMCN: Tensor
    centroids_HMCW: Tensor
    scales_HM: Tensor

    def __post_init__(self) -> None:
        heads, count, two, head_dim = self.kv_HN2D.shape
        _, subspaces, centroids, width = self.centroids_HMCW.shape
        expected = {
            "centroids": (self.centroids_HMCW, (heads, subspaces, centroids, width), torch.float32),
            "scales": (self.scales_HM, (heads, subspaces), torch.float32),
            "tables": (self.tables_HMCN, (heads, subspaces, centroids, count), torch.int8),
            "kv": (self.kv_HN2D, (heads, count, 2, subspaces * width), self.kv_HN2D.dtype),
        }
        for name, (tensor, shape, dtype) in expected.items():
            contiguous = name == "tables" or tensor.is_contiguous()
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or not contiguous:
                raise InvalidArgumentError(
                    f"{name} of a table context are {tuple(tensor.shape)} {tensor.dtype}"
                    f"{'' if contiguous else ' not contiguous'}, expected {shape} {dtype} contiguous"
                )
        if two != 2 or head_dim not in QUERY_TABLES.head_dims or not has_padded_rows(self.tables_HMCN):
            raise InvalidArgumentError(
                f"a table context has keys of dimension {head_dim} and table strides {self.tables_HMCN.stride()}; "
                f"expected one of {QUERY_TABLES.head_dims}, and rows a multiple of {MINI_KEYS} bytes apart"
            )

    @property
    def keys(self) -> int:
        return self.kv_HN2D.shape[1]

    def fields(self) -> dict[int, int]:
        """Of a record: where the tables are."""
        return {
            records.TABLES: self.tables_HMCN.data_ptr(),
            records.TABLE_ROW: self.tables_HMCN.stride(2),
            records.CENTROIDS: self.centroids_HMCW.data_ptr(),
            records.SCALES: self.scales_HM.data_ptr(),
        }


def has_padded_rows(tables_HMCN: Tensor) -> bool:
    """Whether kernels can read the rows as they lie: whole blocks of MINI_KEYS bytes, in memory that is theirs."""
    heads, subspaces, centroids, keys = tables_HMCN.shape
    row = tables_HMCN.stride(2)
    if row % MINI_KEYS or row < keys or tables_HMCN.data_ptr() % _ALIGNED:
        return False
    if tables_HMCN.stride() != (subspaces * centroids * row, centroids * row, row, 1):
        return False
    blocks_end = (heads * subspaces * centroids - 1) * row + -(-keys // MINI_KEYS) * MINI_KEYS
    return tables_HMCN.storage_offset() + blocks_end <= tables_HMCN.untyped_storage().nbytes()


def padded_rows(tables_HMCN: Tensor) -> Tensor:
    """A copy [H, m, C, N] whose rows are padded with zeros to a multiple of MINI_KEYS bytes."""
    keys = tables_HMCN.shape[3]
    return torch.nn.functional.pad(tables_HMCN, (0, -keys % MINI_KEYS))[..., :keys]
