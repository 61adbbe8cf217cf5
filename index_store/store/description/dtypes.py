"""The element types a stored array may have: their names, their torch dtypes, and how zarr keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from index_store.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """One element type.

    name: the logical name, as in manifests ("bfloat16").
    zarr_name: what the zarr array declares; zarr has no bfloat16, which is kept as uint16 with the logical name
        in the array's attributes.
    itemsize: bytes per element.
    """

    name: str
    zarr_name: str
    itemsize: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in memory; torch has each of them under the same name."""
        import torch  # takes seconds, which whoever only lists a store need not wait for

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype


STORED_DTYPES: Mapping[str, StoredDtype] = {
    dtype.name: dtype
    for dtype in (
        StoredDtype("int8", "int8", 1),
        StoredDtype("uint8", "uint8", 1),
        StoredDtype("int16", "int16", 2),
        StoredDtype("uint16", "uint16", 2),
        StoredDtype("int32", "int32", 4),
        StoredDtype("uint32", "uint32", 4),
        StoredDtype("int64", "int64", 8),
        StoredDtype("float16", "float16", 2),
        StoredDtype("bfloat16", "uint16", 2),
        StoredDtype("float32", "float32", 4),
    )
}

KV_DTYPES = ("float32", "float16", "bfloat16")
"""Names of the dtypes in which keys and values may be stored."""

AS_DTYPE, INT8 = "dtype", "int8"
ROW_CODINGS = (AS_DTYPE, INT8)
"""How exact rows may be stored: in the dtype, or in 8 bits, of which the coarse copy has four."""

PLANE_DTYPE = "uint8"
"""Of the plane that has the other four."""


def stored_dtype(name: str) -> StoredDtype:
    """The element type of that logical name. Raises InvalidArgumentError when it cannot be stored."""
    if name not in STORED_DTYPES:
        raise InvalidArgumentError(
            f"dtype {name!r} cannot be stored; storable are {', '.join(STORED_DTYPES)}", dtype=name
        )
    return STORED_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The logical name of a torch dtype. Raises InvalidArgumentError when it cannot be stored."""
    return stored_dtype(str(dtype).removeprefix("torch.")).name
