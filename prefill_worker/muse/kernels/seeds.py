"""First centroids, drawn with a probability in proportion to the squared norm (MuSe section 5).

Shape legend: B batch, H heads, R ranges, N points, Y = B*H*R problems, C clusters, D dims.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefill_worker.muse.kernels.clusters import draw_waits, take_best
from prefill_worker.muse.kernels.layout import problem_offset, rows_at_a_time, strides


def draw_seeds(points_BHRND: Tensor, clusters: int, seed: int) -> Tensor:
    """`draw_seeds_reference`."""
    heads, ranges, count, dim = points_BHRND.shape[1:]
    waits = draw_waits(points_BHRND, seed)
    scores = torch.empty_like(waits)
    problems = scores[..., 0].numel()
    tile = rows_at_a_time(count, 128)
    rate_kernel[(problems * triton.cdiv(count, tile),)](
        points_BHRND,
        waits,
        scores,
        heads,
        ranges,
        *strides(points_BHRND),
        count,
        DIM=dim,
        TILE=tile,
        num_warps=4,
    )
    return take_best(points_BHRND, scores, clusters)


@triton.jit(do_not_specialize=["heads", "ranges", "count"])
def rate_kernel(
    points_ptr: tl.tensor,
    waits_ptr: tl.tensor,
    scores_ptr: tl.tensor,
    heads: tl.tensor,
    ranges: tl.tensor,
    of_batch: tl.tensor,
    of_head: tl.tensor,
    of_range: tl.tensor,
    of_point: tl.tensor,
    count: tl.tensor,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program per (TILE points, problem): squared norms divided by waiting times."""
    tiles = tl.cdiv(count, TILE)
    problem = tl.program_id(0) // tiles
    points_ptr += problem_offset(problem, heads, ranges, of_batch, of_head, of_range)
    at = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = at < count
    dims = tl.arange(0, DIM)
    points = tl.load(
        points_ptr + at.to(tl.int64)[:, None] * of_point + dims[None, :], mask=inside[:, None], other=0.0
    ).to(tl.float32)
    place = problem.to(tl.int64) * count + at
    waits = tl.load(waits_ptr + place, mask=inside, other=1.0)
    tl.store(scores_ptr + place, tl.sum(points * points, 1) / waits, mask=inside)
