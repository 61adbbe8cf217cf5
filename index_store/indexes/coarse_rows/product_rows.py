"""Keys and values as codewords of their slices: 8 bits for 4 channels (2 bits each) or for 2 (4 bits each).

Slices are contiguous. Codebooks come from k-means of the context's own slices and are kept in float16; what a session
appends is coded with them, too.

Shape legend: H KV heads, N rows, S slices of a key or value, W = 256 codewords, w channels of a slice, d = S w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.kmeans.kmeans import euclidean_kmeans_batch

CODEWORDS = 256

_TRAINED = 32_768  # rows that k-means learns from: 128 for each codeword
_COMPARED = 2**23  # products of slices and codewords at a time


@dataclass(frozen=True, slots=True)
class ProductRows:
    """Coded keys and values of the consecutive tokens first_id, first_id + 1, ...; row n is token first_id + n.

    key_codes_HNS, value_codes_HNS: [H, N, S] uint8, number of the slice's codeword; rows of one head are contiguous,
    heads may be farther apart. key_codebooks_HSWw, value_codebooks_HSWw: [H, S, 256, w] float16. Keys and values may
    differ in S and w.
    """

    key_codes_HNS: Tensor
    key_codebooks_HSWw: Tensor
    value_codes_HNS: Tensor
    value_codebooks_HSWw: Tensor
    first_id: int = 0
    lead: ClassVar[int] = 0
    """Their keys share no scales by blocks: runs of them begin anywhere."""

    @property
    def count(self) -> int:
        """Rows, N."""
        return self.key_codes_HNS.shape[1]

    @property
    def head_dim(self) -> int:
        _, slices, _, width = self.key_codebooks_HSWw.shape
        return slices * width

    def key_bytes(self, count: int) -> float:
        """Bytes of so many coded keys of one head, and of the codewords, which every search reads."""
        return float(count * self.key_codes_HNS.shape[2] + 2 * CODEWORDS * self.head_dim)

    def value_bytes(self, count: int) -> float:
        """Bytes of so many coded values of one head, and of the codewords."""
        return float(count * self.value_codes_HNS.shape[2] + 2 * CODEWORDS * self.head_dim)

    def heads(self, part: slice) -> ProductRows:
        """The same for some KV heads."""
        return replace(
            self,
            key_codes_HNS=self.key_codes_HNS[part],
            key_codebooks_HSWw=self.key_codebooks_HSWw[part],
            value_codes_HNS=self.value_codes_HNS[part],
            value_codebooks_HSWw=self.value_codebooks_HSWw[part],
        )

    def decode_keys(self, first: int, end: int) -> Tensor:
        """Rows first..end-1 of the keys, [H, n, d] float32."""
        return _decode(self.key_codes_HNS[:, first:end], self.key_codebooks_HSWw)

    def decode_values(self, first: int, end: int) -> Tensor:
        """Rows first..end-1 of the values, [H, n, d] float32."""
        return _decode(self.value_codes_HNS[:, first:end], self.value_codebooks_HSWw)


def code_products(
    kv_HN2D: Tensor, key_width: int, value_width: int, iterations: int, seed: int
) -> ProductRows:
    """Codes keys and values [H, N, 2, d] by codebooks of their own, slices of key_width and value_width channels.

    Raises InvalidArgumentError as `find_codebooks` does.
    """
    keys, values = kv_HN2D.unbind(2)
    key_books = find_codebooks(keys, key_width, iterations, seed)
    value_books = find_codebooks(values, value_width, iterations, seed)
    return ProductRows(find_codes(keys, key_books), key_books, find_codes(values, value_books), value_books)


def find_codebooks(rows_HND: Tensor, width: int, iterations: int, seed: int) -> Tensor:
    """[H, S, 256, w] float16: codewords of the slices of rows [H, N, d], by k-means where the rows are.

    It learns from up to 32,768 rows, evenly spread. Raises InvalidArgumentError for a width that does not divide d,
    and for numbers that float16 cannot hold.
    """
    heads, count, head_dim = rows_HND.shape
    if head_dim % width:
        raise InvalidArgumentError(
            f"head dimension {head_dim} does not split into slices of {width}, as product codes of {8 // width} bits "
            f"need it; use coding=scalar"
        )
    chosen = torch.linspace(0, count - 1, min(count, _TRAINED), device=rows_HND.device).round().long()
    slices_HPSw = rows_HND[:, chosen].view(heads, len(chosen), -1, width)
    points = slices_HPSw.transpose(1, 2).flatten(0, 1)
    found = euclidean_kmeans_batch(points, CODEWORDS, iterations, seed)
    codebooks = found.view(heads, -1, CODEWORDS, width).half()
    if not bool(torch.isfinite(codebooks).all()):
        raise InvalidArgumentError(
            "keys or values beyond 65504 cannot be coded, since codewords are float16; use a method without a coarse "
            "copy, such as --method csattention"
        )
    return codebooks


def find_codes(rows_HND: Tensor, codebooks_HSWw: Tensor) -> Tensor:
    """[H, N, S] uint8: the nearest codeword of every slice of rows [H, N, d]."""
    heads, count, _ = rows_HND.shape
    _, slices, codewords, width = codebooks_HSWw.shape
    codes = torch.empty(heads, count, slices, dtype=torch.uint8, device=rows_HND.device)
    books_HSwW = codebooks_HSWw.float().transpose(2, 3).contiguous()
    biases_HS1W = books_HSwW.square().sum(2, keepdim=True).mul_(-0.5)
    step = max(1, _COMPARED // (heads * slices * codewords))
    for first in range(0, count, step):
        part = rows_HND[:, first : first + step].float()
        slices_HSnw = part.view(heads, part.shape[1], slices, width).transpose(1, 2)
        nearness = torch.matmul(slices_HSnw, books_HSwW).add_(biases_HS1W)
        codes[:, first : first + step] = nearness.argmax(-1).to(torch.uint8).transpose(1, 2)
    return codes


def _decode(codes_HnS: Tensor, codebooks_HSWw: Tensor) -> Tensor:
    heads, slices, _, width = codebooks_HSWw.shape
    head_H11 = torch.arange(heads, device=codes_HnS.device)[:, None, None]
    slice_S = torch.arange(slices, device=codes_HnS.device)
    found = codebooks_HSWw[head_H11, slice_S, codes_HnS.long()]
    return found.view(heads, codes_HnS.shape[1], slices * width).float()
