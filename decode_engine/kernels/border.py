"""Which of the keys at a threshold are kept, an evenly spread share of them; and which keys are sampled to find it.

A threshold is a bin of scores. Keys above it are kept; of those inside it as many as are still wanted, whatever their
scores are, so that scores which are flat or tied keep as many keys as others. Each key draws a number that follows from
its place: multiples of the golden ratio, whose fractions cover every share evenly on any stretch of keys. KV heads draw
others. Over query tables the four keys of a word draw together.

Samples are runs of keys at even distances, which move against one another from stretch to stretch of a context: of
text that repeats itself they hold all parts. Where keys are ranked by their weights, softmaxes summed over a group's
heads, the cut is found by bisection over the sample's (`cut_reference`): halving the range of weights is faster than a
histogram, whose time grows with its bins. Positive numbers are ordered as their bits are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEY_STEP, HEAD_STEP = -1640531527, 1332534557
"""2^32 over the golden ratio, and an odd number at random; as int32."""
MOST_DRAWS = 1.0 - 2.0**-24
LEAST_CUT, CUT_STEPS, CUT_MARGIN, INFINITE = (127 - 29) << 23, 10, 1 << 14, 0x7F800000
"""Bits of 2^-29 (summed weights are at most 2^4, and less is nothing); halvings of 32 octaves, down to 1/32 of one;
more than weights of a sample are rounded by, of 2^23 an octave."""

DRAW_STEP = tl.constexpr(_KEY_STEP)
_HEAD_STEP_C = tl.constexpr(HEAD_STEP)
_MOST_C = tl.constexpr(MOST_DRAWS)


@triton.jit
def draw(place: tl.tensor, head: tl.tensor) -> tl.tensor:
    """What int32 places draw, any int32; the next place draws DRAW_STEP more."""
    return place * DRAW_STEP + head * _HEAD_STEP_C


@triton.jit
def stretch_of(turn: tl.tensor, turns: tl.constexpr) -> tl.tensor:
    """In which of 64 stretches of a sample a turn is, 0 to 63, in an order in which neighbours lie far apart."""
    return (turn * 64 // turns) * 27 % 64


@triton.jit
def moved(turn: tl.tensor, turns: tl.constexpr, runs: tl.tensor, stretch: tl.tensor) -> tl.tensor:
    """The run that is sampled in a turn, where `turns` of more runs are; int32."""
    return (turn.to(tl.int64) * runs // turns).to(tl.int32) + (stretch * (runs // turns) >> 6)


@triton.jit
def draws_below(share: tl.tensor) -> tl.tensor:
    """The number below which a share (float32, 0 to 1) of all draws lies; int32."""
    return (tl.minimum(tl.maximum(share, 0.0), _MOST_C) * 4294967296.0 - 2147483648.0).to(tl.int32)


def stretch_of_reference(turn: Tensor, turns: int) -> Tensor:
    """`stretch_of` of int64 turns."""
    return (turn * 64 // turns) * 27 % 64


def moved_reference(turn: Tensor, turns: int, runs: int, stretch: Tensor) -> Tensor:
    """`moved` of int64 turns."""
    return turn * runs // turns + (stretch * (runs // turns) >> 6)


def draw_reference(place: Tensor, head: int) -> Tensor:
    """`draw` of int64 places, int32."""
    drawn = place.long() * _KEY_STEP + head * HEAD_STEP
    return ((drawn + 2**31) % 2**32 - 2**31).to(torch.int32)


def draws_below_reference(share: Tensor) -> Tensor:
    """`draws_below` of float32 shares, int32."""
    return (share.clamp(0.0, MOST_DRAWS) * 4294967296.0 - 2147483648.0).to(torch.int32)


def cut_reference(weights: Tensor, keep: int, searched: int) -> tuple[int, int, Tensor]:
    """Which weights are kept, by float32 weights of sampled keys: least, above and draws.

    Keys are kept whose weights, as bits of a float32 number, reach `above`; and those that reach `least` and draw less
    than `draws`. Around the cut, since many keys may have just its weight, and weights of the sample are rounded.
    """
    if keep >= searched:
        return -1, -1, torch.zeros((), dtype=torch.int32, device=weights.device)
    if keep <= 0:
        return INFINITE, INFINITE, torch.zeros((), dtype=torch.int32, device=weights.device)
    bits = weights.view(torch.int32)
    wanted = torch.tensor(keep / searched * len(bits), dtype=torch.float32)
    cut = LEAST_CUT
    for step in range(CUT_STEPS):
        higher = cut + (1 << (27 - step))
        if int((bits >= higher).sum()) >= wanted:
            cut = higher
    least = -1 if cut == LEAST_CUT else cut - CUT_MARGIN
    above = cut + (1 << (28 - CUT_STEPS)) + CUT_MARGIN
    over = (bits >= above).sum()
    inside = (bits >= least).sum() - over
    return least, above, draws_below_reference((wanted - over) / inside.clamp(min=1)).to(weights.device)


def passes_reference(weights_N: Tensor, head: int, cut: tuple[int, int, Tensor]) -> Tensor:
    """Whether a cut keeps the keys of a context, of weights [N] float32: [N] bool."""
    least, above, draws = cut
    drawn = draw_reference(torch.arange(len(weights_N), device=weights_N.device), head) < draws
    return weights_N.view(torch.int32) >= torch.where(drawn, least, above)
