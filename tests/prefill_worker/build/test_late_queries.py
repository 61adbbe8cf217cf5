"""Which sampled queries are stored, and on which thresholds are calibrated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.indexes.interface.layer_index import LayerSource, QuerySample
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.methods.index_specs import INDEX_SPECS
from index_store.selection.budgets import Step, Threshold
from index_store.selection.calibration import ThresholdCalibrator, ThresholdCurve
from prefill_worker.build.late_queries import calibrate, late_rows, stored_rows
from prefill_worker.reading.capture import plan_sample


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


def make_source(tokens: int, window: bool) -> LayerSource:
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, tokens, 2, 16, generator=generator)
    sampled = positions(tokens, (50,), 128)
    queries = 3.0 * torch.randn(2, len(sampled), 2, 16, generator=generator)
    frequencies = 0.3 ** torch.arange(8.0) if window else None
    return LayerSource(kv, QuerySample(queries, sampled), frequencies)


@pytest.mark.parametrize("window", [0, 300])
def test_the_wanted_share_is_kept_by_the_late_queries(window: int) -> None:
    """Also where the index needs every query's own position."""
    source = make_source(1500, window > 0)
    spec = INDEX_SPECS["key_clusters"].with_parameters(window=window)
    index = KeyClusters.build(spec.parameters, source, 0)
    calibrator = ThresholdCalibrator()
    calibrate(calibrator, index, source, 8)
    curve = ThresholdCurve(calibrator.thresholds)
    sample = source.queries
    shares = []
    for row in late_rows(sample.positions_P, 1500).tolist():
        position = int(sample.positions_P[row])
        queries = sample.queries_HPGD[:, row : row + 1] / 4.0
        ranking = index.rank(queries, 8, 1500, None, {}, position=position)
        step = Step(1500, curve, lambda ids: ids.float(), torch.zeros(2, 1, 2))
        shares.append(Threshold(keep=0.1).cut(ranking, step).counts_HT.float().mean() / 1492)
    assert float(torch.stack(shares).mean()) == pytest.approx(0.1, rel=0.1)


def test_a_context_of_sinks_only_calibrates_nothing() -> None:
    source = make_source(6, window=False)
    index = KeyClusters.build(INDEX_SPECS["key_clusters"].parameters, source, 0)
    calibrator = ThresholdCalibrator()
    calibrate(calibrator, index, source, 8)
    assert calibrator.thresholds == ()
