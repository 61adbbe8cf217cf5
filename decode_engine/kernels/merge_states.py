"""Merges partial attention states by their log-sum-exp, any number at a time.

Shape legend: B sequences, H KV heads, X partial states, G query heads per KV head, d head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
_SLICE = 32  # of the head dimension: many small programs, because the merge is short
_AT_ONCE = 256


@triton.jit
def merge_kernel(
    outs_ptr: tl.tensor,
    lses_ptr: tl.tensor,
    out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    X: tl.tensor,
    G: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BX: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """Program (row, slice): one query head and BD dimensions."""
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0)
    bh = row // G
    g = row % G
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    peak = float("-inf")
    mass = 0.0
    acc = tl.zeros([BD], tl.float32)
    for start in range(0, X, BX):
        x = start + tl.arange(0, BX)
        place = (bh * X + x) * G + g
        lse = tl.load(lses_ptr + place, mask=x < X, other=float("-inf")) * _LOG2E
        there = lse > float("-inf")
        out = tl.load(outs_ptr + place.to(tl.int64)[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        higher = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - base)
        fade = tl.exp2(peak - base)
        mass = mass * fade + tl.sum(weights, 0)
        acc = acc * fade + tl.sum(weights[:, None] * out, 0)
        peak = higher
    total = tl.where(mass > 0.0, mass, 1.0)
    tl.store(out_ptr + row * D + d, (acc / total).to(out_ptr.dtype.element_ty))
    if tl.program_id(1) == 0:
        tl.store(lse_ptr + row, (peak + tl.log2(total)) * _LN2)
    if DEPENDENT:
        gdc_launch_dependents()


def merge_into(
    outs_BHXGD: Tensor,
    lses_BHXG: Tensor,
    out_BHGD: Tensor,
    lse_BHG: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """Writes the merged states to out_BHGD (any float dtype) and lse_BHG (float32).

    outs_BHXGD: float32, softmax-weighted means. lses_BHXG: float32 natural log-sum-exps, -inf where a state is empty
    (its `out` may then hold anything). All contiguous. dependent: launched while the kernel before still runs.
    """
    batch, heads, partials, group, head_dim = outs_BHXGD.shape
    merge_kernel[(batch * heads * group, head_dim // _SLICE)](
        outs_BHXGD,
        lses_BHXG,
        out_BHGD,
        lse_BHG,
        partials,
        G=group,
        D=head_dim,
        BD=_SLICE,
        BX=min(_AT_ONCE, max(16, triton.next_power_of_2(partials))),
        DEPENDENT=dependent,
        **({"launch_pdl": True} if dependent else {}),
    )


def merge_into_reference(
    outs_BHXGD: Tensor,
    lses_BHXG: Tensor,
    out_BHGD: Tensor,
    lse_BHG: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """The same in torch."""
    lse = lses_BHXG.logsumexp(2)
    base = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    weights = torch.exp(lses_BHXG - base[:, :, None])[..., None]
    out_BHGD.copy_((weights * outs_BHXGD.masked_fill(weights == 0, 0.0)).sum(2))
    lse_BHG.copy_(lse)
