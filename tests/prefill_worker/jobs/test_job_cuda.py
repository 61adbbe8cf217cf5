"""On a CUDA device prefill computes what it computes on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from index_store.models.loading import load_model, resolve_model
from index_store.store.catalog import Store
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.kept_layers import attend_causally
from prefill_worker.reading.prefill import run_context
from prefill_worker.reading.query_sample import plan_sample
from tests.prefill_worker.conftest import MakeConfig, run
from tests.support.models import write_model_folder

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize(("past", "count"), [(0, 1), (1, 63), (500, 100), (2000, 1)])
def test_attention_equals_the_cpu(dtype: torch.dtype, tolerance: float, past: int, count: int) -> None:
    torch.manual_seed(past)
    queries, past_kv, chunk = (
        torch.randn(*shape).to(dtype).float()
        for shape in ((2, 3, count, 64), (2, past, 2, 64), (2, count, 2, 64))
    )
    expected = attend_causally(queries, [past_kv], chunk).out
    found = attend_causally(
        queries.cuda().to(dtype), [past_kv.cuda().to(dtype)], chunk.cuda().to(dtype), 300
    ).out
    torch.testing.assert_close(found.float().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("past", [8191, 8192, 30_000])
def test_long_pasts_in_blocks_equal_whole_ones(past: int) -> None:
    torch.manual_seed(past)
    queries = torch.randn(2, 4, 1100, 128, device="cuda", dtype=torch.bfloat16)
    past_kv = torch.randn(2, past, 2, 128, device="cuda", dtype=torch.bfloat16)
    chunk = torch.randn(2, 1100, 2, 128, device="cuda", dtype=torch.bfloat16)
    found = attend_causally(queries, [past_kv], chunk).out
    expected = attend_causally(queries.float(), [past_kv.float()], chunk.float()).out
    error = (found.float() - expected).norm() / expected.norm()
    assert float(error) < 5e-3
    few = attend_causally(queries[:, :, -100:], [past_kv, chunk[:, :-100]], chunk[:, -100:]).out
    torch.testing.assert_close(few.float(), found[:, :, -100:].float(), rtol=2e-2, atol=2e-3)


def test_capture_equals_the_cpu(tmp_path: Path) -> None:
    folder = resolve_model(str(write_model_folder(tmp_path / "model", "qwen3")))
    ids = torch.randint(3, 259, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    captures = []
    for device in ("cpu", "cuda"):
        loaded = load_model(folder, register_attention(), torch.float32, device)
        capture = Capture(loaded.identity, 300, torch.float32, plan_sample(300, [], 100, 0), device)
        run_context(loaded.model, capture, ids, 77)
        captures.append(capture)
    for layer in range(2):
        one, two = (capture.kv(layer).cpu() for capture in captures)
        torch.testing.assert_close(two, one, rtol=2e-2, atol=2e-2)
        queries = [capture.query_sample(layer).queries_HPGD.cpu() for capture in captures]
        torch.testing.assert_close(queries[1], queries[0], rtol=2e-2, atol=2e-2)


def test_a_whole_job(make_config: MakeConfig) -> None:
    config = make_config(device="cuda", dense_layers="auto")
    manifest = run(config).manifest
    assert manifest.prefill["device"] == "cuda"
    assert manifest.prefill["compute_dtype"] == "bfloat16"
    assert Store(config.store).verify(manifest.id) == []


@pytest.mark.parametrize("prompts", [False, True])
def test_a_job_stores_what_it_stores_on_the_cpu(
    make_config: MakeConfig, tmp_path: Path, prompts: bool
) -> None:
    """Keys, values and queries up to rounding, dense layers, thresholds; the indexes cover the same layers."""
    calibration = tmp_path / "prompts.txt"
    calibration.write_text("Where does the harbour lie?\n")
    manifests = []
    for device in ("cpu", "cuda"):
        config = make_config(
            device=device,
            store=tmp_path / device,
            dense_layers="auto",
            method=("csattention", "squeezed-tree", "csattention-paper"),
            calibration=calibration if prompts else None,
        )
        manifests.append(run(config).manifest)
    one, two = manifests
    assert one.id == two.id
    assert one.dense_layers == two.dense_layers
    assert one.query_positions == two.query_positions
    assert {index.name: index.layers for index in one.indexes} == {
        index.name: index.layers for index in two.indexes
    }
    for ours, theirs in zip(one.indexes, two.indexes, strict=True):
        assert len(ours.thresholds) == len(theirs.thresholds)
        assert [(array.path, array.shape) for array in ours.arrays] == [
            (array.path, array.shape) for array in theirs.arrays
        ]
    assert two.selection_errors == pytest.approx(one.selection_errors, abs=0.02)
    with Store(tmp_path / "cpu").open(one.id) as first, Store(tmp_path / "cuda").open(one.id) as second:
        for layer in (0, 1):
            for head in (0, 1):
                kept = [context.array("kv", layer, head).float() for context in (first, second)]
                assert float((kept[1] - kept[0]).norm() / kept[0].norm()) < 0.04  # of bfloat16, after a layer
