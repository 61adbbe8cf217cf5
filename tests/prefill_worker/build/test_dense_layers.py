"""Flat attention is told from peaked attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.jobs.job_record import DENSE_ERROR
from index_store.store.stored_context import QuerySample
from prefill_worker.build.dense_layers import (
    choose_dense_layers,
    measure_selectivity,
)

HEADS, GROUP, KEYS, DIM, ROWS = 2, 3, 3000, 32, 100


def layer(sharpness: float, seed: int = 0) -> tuple[Tensor, QuerySample]:
    """Random keys and values; queries point at single keys, the more sharply the larger `sharpness` is."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(HEADS, KEYS, 2, DIM, generator=generator)
    positions = torch.arange(KEYS - ROWS, KEYS)
    targets = torch.randint(0, KEYS - ROWS, (HEADS, ROWS, GROUP), generator=generator)
    queries = torch.stack([kv[head, targets[head], 0] for head in range(HEADS)]) * sharpness
    return kv, QuerySample(queries, positions)


def test_peaked_attention_is_captured() -> None:
    measured = measure_selectivity(*layer(4.0))
    assert measured.captured > 0.99
    assert measured.output_error < 0.01


def test_flat_attention_is_not() -> None:
    measured = measure_selectivity(*layer(0.05))
    assert measured.captured < 0.15
    assert measured.output_error > 0.5


def test_keeping_everything_is_exact() -> None:
    measured = measure_selectivity(*layer(0.05), keep=1.0)
    assert measured.captured == pytest.approx(1.0, abs=1e-5)
    assert measured.output_error < 1e-5


def test_the_group_shares_its_selection() -> None:
    """Three heads of a group that look at three different keys need three keys, not one each."""
    kv, sample = layer(8.0)
    one_key = measure_selectivity(kv, sample, keep=1 / KEYS, sinks=0, recent=1)
    three_keys = measure_selectivity(kv, sample, keep=3 / KEYS, sinks=0, recent=1)
    assert one_key.captured == pytest.approx(1 / 3, abs=0.05)
    assert three_keys.captured > 0.95


def test_keys_after_the_query_do_not_count() -> None:
    kv, sample = layer(1.0)
    early = QuerySample(sample.queries_HPGD, sample.positions_P - 1000)
    before = measure_selectivity(kv, early)
    kv[:, KEYS - 1000 :] = 50.0
    assert measure_selectivity(kv, early) == before


def test_sinks_and_recent_window_are_always_kept() -> None:
    kv, sample = layer(0.01)
    measured = measure_selectivity(kv, sample, keep=1 / KEYS, sinks=1000, recent=2000)
    assert measured.captured > 0.98


def test_calibration_queries_beyond_the_context_are_judged_too() -> None:
    kv, sample = layer(4.0)
    beyond = QuerySample(sample.queries_HPGD, sample.positions_P + 500)
    assert measure_selectivity(kv, beyond).captured > 0.99


def test_the_rule_picks_flat_layers() -> None:
    measured = [measure_selectivity(*layer(sharpness)) for sharpness in (0.05, 4.0, 0.3, 8.0)]
    assert choose_dense_layers(measured) == (0, 2)
    assert choose_dense_layers(measured, threshold=10.0) == ()
    assert measured[1].output_error < DENSE_ERROR < measured[2].output_error
