"""The comparison of trainings, with a tiny model on a CPU."""

from __future__ import annotations

import lzma
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from prefill_worker.muse import MuseSettings
from tests.ops.scripts import load_script

SCRIPT = Path(__file__).resolve().parents[3] / "ops" / "bench" / "muse_training.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(SCRIPT)


def test_both_ways_train_alike(script: ModuleType) -> None:
    shape = script.Shape(32, 3, 2, 8, window=16, context=64, batch=2, peak=0.02, warm_up=2)
    tokens = torch.arange(64 * 6 + 1) * 7 % 31
    settings = MuseSettings(clusters=16, block=16, cap=4.0)
    lines: list[dict[str, Any]] = []
    summary = script.compare(tokens, tokens, shape, 6, settings, torch.device("cpu"), lines.append, 2)
    assert [line["attention"] for line in lines] == ["exact", "muse"]
    assert summary["tokens"] == 6 * 2 * 64
    assert summary["exact_loss_under_exact"] < 3.45  # log 32 is 3.47
    assert abs(summary["loss_change"]) < 0.02
    assert summary["muse_loss_under_exact"] == pytest.approx(summary["muse_loss_under_muse"], rel=0.02)


def test_the_window_ends_where_it_should(script: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 20, 8, generator=generator)
    found = script.attend_window(query, key, value, 4)
    last = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, 19:], key[:, :, 16:], value[:, :, 16:]
    )
    torch.testing.assert_close(found[:, :, 19:], last)


def test_tokens_are_read_and_cut(script: ModuleType, tmp_path: Path) -> None:
    ids = torch.arange(40)
    file = tmp_path / "train.u16.xz"
    file.write_bytes(lzma.compress(ids.to(torch.uint16).numpy().tobytes()))
    assert torch.equal(script.read_tokens(file), ids)
    rows = script.sequences(ids, 13)
    assert rows.shape == (3, 14)
    assert rows[1, 0] == rows[0, -1] == 13
    drawn = list(script.batches(rows, 2, 3, seed=0))
    assert [tuple(batch.shape) for batch in drawn] == [(2, 14)] * 3
    assert sorted(torch.cat(drawn)[:, 0].tolist()) == [0, 0, 13, 13, 26, 26]
