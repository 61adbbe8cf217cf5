"""Thresholds that late queries calibrate keep the wanted share of the keys."""

from __future__ import annotations

import pytest
import torch

from index_store.indexes.interface.layer_index import LayerSource, QuerySample
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import Threshold, ThresholdCurve
from index_store.selection.calibration import ThresholdCalibrator
from index_store.selection.cutting import cut
from index_store.selection.ranking import Step
from prefill_worker.build.layer_arrays import calibrate
from prefill_worker.reading.query_sample import (
    late_rows,
    plan_sample,
)


def make_source(tokens: int, window: bool) -> LayerSource:
    generator = torch.Generator().manual_seed(tokens)
    kv = torch.randn(2, tokens, 2, 16, generator=generator)
    plan = plan_sample(tokens, (50,), 128, seed=0)
    sampled = torch.cat([plan.context_P, plan.prompts[0] + tokens]).sort().values
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
        shares.append(cut(Threshold(keep=0.1), ranking, step).counts_HT.float().mean() / 1492)
    assert float(torch.stack(shares).mean()) == pytest.approx(0.1, rel=0.1)


def test_a_context_of_sinks_only_calibrates_nothing() -> None:
    source = make_source(6, window=False)
    index = KeyClusters.build(INDEX_SPECS["key_clusters"].parameters, source, 0)
    calibrator = ThresholdCalibrator()
    calibrate(calibrator, index, source, 8)
    assert calibrator.thresholds == ()
