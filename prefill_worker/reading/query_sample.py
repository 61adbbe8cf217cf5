"""Which queries of a context are kept, and which of them judge a layer, calibrate thresholds, and are stored.

Shape legend: P sampled positions, R rows of the sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from index_store.selection.calibration import CALIBRATION_QUERIES

ALWAYS_SAMPLED = CALIBRATION_QUERIES
"""The last tokens of a context are always in the sample: they resemble what a session asks next."""

JUDGED_QUERIES = 48
"""Queries a layer is judged by, spread over the later half of the sample."""

STORED_LAST, STORED_SPREAD = 64, 64
"""Stored are the last positions of the context, and others spread over the rest of the sample."""


@dataclass(frozen=True, slots=True)
class SampledPositions:
    """Which queries are kept, drawn once before the model runs.

    context_P: int64, ascending positions in the context. prompts: for every calibration prompt the int64 ascending
        offsets of its kept tokens.
    """

    context_P: Tensor
    prompts: tuple[Tensor, ...] = ()

    @property
    def rows(self) -> int:
        """How many queries are kept of every query head."""
        return len(self.context_P) + sum(map(len, self.prompts))


def plan_sample(token_count: int, prompt_lengths: Sequence[int], rows: int, seed: int) -> SampledPositions:
    """Draws at most `rows` tokens of the context (the last 100 always) and at most `rows` of all prompts together."""
    generator = torch.Generator().manual_seed(seed)
    last = min(ALWAYS_SAMPLED, token_count)
    drawn = torch.randperm(token_count - last, generator=generator)[: max(0, rows - last)]
    context = torch.cat([drawn, torch.arange(token_count - last, token_count)]).sort().values
    kept = torch.randperm(sum(prompt_lengths), generator=generator)[:rows].sort().values
    prompts, offset = [], 0
    for length in prompt_lengths:
        prompts.append(kept[(kept >= offset) & (kept < offset + length)] - offset)
        offset += length
    return SampledPositions(context, tuple(prompts))


def judged_rows(positions_P: Tensor) -> Tensor:
    """Rows of the sample that a layer is judged by: evenly spread over its later half, the last one included."""
    count = len(positions_P)
    first = count // 2 if count > JUDGED_QUERIES else 0
    wanted = min(JUDGED_QUERIES, count - first)
    return torch.linspace(first, count - 1, wanted).round().long()


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


def _spread(rows_R: Tensor, most: int) -> Tensor:
    """At most so many of the rows, evenly spread, the first and the last among them."""
    wanted = min(most, len(rows_R))
    return rows_R[torch.linspace(0, max(0, len(rows_R) - 1), wanted).round().long()]
