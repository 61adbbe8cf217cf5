"""Host kernel of the search over product codes, beside its eager reference.

Shape legend: H KV heads, T query positions, G group heads, N keys of the context, A rows of the appended codes, S
subspaces, W codewords per subspace, M scored keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from index_store.compiled.launch import F4, U1, launch, njit, on_host, task_loop

_GATHERED_BYTES = 64 * 2**20  # table entries that the reference gathers at a time
_TILE = 1024  # keys whose codes stay in the first-level cache while every query scores them


@dataclass(frozen=True, slots=True)
class CodeReads:
    """What a search reads: for every query the scores of all codewords, and the codes of keys first..end-1.

    codes_HNS, appended_HAS: uint8; row a of the second is key N + a, and it may have more rows than are read.
    tables_HTGSW: float32, the product of a query's slice with every codeword.
    """

    codes_HNS: Tensor
    appended_HAS: Tensor
    tables_HTGSW: Tensor
    first: int
    end: int


def score_codes(reads: CodeReads) -> Tensor:
    """[H, T, G, M] float32: the sum over subspaces of the table's entry for the key's code, keys first..end-1.

    One pass over the codes serves all queries of a KV head.
    """
    if not on_host(reads.codes_HNS):
        return score_codes_reference(reads)
    heads, positions, group = reads.tables_HTGSW.shape[:3]
    out = torch.empty(heads, positions, group, max(0, reads.end - reads.first), device="cpu")
    if out.numel() > 0:
        launch(
            _score_codes,
            heads * -(-out.shape[3] // _TILE),
            reads.codes_HNS.numpy(),
            reads.appended_HAS.numpy(),
            reads.tables_HTGSW.contiguous().flatten(1, 2).numpy(),
            reads.first,
            out.flatten(1, 2).numpy(),
            work=0.3 * out.numel() * reads.tables_HTGSW.shape[3],
        )
    return out


def score_codes_reference(reads: CodeReads) -> Tensor:
    """The same by gathering table entries, some keys at a time, on any device."""
    count = reads.codes_HNS.shape[1]
    heads, positions, group, subspaces, _ = reads.tables_HTGSW.shape
    step = max(1, _GATHERED_BYTES // (heads * positions * group * subspaces * 4))
    begins = range(reads.first, reads.end, step)
    parts = [torch.empty(heads, positions, group, 0, device=reads.codes_HNS.device)]
    for begin in begins:
        end = min(begin + step, reads.end)
        own = reads.appended_HAS[:, max(begin - count, 0) : max(end - count, 0)]
        codes = torch.cat([reads.codes_HNS[:, begin:end], own], dim=1)
        rows = codes.long().transpose(1, 2)[:, None, None].expand(heads, positions, group, subspaces, -1)
        parts.append(reads.tables_HTGSW.gather(4, rows).sum(3))
    return torch.cat(parts, dim=3)


@njit()
def _score_rows(codes: U1, table: F4, out: F4) -> None:  # pragma: no cover - compiled
    for i in range(out.shape[0]):
        total = np.float32(0)
        for s in range(codes.shape[1]):
            total += table[s, codes[i, s]]
        out[i] = total


@task_loop("u1x3 u1x3 f4x4 i8 f4x3")
def _score_codes(
    task: int, codes: U1, appended: U1, tables: F4, first: int, out: F4
) -> None:  # pragma: no cover - compiled
    (_, queries, columns), keys = out.shape, codes.shape[1]
    tiles = (columns + _TILE - 1) // _TILE
    h, low = task // tiles, (task % tiles) * _TILE
    high = min(low + _TILE, columns)
    border = min(max(keys - first, low), high)  # from there on keys are appended ones
    for q in range(queries):
        if border > low:
            _score_rows(codes[h, first + low : first + border], tables[h, q], out[h, q, low:border])
        if high > border:
            begin = first + border - keys
            rows = appended[h, begin : begin + high - border]
            _score_rows(rows, tables[h, q], out[h, q, border:high])
