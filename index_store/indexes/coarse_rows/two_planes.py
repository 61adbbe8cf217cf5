"""Keys and values in 8 bits a channel, in two planes: the high one is the coarse copy, the low one refines it.

The coarse copy names one of 16 levels for a number x: code = floor(u), u = (x - offset) / scale + 1/2, which is the
cell of one scale around offset + scale * code. The low plane has the sixteenth of that cell: low = floor(16 (u -
code)), and a number is decoded as the middle of it, offset + scale * (code + (low - 7.5) / 16). No number is farther
than scale / 32 from what was coded, a sixteenth of what the coarse copy is off. Ranges lie within the levels, so the
first and the last eight of 256 numbers are not used.

Shape legend: H KV heads, N tokens, n rows, X listed rows, d head dim, C = d / 2 bytes of a row of 4-bit codes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from index_store.compiled.launch import on_host
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.planes_numba import decode_listed, decode_run
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows, pack, parts_of, unpack
from index_store.store.description.array_entry import ArrayEntry
from index_store.store.description.dtypes import INT8, stored_dtype
from index_store.store.description.manifest import HIGH_PLANE
from index_store.store.stored_context import Context

LEVELS = 16
"""Of the low plane, for each of the coarse copy's."""


@dataclass(frozen=True, slots=True)
class TwoPlanes:
    """Keys and values of a context's layer, in place of a tensor [H, N, 2, d].

    coarse: all rows in 4 bits, first_id 0. low_HN2C: uint8 [H, N, 2, d/2], codes of 4 bits (`pack`), where the
    coarse rows are or in host memory beside them. dtype: of rows that are added to them, and that these were made of.
    """

    coarse: ScalarRows
    low_HN2C: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """[H, N, 2, d]."""
        return torch.Size((*self.low_HN2C.shape[:3], 2 * self.low_HN2C.shape[3]))

    @property
    def device(self) -> torch.device:
        """Where the low plane is, as keys and values of a context are."""
        return self.low_HN2C.device

    def element_size(self) -> int:
        """Bytes of a number, in both planes."""
        return 1

    def data_ptr(self) -> int:
        """Equal for the same rows only."""
        return self.low_HN2C.data_ptr()

    def heads(self, part: slice) -> TwoPlanes:
        return replace(self, coarse=self.coarse.heads(part), low_HN2C=self.low_HN2C[part])

    def decode(self, first: int, end: int, out: Tensor | None = None) -> Tensor:
        """Rows first..end-1, [H, n, 2, d] float32, where the coarse rows are.

        out: memory that may be taken for them, if it has as many rows: new memory costs a CPU more than decoding does.
        """
        low = self.low_HN2C[:, first:end]
        if on_host(self.coarse.key_codes_HNC):
            fits = out is not None and out.shape[1] == end - first
            return decode_run(self.coarse, low, first, out if fits else None)
        return self.refine(first, low.to(self.coarse.key_codes_HNC.device))

    def refine(self, first: int, low_Hn2C: Tensor) -> Tensor:
        """`decode` of as many rows from `first` on as the low plane has here, which is where the coarse rows are."""
        return decode_run_reference(self.coarse, low_Hn2C, first)

    def pick(self, ids_HX: Tensor) -> Tensor:
        """Listed rows, [H, X, 2, d] float32; all planes and ids are in one memory."""
        if on_host(self.coarse.key_codes_HNC):
            return decode_listed(self.coarse, self.low_HN2C, ids_HX)
        return decode_listed_reference(self.coarse, self.low_HN2C, ids_HX)

    def refine_listed(self, ids_HX: Tensor, low_HX2C: Tensor) -> Tensor:
        """`pick` of rows whose low plane was fetched to where ids and coarse rows are."""
        return _decode_rows(self.coarse, ids_HX, low_HX2C)


ContextRows = Tensor | TwoPlanes
"""Keys and values of a context's layer: [H, N, 2, d], or as good as that."""


def find_low_plane(kv_HN2D: Tensor, coarse: ScalarRows) -> Tensor:
    """The low plane, uint8 [H, N, 2, d/2], of keys and values that `coarse` has in 4 bits, where they are."""
    heads, count, _, head_dim = kv_HN2D.shape
    low = torch.empty(heads, count, 2, head_dim // 2, dtype=torch.uint8, device=kv_HN2D.device)
    for part in parts_of(kv_HN2D, coarse.first_id):
        rows = torch.arange(part.rows.start, part.rows.stop, device=kv_HN2D.device).expand(heads, -1)
        numbers, codes = kv_HN2D[:, part.rows].float(), _codes_of(coarse, rows)
        scales, offsets = _levels_of(coarse, rows)
        # As coding does it, so that the difference is exact: 16 u has the fraction that the code left over.
        places = (numbers - offsets).div_(torch.where(scales > 0, scales, 1.0)).add_(0.5)
        found = places.sub_(codes).mul_(LEVELS).floor_().clamp_(0, LEVELS - 1)
        low[:, part.rows] = pack(found.to(torch.uint8), 4)
    return low


def decode_run_reference(coarse: ScalarRows, low_Hn2C: Tensor, first: int) -> Tensor:
    """`decode_run` on any device."""
    rows = torch.arange(first, first + low_Hn2C.shape[1], device=low_Hn2C.device)
    return _decode_rows(coarse, rows.expand(len(low_Hn2C), -1), low_Hn2C)


def decode_listed_reference(coarse: ScalarRows, low_HN2C: Tensor, ids_HX: Tensor) -> Tensor:
    """`decode_listed` on any device."""
    heads = torch.arange(len(ids_HX), device=ids_HX.device)[:, None]
    return _decode_rows(coarse, ids_HX, low_HN2C[heads, ids_HX.long()])


def _decode_rows(coarse: ScalarRows, ids_HX: Tensor, low_HX2C: Tensor) -> Tensor:
    scales, offsets = _levels_of(coarse, ids_HX)
    steps = scales / LEVELS
    places = _codes_of(coarse, ids_HX).mul_(LEVELS).add_(unpack(low_HX2C, 4)).sub_(7.5)
    return places.mul_(steps).add_(offsets)


def _codes_of(coarse: ScalarRows, ids_HX: Tensor) -> Tensor:
    """The coarse codes of listed rows, [H, X, 2, d] float32."""
    heads, ids = torch.arange(len(ids_HX), device=ids_HX.device)[:, None], ids_HX.long()
    both = torch.stack([coarse.key_codes_HNC[heads, ids], coarse.value_codes_HNC[heads, ids]], dim=2)
    return unpack(both, 4).float()


def _levels_of(coarse: ScalarRows, ids_HX: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of listed rows, [H, X, 2, d] float32."""
    heads, ids = torch.arange(len(ids_HX), device=ids_HX.device)[:, None], ids_HX.long()
    blocks = (ids + coarse.lead) // BLOCK
    width = coarse.head_dim // coarse.value_scales_HNV.shape[2]

    def both(of_keys: Tensor, of_values: Tensor) -> Tensor:
        values = of_values[heads, ids].repeat_interleave(width, dim=2)
        return torch.stack([of_keys[heads, blocks], values], dim=2).float()

    return (
        both(coarse.key_scales_HBD, coarse.value_scales_HNV),
        both(coarse.key_offsets_HBD, coarse.value_offsets_HNV),
    )


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
