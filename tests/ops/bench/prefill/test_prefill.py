"""Benchmarks of prefill and first tokens: whole paths over a tiny model; nothing is timed when a check fails."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from harness.report import CheckFailedError

from decode_engine.settings.command_options import Prompts
from index_store.indexes.key_clusters import build_triton
from index_store.methods.presets import get_method
from tests.ops.bench.conftest import Run, load_bench
from tests.support.tiny_model import IDENTITY, make_model


@pytest.mark.gpu
def test_loose_clusters_are_not_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_triton.build_device_clusters

    def spoiled(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        arrays = build(*arguments, **options)
        return {**arrays, "means": arrays["means"] * 0.0}

    monkeypatch.setattr(build_triton, "build_device_clusters", spoiled)
    rows, code, errors = run(load_bench("prefill/prefill_gpu"))
    assert (rows, code) == ([], 1)
    assert "as wide as the host's" in errors


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Everything in host memory."""
    found = load_bench("prefill/first_token")
    monkeypatch.setattr(found, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(found, "TURNS", 1)
    monkeypatch.setattr(found, "prompt_of", lambda count: [token % 300 for token in range(count)])
    return found


def test_every_figure_is_there(bench: ModuleType) -> None:
    rows = list(bench.figures(make_model(), IDENTITY, 300, [get_method("quest", 0.05)], [5, 9], 0.01, 3))
    kinds = [row["figure"] for row in rows]
    assert {kind: kinds.count(kind) for kind in kinds} == {"check": 2, "together": 6, "warm": 8}
    for check in (row for row in rows if row["figure"] == "check"):
        assert max(check["exact"], check["sparse_quest"], check["together"]) < 0.1
    warm = [row for row in rows if row["figure"] == "warm"]
    assert {(row["placement"], row["prompts"], row["prompt_tokens"]) for row in warm} == {
        (placement, prompts, length)
        for placement in ("device", "hybrid")
        for prompts in ("exact", "sparse")
        for length in (5, 9)
    }
    assert all(value > 0 for row in rows for name, value in row.items() if name.endswith("_s"))
    # Exact prompts that come at once are read in one pass, in either placement.
    assert [row["passes"] for row in rows if row["figure"] == "together" and row["method"] == "full"] == [
        [15]
    ] * 2


def test_wrong_logits_are_not_timed(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    original = bench.Requests.read

    def spoiled(self: Any, session: Any, ids: Any, prompts: Prompts) -> torch.Tensor:
        logits: torch.Tensor = original(self, session, ids, prompts)
        return logits.flip(0) if prompts is Prompts.SPARSE else logits

    monkeypatch.setattr(bench.Requests, "read", spoiled)
    with pytest.raises(CheckFailedError, match="sparse_quest, device"):
        next(bench.figures(make_model(), IDENTITY, 300, [get_method("quest", 0.05)], [5], 0.01))


def test_prompts_that_are_read_wrongly_together_are_not_timed(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = bench.read_prompts

    def spoiled(model: Any, sessions: Any, ids: Any, prompts: Prompts) -> list[torch.Tensor]:
        found: list[torch.Tensor] = original(model, sessions, ids, prompts)
        return found[::-1]

    monkeypatch.setattr(bench, "read_prompts", spoiled)
    with pytest.raises(CheckFailedError, match="prompts together, device"):
        next(bench.figures(make_model(), IDENTITY, 300, [], [5], 0.01, 3))
