"""Lookup tables of product codes: products of the queries' slices with every codeword, a byte for each head.

One lookup per key and subspace serves four heads of a group, because their entries share a 32-bit word. How many
lookups shared memory serves per clock is what limits the search, so entries are as small as a selection allows: 7
bits, which leave room to add two of them in a byte. They are counted from the largest entry of their subspace
downwards, which a softmax does not notice. The step is one of 127 in twice the widest range that a few codewords of
each subspace span; what lies deeper makes no difference, and is cut. That is finer than what a code leaves of a key.

Shape legend: as in `codes.sizes`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E
from decode_engine.kernels.codes.sizes import WORD_HEADS, CodeSizes, CodeWork
from decode_engine.kernels.families import PRODUCT_CODES
from decode_engine.kernels.launches import chained, wait_for_launch
from decode_engine.kernels.record_fields import CODEBOOKS, aligned_pointer, searched_keys

_LEVELS = 127
_FEW = 16  # codewords of each subspace that tell how wide its entries spread
_DEPTH = 2.0
_LEVELS_F = tl.constexpr(float(_LEVELS))
_DEPTH_F = tl.constexpr(_DEPTH)


@triton.jit
def tables_kernel(
    q_ptr: tl.tensor,
    records_ptr: tl.tensor,
    tables_ptr: tl.tensor,
    units_ptr: tl.tensor,
    scale_log2: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    M: tl.constexpr,
    W: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_HEADS: tl.constexpr,
    FEW: tl.constexpr,
    STRIDED: tl.constexpr,
    CHAINED: tl.constexpr,
) -> None:
    """Program (s, row): one subspace. Rows that search nothing are left as they are."""
    own = tl.program_id(0)
    row = tl.program_id(1)
    b = row // HEADS
    E: tl.constexpr = DIM // M
    s = tl.arange(0, M)
    e = tl.arange(0, E)
    w = tl.arange(0, W)
    few = tl.arange(0, FEW)
    # Before the wait: nobody writes codebooks, and records are written long before.
    first, end = searched_keys(records_ptr, b)
    searches = end > first
    books_ptr = aligned_pointer(records_ptr, b, (row % HEADS) * (M * W * E), CODEBOOKS, tl.float32)
    some_ptrs = books_ptr + (s[:, None, None] * W + few[None, :, None]) * E + e[None, None, :]
    some = tl.load(some_ptrs, mask=searches, other=0.0)
    book = tl.load(books_ptr + (own * W + w[:, None]) * E + e[None, :], mask=searches, other=0.0)
    wait_for_launch(CHAINED)
    if searches:
        dims = e[None, :] * M + s[:, None] if STRIDED else s[:, None] * E + e[None, :]
        own_dims = e * M + own if STRIDED else own * E + e
        i = tl.arange(0, WORD_HEADS)
        for n in tl.static_range(WORDS):
            of_few: tl.tensor = ()
            of_all: tl.tensor = ()
            for head in tl.static_range(n * WORD_HEADS, (n + 1) * WORD_HEADS):
                head_ptr = q_ptr + (row * GROUP + head) * DIM
                q = tl.load(head_ptr + dims, mask=head < GROUP, other=0.0).to(tl.float32)
                of_few += (tl.sum(some * q[:, None, :], 2),)
                q = tl.load(head_ptr + own_dims, mask=head < GROUP, other=0.0).to(tl.float32)
                of_all += (tl.sum(book * q[None, :], 1),)
            spread = tl.reshape(stack(of_few), [M, FEW, WORD_HEADS])
            span = tl.max(tl.max(spread, 1) - tl.min(spread, 1), 0) * _DEPTH_F
            factor = _LEVELS_F / tl.maximum(span, 1e-30)
            products = tl.reshape(stack(of_all), [W, WORD_HEADS])
            above = (products - tl.max(products, 0)[None, :]) * factor[None, :]
            levels = tl.maximum(above + _LEVELS_F + 0.5, 0.0).to(tl.int32)
            at = (row * WORDS + n) * (M * W) + own * W + w
            tl.store(tables_ptr + at, tl.sum(levels << (8 * i)[None, :], 1))
            if own == 0:
                g = n * WORD_HEADS + i
                tl.store(units_ptr + row * GROUP + g, span * (scale_log2 / _LEVELS_F), mask=g < GROUP)


@triton.jit
def stack(parts: tl.tensor) -> tl.tensor:
    """One, two or four tensors side by side, in one or two new dimensions at the end."""
    if len(parts) == 1:
        stacked = parts[0]
    elif len(parts) == 2:
        stacked = tl.join(parts[0], parts[1])
    else:
        stacked = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return stacked


def make_tables(q_BHGD: Tensor, records_BF: Tensor, sizes: CodeSizes, work: CodeWork) -> None:
    """Fills tables and units of `work` for one step's queries [B, H, G, d], contiguous, unscaled."""
    tables_kernel[(sizes.subspaces, q_BHGD.shape[0] * sizes.kv_heads)](
        q_BHGD,
        records_BF,
        work.tables_ROX,
        work.units_RG,
        sizes.scale * LOG2E,
        HEADS=sizes.kv_heads,
        GROUP=sizes.group,
        DIM=sizes.head_dim,
        M=sizes.subspaces,
        W=sizes.codewords,
        WORDS=sizes.words,
        WORD_HEADS=sizes.word_heads,
        FEW=min(_FEW, sizes.codewords),
        STRIDED=sizes.strided,
        num_warps=8 if sizes.codewords == PRODUCT_CODES.parts["codewords"][1] else 4,
        **chained(q_BHGD.device),
    )


def make_tables_reference(q_GD: Tensor, codebooks_MWE: Tensor, sizes: CodeSizes) -> tuple[Tensor, Tensor]:
    """The same for one row: words [O, M * W] int32 and units [G] float32."""
    if sizes.strided:
        slices_GME = q_GD.float().view(sizes.group, -1, sizes.subspaces).transpose(1, 2)
    else:
        slices_GME = q_GD.float().view(sizes.group, sizes.subspaces, -1)
    products_GMW = torch.einsum("gme,mwe->gmw", slices_GME, codebooks_MWE.float())
    few_GMW = products_GMW[:, :, :_FEW]
    span_G = (few_GMW.amax(-1) - few_GMW.amin(-1)).amax(-1) * _DEPTH
    factor_G = _LEVELS / span_G.clamp(min=1e-30)
    below_GMW = (products_GMW.amax(-1, keepdim=True) - products_GMW) * factor_G[:, None, None]
    levels = (_LEVELS + 0.5 - below_GMW).clamp(min=0).to(torch.int32)
    words = torch.zeros(sizes.words, sizes.subspaces * sizes.codewords, dtype=torch.int32, device=q_GD.device)
    for g, level in enumerate(levels.flatten(1)):
        words[g // WORD_HEADS] |= level << (8 * (g % WORD_HEADS))
    return words, span_G * (sizes.scale * LOG2E / _LEVELS)
