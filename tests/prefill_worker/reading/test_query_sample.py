"""Which sampled queries judge a layer, calibrate thresholds, and are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prefill_worker.reading.query_sample import (
    JUDGED_QUERIES,
    judged_rows,
    late_rows,
    plan_sample,
    stored_rows,
)


def positions(tokens: int, prompts: tuple[int, ...], rows: int) -> Tensor:
    """Of a sample, as a capture orders them."""
    plan = plan_sample(tokens, prompts, rows, seed=0)
    return torch.cat([plan.context_P, *(kept + tokens for kept in plan.prompts)]).sort().values


@pytest.mark.parametrize(
    ("tokens", "prompts", "rows"),
    [(1, (), 64), (60, (), 64), (130, (), 64), (5000, (), 4096), (5000, (40, 300), 256)],
)
def test_stored_are_the_last_positions_and_others_spread_over_the_rest(
    tokens: int, prompts: tuple[int, ...], rows: int
) -> None:
    sampled = positions(tokens, prompts, rows)
    found = sampled[stored_rows(sampled, tokens)].tolist()
    assert found == sorted(found)
    assert found[0] == int(sampled[0])
    last = range(max(0, tokens - 64), tokens)
    assert set(last) <= set(found)
    assert len(found) == min(len(sampled), len(last) + 64)
    assert int(sampled[-1]) == found[-1]
    if not prompts:
        assert len(set(found)) == len(found)
    else:
        assert sum(position >= tokens for position in found) == 32
        assert sum(position < tokens - 64 for position in found) == 32


def test_late_are_the_last_hundred_of_the_context_and_of_the_prompts() -> None:
    sampled = positions(5000, (40, 300), 256)
    found = sampled[late_rows(sampled, 5000)]
    assert found[found < 5000].tolist() == list(range(4900, 5000))
    assert int((found >= 5000).sum()) == 100
    short = positions(30, (3,), 64)
    assert sorted(short[late_rows(short, 30)].tolist()) == list(range(33))


@pytest.mark.parametrize(("count", "judged"), [(1, 1), (5, 5), (48, 48), (60, 30), (96, 48), (1000, 48)])
def test_judged_rows_are_late_and_distinct(count: int, judged: int) -> None:
    rows = judged_rows(torch.arange(count)).tolist()
    assert len(rows) == len(set(rows)) == judged
    assert rows[-1] == count - 1
    if count > JUDGED_QUERIES:
        assert rows[0] >= count // 2
