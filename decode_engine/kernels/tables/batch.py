"""Query tables as the kernels find them, through records; and sequences as the eager reference takes them.

Shape legend: B sequences, H KV heads, N keys of a context, m subspaces, C centroids, W = d/m slice width, d head dim,
F fields of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode_engine.kernels import records
from decode_engine.kernels.tables.plan import MINI_KEYS
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
        if two != 2 or head_dim not in (64, 128) or not has_padded_rows(self.tables_HMCN):
            raise InvalidArgumentError(
                f"a table context has keys of dimension {head_dim} and table strides {self.tables_HMCN.stride()}; "
                f"expected a dimension of 64 or 128, and rows a multiple of {MINI_KEYS} bytes apart"
            )

    @property
    def keys(self) -> int:
        return self.kv_HN2D.shape[1]

    def record(self) -> dict[int, int]:
        """The fields of a record that say where the tables are."""
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


@dataclass(frozen=True, slots=True)
class TableSequence:
    """Where one sequence stands.

    Keys [0, first) of the context, [end, N) of the context and tail tokens [0, tail_keys) are attended exactly; keys
    [first, end) are searched and about `keep` of them attended. tail_HT2D: [H, capacity, 2, d] in the context's dtype.
    Raises InvalidArgumentError where that cannot be.
    """

    context: TableContext
    tail_HT2D: Tensor
    first: int
    end: int
    tail_keys: int
    keep: int

    def __post_init__(self) -> None:
        heads, keys, _, head_dim = self.context.kv_HN2D.shape
        if not 0 <= self.first <= self.end <= keys:
            raise InvalidArgumentError(
                f"searched keys [{self.first}, {self.end}) of a context of {keys} keys; expected "
                "0 <= first <= end <= keys"
            )
        tail = self.tail_HT2D
        if not 0 <= self.tail_keys <= tail.shape[1] or self.keep < 0:
            raise InvalidArgumentError(
                f"{self.tail_keys} tail tokens of {tail.shape[1]} and {self.keep} keys to keep; expected "
                "counts from 0 that the tail's memory holds"
            )
        if tail.dtype != self.context.kv_HN2D.dtype or not tail.is_contiguous():
            raise InvalidArgumentError(f"the tail is {tail.dtype}, expected the context's dtype, contiguous")
        if (tail.shape[0], tail.shape[2], tail.shape[3]) != (heads, 2, head_dim):
            raise InvalidArgumentError(
                f"the tail is {tuple(tail.shape)}, expected [{heads}, any, 2, {head_dim}]"
            )

    def record(self) -> list[int]:
        """The record of this sequence."""
        kv, tail = self.context.kv_HN2D, self.tail_HT2D
        fields = self.context.record() | {
            records.KV: kv.data_ptr(),
            records.KV_HEAD: kv.stride(0) * kv.element_size(),
            records.TAIL: tail.data_ptr(),
            records.TAIL_HEAD: tail.stride(0) * tail.element_size(),
            records.KEYS: kv.shape[1],
            records.FIRST: self.first,
            records.END: self.end,
            records.TAIL_KEYS: self.tail_keys,
            records.KEEP: self.keep,
        }
        return [fields.get(field, 0) for field in range(records.RECORD_FIELDS)]


def records_of(sequences: Sequence[TableSequence | None], device: torch.device) -> Tensor:
    """Records [B, F] int64 on the device; None is an idle row. The sequences must outlive their use."""
    idle = [0] * records.RECORD_FIELDS
    rows = [idle if sequence is None else sequence.record() for sequence in sequences]
    return torch.tensor(rows, dtype=torch.int64).to(device)
