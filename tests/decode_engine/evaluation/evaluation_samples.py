"""Scores as evaluation makes them, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from decode_engine.evaluation.probe import LayerSample
from decode_engine.evaluation.results import Results
from decode_engine.evaluation.scoring import (
    SegmentScore,
    Touched,
)
from decode_engine.evaluation.settings import Variant
from decode_engine.evaluation.summary import MassMap, Score, StoredBytes, Tally
from index_store.methods.presets import get_method

FULL, SPARSE = get_method("full"), get_method("csattention", 0.02)


def layer_sample(layer: int, mass: float, recall: float = 0.5) -> LayerSample:
    ones_T = torch.ones(3)
    return LayerSample(
        layer,
        torch.tensor([[recall, torch.nan, recall]]),
        torch.full((1, 3, 2), mass),
        0.1 * ones_T,
        7 * ones_T,
        20 * ones_T,
        100 * ones_T,
        80 * ones_T,
        1000 * ones_T,
        50 * ones_T,
    )


def segment_score(
    exact: bool | None, kl_T: list[float], answers: int, task: str = "single", mass: float | None = None
) -> SegmentScore:
    answer_T = torch.arange(len(kl_T)) >= len(kl_T) - answers
    hit_T = torch.full((len(kl_T),), bool(exact))
    samples = () if mass is None else (layer_sample(1, mass), layer_sample(3, mass / 2))
    return SegmentScore(exact, torch.tensor(kl_T), answer_T, Touched(10, 100, 60, 150), hit_T, task, samples)


def make_tally(exact: Sequence[bool], mass: float | None = None, task: str = "single") -> Tally:
    """Questions take turns between two contexts; the text is of the second."""
    tally = Tally()
    for number, hit in enumerate(exact):
        observed = mass if number == 0 else None
        tally.add(segment_score(hit, [0.1, 0.2, 0.6], 1, task, observed), number % 2)
    tally.add(segment_score(None, [0.5, 0.7], 0, task, None if mass is None else mass + 0.1), 1)
    tally.seconds = [0.002, 0.004, 0.003]
    return tally


ALL, SOME = Variant("full", FULL), Variant("csattention", SPARSE, keep=0.02)


SETTING: dict[str, Any] = {
    "settings": {
        "model": "reader",
        "out": "a",
        "context_lengths": [8192, 32768],
        "tasks": ["single", "keys"],
        "questions": 2,
        "seed": 0,
        "text": [],
        "methods": ["csattention"],
        "keep": [0.02, 0.05],
        "mass": [],
        "index_for": [],
        "prompts": "each",
    },
    "text_sha256": "0123456789abcdef",
    "machine": {"cores": 2},
    "model": {"name": "reader", "fingerprint": "f00"},
    "complete": True,
}


def some_scores(methods: Sequence[str] = ("csattention",)) -> list[Score]:
    full = make_tally([True, True])
    base = full.summarise(8192, ALL, full, StoredBytes(0.0, 0.0, 256.0))
    rows = [base]
    for method in methods:
        sparse = make_tally([True, False], mass=0.8).summarise(
            8192, Variant(method, SPARSE, keep=0.02), full, StoredBytes(512.0, 0.0, 768.0)
        )
        rows += [sparse, replace(sparse, keep=0.05, budget="5.00%", kl=0.01)]
    rows += [replace(row, task=task) for task in ("single", "keys") for row in rows]
    return [*rows, *(replace(row, context_length=32768) for row in rows)]


def some_results(methods: Sequence[str] = ("csattention",), **settings: object) -> Results:
    maps = [
        MassMap(length, method, f"{keep:.2%}", keep, None, (0, 2), ((0.5, 0.6), (1.0, 0.1)))
        for length in (8192, 32768)
        for method in methods
        for keep in (0.02, 0.05)
    ]
    changed = {**SETTING["settings"], "methods": list(methods), **settings}
    return Results({**SETTING, "settings": changed}, some_scores(methods), maps)
