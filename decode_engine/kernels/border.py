"""How a budget cuts scored items: which of them are kept, whatever their scores are and however many these tie.

A score is an int32 number in the scores' order: a sum, or the bits of a float32 weight, since positive numbers are
ordered as their bits are. A *cut* is three numbers: items whose score reaches `above` are kept, and of those that only
reach `least` the ones that draw less than `draws`. So scores which are flat or tied keep as many items as others. An
item draws a number that follows from its place: multiples of the golden ratio, whose fractions cover every share evenly
on any stretch of places. KV heads draw others. Over query tables the four keys of a word draw together.

A cut is found by halving a range of scores, with a number of items at each half (`halve`). Clusters count for the keys
they hold, and a budget is never exceeded: then the draws are halved, too. Keys are counted in a sample, and a share of
those between `least` and `above` draws less than `draws`. Samples are runs of keys at even distances, which move
against one another from stretch to stretch of a context: of text that repeats itself they hold all parts.

Kernels in Gluon call these functions, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_KEY_STEP, _HEAD_STEP = -1640531527, 1332534557
"""2^32 over the golden ratio, and an odd number at random; as int32."""
_MOST_DRAWS = 1.0 - 2.0**-24
EVERY, NONE = -(2**30), 0x7F800000
"""Below and above all scores: sums are of less than 25 bits, and weights below infinity."""

_KEY_STEP_C, _HEAD_STEP_C, _MOST_C = map(tl.constexpr, (_KEY_STEP, _HEAD_STEP, _MOST_DRAWS))


@triton.jit
def draw(place: tl.tensor, head: tl.tensor) -> tl.tensor:
    """What int32 places draw, any int32."""
    return place * _KEY_STEP_C + head * _HEAD_STEP_C


@triton.jit
def passes(scores: tl.tensor, drawn: tl.tensor, cut: tl.tensor) -> tl.tensor:
    """Whether a cut keeps items of such int32 scores that draw such numbers."""
    least, above, draws = cut
    return scores >= tl.where(drawn < draws, least, above)


@triton.jit
def load_cut(cut_ptr: tl.tensor, PAST: tl.constexpr) -> tl.tensor:
    """A cut that a launch before left. PAST: ".cg" past the first-level cache, which may hold an earlier layer's."""
    least, above = tl.load(cut_ptr, cache_modifier=PAST), tl.load(cut_ptr + 1, cache_modifier=PAST)
    return least, above, tl.load(cut_ptr + 2, cache_modifier=PAST)


@triton.jit
def store_cut(cut_ptr: tl.tensor, cut: tl.tensor) -> None:
    """Leaves a cut."""
    tl.store(cut_ptr, cut[0])
    tl.store(cut_ptr + 1, cut[1])
    tl.store(cut_ptr + 2, cut[2])


@triton.jit
def halve(
    reached: tl.constexpr,
    held: tl.tensor,
    place: tl.tensor,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
    WAYS: tl.constexpr,
    K: tl.constexpr,
) -> tl.tensor:
    """The last of WAYS^TURNS places, from `place` on and WIDTH in all, that is reached: all are up to one.

    reached(held, place, width, K): how many of the next WAYS - 1 places, `width` apart, are.
    """
    width = WIDTH
    for _ in range(TURNS):
        width = width // WAYS
        place += reached(held, place, width, K) * width
    return place


@triton.jit
def sampled_run(turn: tl.tensor, TURNS: tl.constexpr, runs: tl.tensor) -> tl.tensor:
    """The run that is sampled in a turn, int32: of more runs than turns one in every part of them.

    Where in its part differs between 64 stretches, in an order in which neighbours lie far apart.
    """
    stretch = (turn * 64 // TURNS) * 27 % 64
    moved = (turn.to(tl.int64) * runs // TURNS).to(tl.int32) + (stretch * (runs // TURNS) >> 6)
    return tl.where(runs > TURNS, moved, turn)


@triton.jit
def draws_below(share: tl.tensor) -> tl.tensor:
    """The number below which a share (float32, 0 to 1) of all draws lies; int32."""
    return (tl.minimum(tl.maximum(share, 0.0), _MOST_C) * 4294967296.0 - 2147483648.0).to(tl.int32)


def sampled_run_reference(turn: Tensor, turns: int, runs: int) -> Tensor:
    """`sampled_run` of int64 turns."""
    stretch = (turn * 64 // turns) * 27 % 64
    return turn * runs // turns + (stretch * (runs // turns) >> 6) if runs > turns else turn


def draw_reference(place: Tensor, head: int) -> Tensor:
    """`draw` of int64 places, int32."""
    drawn = place.long() * _KEY_STEP + head * _HEAD_STEP
    return ((drawn + 2**31) % 2**32 - 2**31).to(torch.int32)


def draws_below_reference(share: Tensor) -> Tensor:
    """`draws_below` of float32 shares, int32."""
    return (share.clamp(0.0, _MOST_DRAWS) * 4294967296.0 - 2147483648.0).to(torch.int32)


def halve_reference(reached: Callable[[int], bool], place: int, width: int, turns: int) -> int:
    """As `halve`, for places one by one."""
    for _ in range(turns):
        width //= 2
        place += width * reached(place + width)
    return place


def sampled_cut_reference(
    scores: Tensor, keep: int, searched: int, place: int, width: int, turns: int, margin: int = 0
) -> tuple[int, int, Tensor]:
    """The cut that `keep` of `searched` items pass on average, by int32 scores of sampled ones.

    `least` and `above` are neighbours of 2^turns places from `place` on, `width` in all, and a margin apart.
    """
    wanted = torch.tensor(float(keep)) * len(scores) / searched
    found = halve_reference(lambda place: bool((scores >= place).sum() >= wanted), place, width, turns)
    least, above = EVERY if found == place else found - margin, found + (width >> turns) + margin
    over = (scores >= above).sum()
    inside = (scores >= least).sum() - over
    return least, above, draws_below_reference((wanted - over) / inside.clamp(min=1)).to(scores.device)


def passes_reference(scores: Tensor, drawn: Tensor, cut: Sequence[int | Tensor]) -> Tensor:
    """`passes`."""
    least, above, draws = cut
    return torch.where(drawn < draws, scores >= least, scores >= above)
