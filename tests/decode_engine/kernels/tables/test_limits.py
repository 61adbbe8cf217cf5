"""Cuts of the query-table kernels: what is counted, the cut read off it, and the scores where bins begin.

Shape legend: S sampling programs of a KV head, K keys that each of them samples.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from decode_engine.kernels.border import EVERY, store_cut
from decode_engine.kernels.tables import reference
from decode_engine.kernels.tables.search import (
    BINS,
    bin_or_none,
    bins_of_sums,
    cut_of,
    least_score,
    load_histograms,
    store_counts,
    sum_histograms,
)
from decode_engine.kernels.tables.sizes import SAMPLE_KEYS
from tests.decode_engine.kernels.problems.table_problems import DEVICE
from tests.support.devices import crossed

PROGRAMS = 4


@triton.jit
def counts_kernel(
    bins_ptr: tl.tensor,
    histograms_ptr: tl.tensor,
    span: tl.tensor,
    keep: tl.tensor,
    S: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """One sampling program's counts."""
    bins = tl.load(bins_ptr + tl.program_id(0) * K + tl.arange(0, K))
    store_counts((0, 0, span, keep, 0), histograms_ptr + tl.program_id(0) * BINS, bins, S * K)


@triton.jit
def limit_kernel(
    histograms_ptr: tl.tensor, limit_ptr: tl.tensor, span: tl.tensor, keep: tl.tensor, S: tl.constexpr
) -> None:
    """The limit of a head's histograms."""
    counts = sum_histograms(load_histograms(histograms_ptr, 0, S), S)
    store_cut(limit_ptr, cut_of((0, 0, span, keep, 0), counts, (0, 0)))


@triton.jit
def least_kernel(
    units_ptr: tl.tensor, scores_ptr: tl.tensor, least_ptr: tl.tensor, below_ptr: tl.tensor, N: tl.constexpr
) -> None:
    """Where every bin begins, and the bins of that sum and of the one before, for one reach."""
    row = tl.program_id(0)
    bins = bins_of_sums(units_ptr, row)
    bin = tl.arange(0, N)
    least = least_score(bin, bins)
    at = row * N + bin
    tl.store(scores_ptr + at, least)
    tl.store(least_ptr + at, bin_or_none(least, bin >= 0, bins))
    tl.store(below_ptr + at, bin_or_none(least - 1, bin >= 0, bins))


def sampled_bins(name: str) -> Tensor:
    """Bins [S, K] int32 of what the programs sample; -1 for keys that are not searched."""
    generator = torch.Generator().manual_seed(3)
    shape = (PROGRAMS, SAMPLE_KEYS)
    if name == "equal":
        return torch.full(shape, 300, dtype=torch.int32)
    if name == "uniform":
        return torch.randint(0, BINS.value, shape, dtype=torch.int32, generator=generator)
    centre, spread = {"normal": (256, 50), "low": (60, 30), "high": (470, 40), "edge": (384, 2)}.get(
        name, (256, 60)
    )
    bins = torch.randn(shape, generator=generator) * spread + centre
    if name == "apart":  # the programs sample stretches that are nothing like each other
        bins -= 120 * torch.arange(PROGRAMS)[:, None]
    bins = bins.clamp(0, BINS.value - 1).to(torch.int32)
    if name == "few":
        bins[torch.rand(shape, generator=generator) < 0.98] = -1
    return bins


def counted(bins_SK: Tensor, span: int, keep: int) -> Tensor:
    """Histograms [S, BINS] by the kernel."""
    histograms = torch.full((PROGRAMS, BINS.value), -7, dtype=torch.int16, device=DEVICE)
    counts_kernel[(PROGRAMS,)](bins_SK.to(DEVICE), histograms, span, keep, S=PROGRAMS, K=SAMPLE_KEYS)
    return histograms


@crossed(
    {
        "name": ["normal", "low", "high", "edge", "uniform", "equal", "apart", "few"],
        "share": [0.0, 0.001, 0.01, 0.05, 0.3, 0.9, 0.999],
    }
)
def test_limits_are_those_of_all_bins(share: float, name: str) -> None:
    bins, span = sampled_bins(name), 50_000
    keep = round(share * span)
    histograms = counted(bins, span, keep)
    there = bins[bins >= 0]
    expected = reference.threshold(there.long(), SimpleNamespace(keep=keep, first=0, end=span))  # type: ignore[arg-type]
    limit = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    limit_kernel[(1,)](histograms, limit, span, keep, S=PROGRAMS)
    border, above, draws = limit.tolist()
    assert border == expected[0]
    assert above == expected[1] or border == BINS.value - 1
    assert abs(draws - int(expected[2])) <= 2**9  # a share is rounded otherwise
    every = torch.stack([program[program >= 0].long().bincount(minlength=BINS.value) for program in bins])
    assert torch.equal(histograms.sum(1).cpu(), every.sum(1))
    assert torch.equal(histograms[:, border:].long().cpu(), every[:, border:])


def test_where_every_key_is_kept_nothing_has_to_be_drawn() -> None:
    limit = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    limit_kernel[(1,)](counted(sampled_bins("normal"), 5000, 5000), limit, 5000, 5000, S=PROGRAMS)
    assert limit[:2].tolist() == [EVERY, EVERY]


def test_bins_far_below_the_border_are_counted_together() -> None:
    """Otherwise the test above compares nothing but a histogram with itself."""
    bins = sampled_bins("normal")
    few, many = counted(bins, 50_000, 500), counted(bins, 50_000, 49_000)
    assert int((few != 0).sum()) < int((many != 0).sum())
    assert not few[:, 1:128].any()
    assert many[:, 100:256].any(1).all()


def test_bins_begin_where_their_least_sum_lies() -> None:
    """To the last bit, for reaches of all sizes: of tables without weight to the largest there are."""
    reaches = torch.cat(
        [torch.tensor([0.0, 127.0, 127.0 * 255, 127.0 * 255 * 32]), torch.rand(60) * 1e6 + 1.0]
    ).floor()
    units = torch.stack([torch.full_like(reaches, torch.nan), reaches], 1).to(DEVICE)
    shape = (len(reaches), BINS.value)
    scores, least, below = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for _ in range(3))
    least_kernel[(len(reaches),)](units, scores, least, below, N=BINS.value)
    inner = slice(1, None)  # all sums are in the first bin or above
    bins = torch.arange(BINS.value, device=DEVICE)[inner]
    assert bool((least[:, inner] == bins).all())
    assert bool((below[:, inner] == bins - 1).all())
    assert bool((scores[:, 0] == EVERY).all())
    for reach, of_reach in zip(reaches.tolist(), scores.cpu(), strict=True):
        ends = [int((of_reach <= end).sum()) for end in (-reach, reach)]
        assert 1 <= ends[0] <= ends[1] <= BINS.value
        assert ends[1] - ends[0] >= min(2 * reach, BINS.value // 2 - 1)
