"""Calibrated thresholds between those that were calibrated."""

from __future__ import annotations

import itertools
import math

import pytest

from index_store.errors import InvalidArgumentError
from index_store.selection.threshold_curve import KEEP_GRID, ThresholdCurve

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
