"""Which of the sampled queries calibrate thresholds, and which are stored so that methods can be tuned.

Shape legend: H KV heads, P sampled positions, R rows of the sample, G group heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from index_store.calibration import CALIBRATION_QUERIES, ThresholdCalibrator
from index_store.indexes.base import LayerIndex, LayerSource

STORED_LAST, STORED_SPREAD = 64, 64
"""Stored are the last positions of the context, and others spread over the rest of the sample."""

_ROWS_AT_ONCE = 16


def stored_rows(positions_P: Tensor, token_count: int) -> Tensor:
    """Rows of the sample to be stored, ascending: the context's last 64 positions and up to 64 spread over the others.

    The others are earlier positions and the calibration prompts', in proportion to how many were sampled.
    """
    last = (positions_P >= token_count - STORED_LAST) & (positions_P < token_count)
    others = (~last).nonzero().flatten()
    wanted = min(STORED_SPREAD, len(others))
    spread = others[torch.linspace(0, max(0, len(others) - 1), wanted).round().long()]
    return torch.cat([last.nonzero().flatten(), spread]).sort().values


def late_rows(positions_P: Tensor, token_count: int) -> Tensor:
    """Rows of the sample that thresholds are calibrated on, ascending.

    The context's last 100 positions (as far as they were sampled), and up to 100 of the calibration prompts', which
    come later still.
    """
    late = (positions_P >= token_count - CALIBRATION_QUERIES) & (positions_P < token_count)
    prompts = (positions_P >= token_count).nonzero().flatten()
    wanted = min(CALIBRATION_QUERIES, len(prompts))
    some = prompts[torch.linspace(0, max(0, len(prompts) - 1), wanted).round().long()]
    return torch.cat([late.nonzero().flatten(), some])


def calibrate(calibrator: ThresholdCalibrator, index: LayerIndex, source: LayerSource, sinks: int) -> None:
    """Adds one layer's late queries, each of which searches the whole context after the sinks, as requests do."""
    _, token_count, _, head_dim = source.kv_HN2D.shape
    if token_count <= sinks:
        return
    queries, positions_P = source.queries.queries_HPGD, source.queries.positions_P
    rows_R = late_rows(positions_P, token_count)
    for part in _runs(positions_P[rows_R]):
        scaled = queries[:, rows_R[part]] * head_dim**-0.5
        position = int(positions_P[rows_R[part.start]])
        calibrator.add(index.rank(scaled, sinks, token_count, None, {}, position=position))


def _runs(positions_R: Tensor) -> Iterator[slice]:
    """Slices of consecutive positions, of at most 16 each."""
    first = 0
    for row in range(1, len(positions_R) + 1):
        ends = row == len(positions_R) or int(positions_R[row]) != int(positions_R[row - 1]) + 1
        if ends or row - first == _ROWS_AT_ONCE:
            yield slice(first, row)
            first = row
