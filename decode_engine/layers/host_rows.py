"""Keys and values in host memory or in two planes, for queries on a device: streamed in blocks, or picked row by row.

Rows of two planes are decoded where the queries are: a tensor of all of them is never made.

Shape legend: H KV heads, T query positions, N context tokens, n tokens of a block, K kept keys, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from decode_engine.kernels.slots import gather_rows
from decode_engine.kernels.slots.gather_rows import RowCopies
from index_store.indexes.coarse_rows.two_planes import ContextRows, TwoPlanes
from index_store.memory.host_memory import BlockReader, copy_source, is_readable

STREAM_BYTES = 32 * 2**20
"""Of one of the two blocks in device memory that keys and values are streamed through."""


DECODED_BYTES = 16 * 2**20
"""Of a block of two planes in float32 on a CPU: smaller ones cost more launches and merges than caches gain."""


def stream_blocks(rows: ContextRows, device: torch.device) -> Iterator[Tensor]:
    """All rows in order as blocks [H, n, 2, d] on the device, each good until the next one is asked for."""
    if not isinstance(rows, TwoPlanes):
        yield from _stream_blocks(rows, device)
    elif rows.device == device:
        heads, count, two, head_dim = rows.shape
        most = DECODED_BYTES if device.type == "cpu" else STREAM_BYTES
        step = min(count, max(1, most // (4 * heads * two * head_dim)))
        block = torch.empty(heads, step, two, head_dim, device=device)
        for first in range(0, count, step):
            yield rows.decode(first, min(first + step, count), block)
    else:
        first = 0
        for low_Hn2C in _stream_blocks(rows.low_HN2C, device):
            yield rows.refine(first, low_Hn2C)
            first += low_Hn2C.shape[1]


def _stream_blocks(kv_HN2D: Tensor, device: torch.device) -> Iterator[Tensor]:
    heads, count, two, head_dim = kv_HN2D.shape
    row_bytes = heads * two * head_dim * kv_HN2D.element_size()
    rows = min(max(1, STREAM_BYTES // row_bytes), max(count, 1))
    reader = BlockReader((heads, rows, two, head_dim), kv_HN2D.dtype, device)
    starts = range(0, count, rows)
    try:
        reader.start(kv_HN2D[:, start : min(start + rows, count)] for start in starts)
        for _ in starts:
            yield reader.next()
    finally:
        reader.end()


def copy_rows(rows: ContextRows, start: int, end: int, device: torch.device) -> Tensor:
    """A copy of rows start..end-1 on the device, [H, n, 2, d]."""
    if isinstance(rows, TwoPlanes):
        return rows.decode(start, max(start, end))
    return _copy_rows(rows, start, end, device)


def _copy_rows(kv_HN2D: Tensor, start: int, end: int, device: torch.device) -> Tensor:
    heads, _, two, head_dim = kv_HN2D.shape
    out = torch.empty(heads, max(end - start, 0), two, head_dim, dtype=kv_HN2D.dtype, device=device)
    source = copy_source(kv_HN2D, device)
    for head in range(heads):  # in one piece each
        out[head].copy_(source[head, start:end], non_blocking=device.type == "cuda")
    return out


def pick_rows(rows: ContextRows, ids_HTK: Tensor) -> Tensor:
    """Rows [H*T*K, 2*d] at the ids of every head, in the stored dtype or float32, on the ids' device.

    A GPU reads them from host memory itself where it can. Otherwise they are picked where they are, and
    copied once if the ids are elsewhere.
    """
    if not isinstance(rows, TwoPlanes):
        return _pick_rows(rows, ids_HTK)
    heads, _, two, head_dim = rows.shape
    ids_HX = ids_HTK.flatten(1)
    if rows.device == ids_HTK.device:
        return rows.pick(ids_HX).view(-1, two * head_dim)
    low = _pick_rows(rows.low_HN2C, ids_HTK).view(heads, -1, two, head_dim // 2)
    return rows.refine_listed(ids_HX, low).view(-1, two * head_dim)


def _pick_rows(kv_HN2D: Tensor, ids_HTK: Tensor) -> Tensor:
    device = ids_HTK.device
    heads = kv_HN2D.shape[0]
    # Rows between heads; more than N where a buffer has slack.
    stride = kv_HN2D.stride(0) // kv_HN2D.stride(1)
    width = kv_HN2D.shape[2] * kv_HN2D.shape[3]
    row_bytes = width * kv_HN2D.element_size()
    fetched = kv_HN2D.device.type == "cpu" and device.type == "cuda"
    read = fetched and row_bytes >= 16 and row_bytes & (row_bytes - 1) == 0 and is_readable(kv_HN2D)
    place = device if read else kv_HN2D.device
    offsets = (torch.arange(heads, device=place) * stride)[:, None, None]
    rows = (ids_HTK.to(place).long() + offsets).flatten()
    if read:
        return _read_rows(kv_HN2D, rows, width)
    table = kv_HN2D.as_strided(
        ((heads - 1) * stride + kv_HN2D.shape[1], width), (width, 1), kv_HN2D.storage_offset()
    )
    picked = torch.empty(len(rows), width, dtype=kv_HN2D.dtype, device=kv_HN2D.device, pin_memory=fetched)
    torch.index_select(table, 0, rows, out=picked)
    return picked.to(device, non_blocking=fetched)


def _read_rows(kv_HN2D: Tensor, rows_R: Tensor, width: int) -> Tensor:
    """Rows of host memory, by a kernel that reads them from there."""
    out = torch.empty(len(rows_R), width, dtype=kv_HN2D.dtype, device=rows_R.device)
    row_bytes = width * kv_HN2D.element_size()
    copies = RowCopies(
        rows_R * row_bytes + kv_HN2D.data_ptr(),
        torch.arange(len(rows_R), device=rows_R.device) * row_bytes + out.data_ptr(),
        torch.full((1,), len(rows_R), dtype=torch.int32, device=rows_R.device),
    )
    gather_rows.copy_rows(copies, row_bytes)
    return out
