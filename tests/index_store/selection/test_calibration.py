"""Thresholds: how they are calibrated, and the curve that turns a wanted share into one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.selection.budgets import KEEP_GRID, Threshold, ThresholdCurve
from index_store.selection.calibration import ThresholdCalibrator
from index_store.selection.cutting import cut
from index_store.selection.ranking import Ranking
from tests.support.rankings import Problem, make_problem

SHARPNESSES = (0.5, 1.0, 2.0, 3.0, 4.0)


def layers(positions: int = 12) -> list[tuple[Problem, Ranking]]:
    problems = [
        make_problem(3000, heads=3, positions=positions, sharpness=sharpness, recent=0, seed=number)
        for number, sharpness in enumerate(SHARPNESSES)
    ]
    return [(problem, problem.clusters(12)) for problem in problems]


def calibrate(rankings: list[Ranking]) -> ThresholdCalibrator:
    calibrator = ThresholdCalibrator()
    for ranking in rankings:
        calibrator.add(ranking)
    return calibrator


def kept_share(problem: Problem, ranking: Ranking, budget: Threshold) -> float:
    """Of the searched keys, averaged over heads and queries, each query by itself."""
    shares = []
    for position in range(problem.queries.shape[1]):
        one = Ranking(ranking.logits_HTGM[:, position : position + 1], ranking.items)
        counts = cut(budget, one, problem.step(ThresholdCurve(calibrated))).counts_HT
        shares.append(float(counts.float().mean()) / (problem.end - problem.first))
    return sum(shares) / len(shares)


calibrated = calibrate([ranking for _, ranking in layers()]).thresholds


@pytest.mark.parametrize("keep", [0.002, 0.01, 0.03, 0.05, 0.1, 0.2, 0.5])
def test_the_wanted_share_is_kept(keep: float) -> None:
    shares = [kept_share(problem, ranking, Threshold(keep=keep)) for problem, ranking in layers()]
    assert sum(shares) / len(shares) == pytest.approx(keep, rel=0.1)
    if keep in (0.05, 0.1):  # far from equal shares: the threshold is global
        assert max(shares) > 1.5 * min(shares)


def test_single_keys_and_several_queries_count_alike() -> None:
    problem = make_problem(1000, positions=6, sharpness=2.0)
    ranking = problem.single_keys()
    whole = calibrate([ranking]).thresholds
    parts = [Ranking(part, ranking.items) for part in ranking.logits_HTGM.split(2, dim=1)]
    assert calibrate(parts).thresholds == pytest.approx(whole, rel=1e-9)
    weights = ranking.weights().flatten().sort(descending=True).values
    for fraction, threshold in zip(KEEP_GRID, whole, strict=True):
        assert float((weights > threshold).float().mean()) == pytest.approx(fraction, rel=0.1, abs=2e-4)


def test_nothing_calibrates_nothing() -> None:
    assert ThresholdCalibrator().thresholds == ()


def test_a_tree_that_prunes_is_kept_whole_beyond_what_it_holds() -> None:
    problem = make_problem(1000)
    full = problem.single_keys()
    logits = full.logits_HTGM.clone()
    logits[..., ::2] = -torch.inf
    logits[..., ::3] = -torch.inf
    thresholds = calibrate([Ranking(logits, full.items)]).thresholds
    retrieved = float((~torch.isneginf(logits)).float().mean())
    everything = [thresholds[place] for place, share in enumerate(KEEP_GRID) if share > retrieved]
    assert everything
    assert max(everything) < 1e-15
    assert (
        cut(
            Threshold(threshold=everything[0]), Ranking(logits, full.items), problem.step()
        ).counts_HT.tolist()
        == [[int((~torch.isneginf(logits[0, 0, 0])).sum())]] * 2
    )


CALIBRATED = tuple(1e-3 / fraction**2 for fraction in KEEP_GRID)


def test_the_curve_interpolates_logarithms() -> None:
    curve = ThresholdCurve(CALIBRATED)
    for keep in (0.001, 0.00123, 0.02, 0.31, 0.5):
        assert curve(keep) == pytest.approx(1e-3 / keep**2, rel=1e-9)
    for fraction, threshold in zip(KEEP_GRID, curve.thresholds, strict=True):
        assert curve(fraction) == pytest.approx(threshold, rel=1e-12)


def test_the_grid() -> None:
    assert len(KEEP_GRID) == 28
    assert (KEEP_GRID[0], KEEP_GRID[-1]) == (0.001, 0.5)
    ratios = [b / a for a, b in itertools.pairwise(KEEP_GRID)]
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-12)


@pytest.mark.parametrize("keep", [0.0, 0.0009, 0.51, 1.0, math.nan])
def test_outside_of_the_grid_is_refused(keep: float) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"expected 0.001 to 0.5: thresholds are calibrated for these"
    ):
        ThresholdCurve(CALIBRATED)(keep)


@pytest.mark.parametrize(
    "thresholds",
    [(), CALIBRATED[:-1], CALIBRATED[::-1], (*CALIBRATED[:-1], 0.0), (math.inf, *CALIBRATED[1:])],
)
def test_other_curves_are_refused(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected 28 positive numbers, none above the one before"):
        ThresholdCurve(thresholds)
