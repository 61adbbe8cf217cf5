"""Rows of a stored context, layer by layer, however they are stored.

Shape legend: H KV heads, N tokens of the context, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.row_planes.two_planes import TwoPlanes
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.dtypes import INT8, stored_dtype
from index_store.store.description.manifest import HIGH_PLANE
from index_store.store.stored_context import Context


def read_rows(context: Context, layer: int) -> Tensor:
    """Keys and values of a layer in host memory, [H, N, 2, d], of a layer with a window its last rows.

    In the stored dtype; rows in 8 bits decoded, in float32. Raises a ContextCorruptError where a checksum is wrong.
    """
    manifest = context.manifest
    stored = _read(context, manifest.layer_entry(layer), layer)
    high = manifest.index(HIGH_PLANE)
    if manifest.rows != INT8 or high is None or layer not in manifest.model.full_layers:
        return stored
    arrays = {entry.path.rpartition("/")[2]: _read(context, entry, layer) for entry in high.arrays}
    coarse = CoarseRows.from_arrays(high.parameters, arrays, stored).rows
    return TwoPlanes(coarse, stored, stored_dtype(manifest.dtype).torch_dtype).decode(0, stored.shape[1])


def _read(context: Context, entry: ArrayEntry, layer: int) -> Tensor:
    out = torch.empty(entry.shape[1:], dtype=stored_dtype(entry.dtype).torch_dtype, device="cpu")
    for head, part in enumerate(out):
        context.read_head(entry.path, layer, head, part)
    return out
