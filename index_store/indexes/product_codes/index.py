"""Product codes: keys quantised slice by slice, scored through lookup tables (PQCache).

The head dimension is split into subspaces. In each, k-means of the keys' slices gives a codebook, and a key is kept as
the numbers of its slices' nearest codewords. A query's products with all codewords are looked up and added for every
key, which approximates its product with the key.

Shape legend: H KV heads, T positions, G group heads, N keys, S subspaces, W = 2^bits codewords, B = d/S slice width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    Asked,
    GrowingRows,
    LayerIndex,
    LayerSource,
    are_many,
    by_tiles,
    check_keys,
    subspace_dims,
)
from index_store.indexes.kmeans.kmeans import euclidean_kmeans
from index_store.indexes.product_codes.parameters import CodeKind, CodeParameters
from index_store.indexes.product_codes.search_numba import CodeReads, score_codes
from index_store.selection.ranking import Items, Ranking
from index_store.store.description.json_fields import Scalar


def score_codes_by_products(
    codes: tuple[Tensor, Tensor], slices_HTGSB: Tensor, codebooks_HSWB: Tensor, first: int, end: int
) -> Tensor:
    """`score_codes`: [H, T, G, M] float32, the products of queries with keys first..end-1 as their codes have them.

    codes: of the context's keys [H, N, S], and of appended ones [H, A, S]. Keys are put together from their codewords,
    a tile at a time.
    """
    shared_HNS, appended_HAS = codes
    count = shared_HNS.shape[1]
    heads, positions, group, subspaces, width = slices_HTGSB.shape
    head_H11 = torch.arange(heads, device=slices_HTGSB.device)[:, None, None]
    subspace_S1 = torch.arange(subspaces, device=slices_HTGSB.device)[:, None]

    def tile(begin: int, stop: int) -> Tensor:
        own = appended_HAS[:, max(begin - count, 0) : max(stop - count, 0)]
        codes_HSn = torch.cat([shared_HNS[:, begin:stop], own], dim=1).long().transpose(1, 2)
        return codebooks_HSWB[head_H11, subspace_S1, codes_HSn].transpose(2, 3).flatten(1, 2)

    queries = slices_HTGSB.reshape(heads, positions * group, subspaces * width)
    return by_tiles(queries, tile, first, end, subspaces * width).view(heads, positions, group, -1)


_KEYS_AT_ONCE = 2048  # keys compared with all codewords at a time


class AppendedCodes(AppendedKeys):
    """A session's own codes, of the context's codebooks."""

    def __init__(self, codebooks_HSWB: Tensor, dims_SB: Tensor) -> None:
        heads, subspaces = codebooks_HSWB.shape[:2]
        super().__init__(heads, dims_SB.numel())
        self._codebooks_HSWB = codebooks_HSWB
        self._dims_SB = dims_SB
        self.codes = GrowingRows(heads, subspaces, dtype=torch.uint8, device=codebooks_HSWB.device)

    def _extend(self, kv_HT2D: Tensor) -> None:
        self.codes.append(_encode(kv_HT2D[:, :, 0], self._codebooks_HSWB, self._dims_SB))

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes


class ProductCodes(CodeKind, LayerIndex):
    """Codes and codebooks of one layer's keys."""

    def __init__(self, parameters: CodeParameters, arrays: Mapping[str, Tensor]) -> None:
        self._codes_HNS = arrays["codes"]
        super().__init__(arrays, self._codes_HNS.shape[1])
        self._codebooks_HSWB = arrays["codebooks"]
        _, subspaces, _, width = self._codebooks_HSWB.shape
        self._dims_SB = subspace_dims(parameters, subspaces * width).to(self._codes_HNS.device)

    @classmethod
    def build(cls, parameters: Mapping[str, Scalar], source: LayerSource, seed: int) -> Self:
        parsed = CodeParameters.parse(parameters)
        keys = source.keys_HND
        check_keys(keys)
        return cls(parsed, _build_arrays(parsed, keys, seed))

    @classmethod
    def from_arrays(
        cls, parameters: Mapping[str, Scalar], arrays: Mapping[str, Tensor], kv_HN2D: Tensor
    ) -> Self:
        return cls(CodeParameters.parse(parameters), arrays)

    def start_appending(self) -> AppendedCodes:
        return AppendedCodes(self._codebooks_HSWB, self._dims_SB)

    def _score(self, asked: Asked) -> Ranking:
        own = self._own(asked.appended, AppendedCodes)
        slices = asked.queries_HTGD[..., self._dims_SB]
        codes = (self._codes_HNS, own.codes.buffer)
        if are_many(slices):
            logits = score_codes_by_products(
                codes, slices, self._codebooks_HSWB, asked.first_key, asked.end_key
            )
        else:
            tables = torch.einsum("htgsb,hswb->htgsw", slices, self._codebooks_HSWB)
            logits = score_codes(CodeReads(*codes, tables, asked.first_key, asked.end_key))
        _, subspaces, codewords, width = self._codebooks_HSWB.shape
        codebook_bytes = subspaces * codewords * width * self._codebooks_HSWB.element_size()
        return Ranking(
            logits,
            Items(asked.first_key, asked.end_key),
            vectors_read=float(codewords),
            bytes_read=float((asked.end_key - asked.first_key) * subspaces + codebook_bytes),
        )


def _build_arrays(parameters: CodeParameters, keys_HND: Tensor, seed: int) -> dict[str, Tensor]:
    """codes [H, N, S] uint8 and codebooks [H, S, W, B] float32, where the keys are."""
    dims_SB = subspace_dims(parameters, keys_HND.shape[2])
    codewords = 2**parameters.bits
    if keys_HND.is_cuda:
        from index_store.indexes.product_codes.build_triton import build_device_codes

        return build_device_codes(
            keys_HND, dims_SB, codewords=codewords, iterations=parameters.iterations, seed=seed
        )
    codebooks = [
        euclidean_kmeans(head[:, dims], codewords, parameters.iterations, seed + number)
        for head in keys_HND
        for number, dims in enumerate(dims_SB)
    ]
    codebooks_HSWB = torch.stack(codebooks).view(len(keys_HND), len(dims_SB), codewords, -1)
    return {"codes": _encode(keys_HND, codebooks_HSWB, dims_SB), "codebooks": codebooks_HSWB}


def _encode(keys_HTD: Tensor, codebooks_HSWB: Tensor, dims_SB: Tensor) -> Tensor:
    """[H, T, S] uint8: the nearest codeword of every slice of keys [H, T, d]."""
    heads, count, _ = keys_HTD.shape
    codes = torch.empty(heads, count, len(dims_SB), dtype=torch.uint8, device=keys_HTD.device)
    biases_HSW = codebooks_HSWB.square().sum(-1).mul_(-0.5)
    for low in range(0, count, _KEYS_AT_ONCE):
        slices = keys_HTD[:, low : low + _KEYS_AT_ONCE].float()[..., dims_SB]
        nearness = torch.einsum("htsb,hswb->htsw", slices, codebooks_HSWB).add_(biases_HSW[:, None])
        codes[:, low : low + _KEYS_AT_ONCE] = nearness.argmax(-1).to(torch.uint8)
    return codes
