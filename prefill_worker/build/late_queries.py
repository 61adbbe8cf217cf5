"""Which of the sampled queries calibrate thresholds, and which are stored so that methods can be tuned.

Shape legend: H KV heads, P sampled positions, R rows of the sample, G group heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import LayerIndex, LayerSource
from index_store.selection.calibration import CALIBRATION_QUERIES, ThresholdCalibrator

STORED_LAST, STORED_SPREAD = 64, 64
"""Stored are the last positions of the context, and others spread over the rest of the sample."""

_ROWS_AT_ONCE = 16
_RECENT = 64


def stored_rows(positions_P: Tensor, token_count: int) -> Tensor:
    """Rows of the sample to be stored, ascending: the context's last 64 positions and up to 64 spread over the others.

    The others are earlier positions and, where there are any, for one half the calibration prompts'.
    """
    last = (positions_P >= token_count - STORED_LAST) & (positions_P < token_count)
    earlier = (positions_P < token_count - STORED_LAST).nonzero().flatten()
    prompts = _spread((positions_P >= token_count).nonzero().flatten(), STORED_SPREAD // 2)
    return torch.cat([_spread(earlier, STORED_SPREAD - len(prompts)), last.nonzero().flatten(), prompts])


def late_rows(positions_P: Tensor, token_count: int) -> Tensor:
    """Rows of the sample that thresholds are calibrated on, ascending.

    The context's last 100 positions (as far as they were sampled), and up to 100 of the calibration prompts', which
    come later still.
    """
    late = (positions_P >= token_count - CALIBRATION_QUERIES) & (positions_P < token_count)
    prompts = (positions_P >= token_count).nonzero().flatten()
    return torch.cat([late.nonzero().flatten(), _spread(prompts, CALIBRATION_QUERIES)])


def calibrate(calibrator: ThresholdCalibrator, index: LayerIndex, source: LayerSource, sinks: int) -> None:
    """Adds one layer's late queries, each of which searches the keys between the sinks and its recent window.

    A request's window holds its own tokens, a late query's the end of the context: left out, both see the rest alike.
    With the window the thresholds come out so low that questions keep up to twice the wanted share.
    """
    _, token_count, _, head_dim = source.kv_HN2D.shape
    if token_count <= sinks:
        return
    queries, positions_P = source.queries.queries_HPGD, source.queries.positions_P
    rows_R = late_rows(positions_P, token_count)
    for part in _runs(positions_P[rows_R]):
        scaled = queries[:, rows_R[part]] * head_dim**-0.5
        position = int(positions_P[rows_R[part.start]])
        end = min(token_count, position - _RECENT)
        if end < sinks + token_count // 2:  # a short context is searched whole
            end = token_count
        calibrator.add(index.rank(scaled, sinks, end, None, {}, position=position))


def _spread(rows_R: Tensor, most: int) -> Tensor:
    """At most so many of the rows, evenly spread, the first and the last among them."""
    wanted = min(most, len(rows_R))
    return rows_R[torch.linspace(0, max(0, len(rows_R) - 1), wanted).round().long()]


def _runs(positions_R: Tensor) -> Iterator[slice]:
    """Slices of consecutive positions, of at most 16 each."""
    first = 0
    for row in range(1, len(positions_R) + 1):
        ends = row == len(positions_R) or int(positions_R[row]) != int(positions_R[row - 1]) + 1
        if ends or row - first == _ROWS_AT_ONCE:
            yield slice(first, row)
            first = row
