"""Contexts whose keys and values stay in host memory while a model reads them: the same result."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MemoryBudgetError
from index_store.models.loading import load_model, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from prefill_worker.build import kv_placement
from prefill_worker.build.kv_placement import JobSizes, place_kv
from prefill_worker.config import PrefillConfig
from prefill_worker.jobs.job import PrefillReport
from prefill_worker.muse.ranges import planned_bytes
from prefill_worker.muse.settings import MuseSettings
from prefill_worker.reading import kept_layers
from prefill_worker.reading.capture import Capture, register_attention
from prefill_worker.reading.prefill import run_context, run_prompts
from prefill_worker.reading.query_sample import plan_sample
from tests.prefill_worker.conftest import MakeConfig, run
from tests.support.models import write_model_folder

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS = 157
LLAMA = ModelIdentity("8b", "llama", "0", "0", 32, 32, 8, 128, 128_256, 2**20)
INDEX_BYTES = 131_072 * 8 * 570  # of query tables and clusters
LLAMA_TOKENS = 131_072
SIZES = JobSizes(LLAMA, LLAMA_TOKENS, 2048, 2048, 14_336, INDEX_BYTES, torch.bfloat16, torch.bfloat16)
GB = 10**9


def ids_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("beyond") / "model", "qwen3")


def captured(folder: Path, device: str, block: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values, and sampled queries, of every layer of a context and prompts after it."""
    loaded = load_model(resolve_model(str(folder)), register_attention(), torch.float32, device)
    prompts = [ids_of(23, seed=2), ids_of(11, seed=3)]
    plan = plan_sample(TOKENS, [len(prompt) for prompt in prompts], 1000, 0)
    capture = Capture(loaded.identity, TOKENS, torch.float16, plan, device, block_tokens=block)
    run_context(loaded.model, capture, ids_of(TOKENS), 33)
    run_prompts(loaded.model, capture, prompts, 8)
    layers = range(loaded.identity.layers)
    if block is not None:
        assert {capture.kv(layer).device.type for layer in layers} == {"cpu"}
    kept = [capture.kv_on_device(layer).clone() for layer in layers]
    assert {kv.device.type for kv in kept} == {device}
    queries = [capture.query_sample(layer).queries_HPGD for layer in layers]
    capture.close()
    with pytest.raises(ValueError, match="released"):
        capture.kv(0)
    return kept, queries


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block", [16, 64, 512])
def test_blocks_of_host_memory_give_the_same_bits_as_the_same_blocks_on_the_device(
    folder: Path, device: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = captured(folder, device, block)
    original = kept_layers.divide_past
    monkeypatch.setattr(
        kept_layers, "divide_past", lambda count, largest, smallest: original(count, block, block)
    )
    expected = captured(folder, device, None)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_a_capture_made_in_inference_mode_is_written_to_by_other_threads(device: str) -> None:
    with torch.inference_mode():
        capture = Capture(
            replace(LLAMA, layers=2), TOKENS, torch.float16, plan_sample(TOKENS, [], 9, 0), device, 16
        )
        with ThreadPoolExecutor(1) as threads:
            threads.submit(capture.kv(1).zero_).result()
        capture.begin_context_chunk(0, 5)
        heads = (torch.ones(count, 5, 128, device=device) for count in (32, 8, 8))
        capture.attend(1, *heads)
        capture.settle()
        assert bool((capture.kv_on_device(1)[:, :5] == 1).all())
    capture.close()


def test_other_blocks_differ_by_rounding_alone(folder: Path) -> None:
    found, expected = captured(folder, "cpu", 16), captured(folder, "cpu", None)
    for ours, theirs in zip(found, expected, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.float(), two.float(), rtol=2e-3, atol=2e-3)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_placement, "SMALLEST_BLOCK", 32)


def least_memory(config: PrefillConfig) -> int:
    with pytest.raises(MemoryBudgetError, match="takes at least") as refused:
        run(replace(config, device_memory=1))
    return int(refused.value.metadata["needed"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("small_blocks")
def test_a_job_under_a_limit_stores_what_it_stores_without(
    make_config: MakeConfig, tmp_path: Path, device: str
) -> None:
    calibration = tmp_path / "prompts.txt"
    calibration.write_text("Where does the harbour lie?\n")
    config = make_config(
        device=device, dense_layers="auto", calibration=calibration, query_sample=64, chunk=32
    )
    least = least_memory(config)
    whole = run(replace(config, store=tmp_path / "whole"))
    limited = run(replace(config, device_memory=least))
    assert (memory_of(whole), memory_of(limited)) == (("device", None), ("host", least)) or device == "cuda"
    assert limited.memory.keys_and_values == "host"
    one, two = whole.manifest, limited.manifest
    assert one.id == two.id
    assert one.dense_layers == two.dense_layers
    assert [index.name for index in one.indexes] == [index.name for index in two.indexes]
    assert Store(config.store).verify(two.id) == []
    with Store(tmp_path / "whole").open(one.id) as first, Store(config.store).open(two.id) as second:
        for layer in range(one.model.layers):
            for head in range(one.model.kv_heads):
                kept = [context.array("kv", layer, head).float() for context in (first, second)]
                assert float((kept[1] - kept[0]).norm() / kept[0].norm()) < 0.01


def memory_of(report: PrefillReport) -> tuple[str, int | None]:
    return report.memory.keys_and_values, report.memory.device_limit


@pytest.fixture
def host_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that holds what is planned, however much of this machine's is free."""
    monkeypatch.setattr(kv_placement, "free_memory", lambda device: 20 * GB)


@pytest.mark.usefixtures("host_room")
def test_what_fits_stays_on_the_device_and_blocks_are_as_large_as_fit() -> None:
    needed = place_kv(SIZES, None).needed
    assert place_kv(SIZES, needed).block_tokens is None
    blocks = [place_kv(SIZES, limit).block_tokens for limit in (needed - 1, 6 * GB, 5 * GB)]
    assert blocks[0] == 65_536
    assert blocks == sorted(blocks, reverse=True)  # type: ignore[type-var]
    for block, limit in zip(blocks, (needed - 1, 6 * GB, 5 * GB), strict=True):
        assert block is not None
        assert SIZES.fixed_bytes + SIZES.layer_bytes + SIZES.block_bytes(block, 2) <= limit


def test_what_fits_nowhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryBudgetError, match="--device-memory is 1000000000 bytes") as refused:
        place_kv(SIZES, GB)
    least = int(refused.value.metadata["needed"])
    monkeypatch.setattr(kv_placement, "free_memory", lambda device: 10 * GB)
    with pytest.raises(MemoryBudgetError, match="of host memory 10000000000 are free"):
        place_kv(SIZES, least)
    monkeypatch.setattr(kv_placement, "free_memory", lambda device: 20 * GB)
    assert place_kv(SIZES, least).block_tokens == 1024


@pytest.mark.usefixtures("host_room")
def test_clusters_of_approximate_attention_count() -> None:
    """Of 131,072 tokens 4 ranges are kept a layer: 2.1 GB of covariances with the 8 KV heads of 128 dimensions."""
    held = planned_bytes(MuseSettings(), LLAMA, LLAMA_TOKENS, torch.bfloat16)
    covariances = 32 * 4 * 8 * 64 * 128 * 128 * 2
    assert covariances < held < 1.4 * covariances
    assert planned_bytes(MuseSettings(dipole=False), LLAMA, LLAMA_TOKENS, torch.bfloat16) < held / 3
    assert planned_bytes(MuseSettings(), LLAMA, 8192, torch.bfloat16) == 0
    sizes = replace(SIZES, approximation_bytes=held, pass_flag="--muse-block")
    exact = place_kv(SIZES, None).needed
    assert place_kv(sizes, exact).block_tokens is not None
    assert place_kv(sizes, exact + held).block_tokens is None
    with pytest.raises(MemoryBudgetError, match="lower --muse-block") as refused:
        place_kv(sizes, 1)
    with pytest.raises(MemoryBudgetError) as refused_exact:
        place_kv(SIZES, 1)
    more = int(refused.value.metadata["needed"]) - int(refused_exact.value.metadata["needed"])
    assert more == held + sizes.layer_bytes


def test_a_limit_below_one_byte_is_refused(make_config: MakeConfig) -> None:
    with pytest.raises(InvalidArgumentError, match="--device-memory"):
        make_config(device_memory=0)


@pytest.mark.gpu
def test_a_job_stays_under_its_limit(make_config: MakeConfig, tmp_path: Path) -> None:
    """Long enough for keys and values to be most of what is needed."""
    text = tmp_path / "long.txt"
    text.write_text("The harbour lay still in the night, and nobody came ashore. " * 1000)
    model = write_model_folder(tmp_path / "deep", layers=24, dtype=torch.bfloat16, max_positions=2**17)
    config = make_config(model=str(model), input=(text,), device="cuda", query_sample=64, chunk=256)
    least = least_memory(config)
    report = run(replace(config, device_memory=least))
    assert report.memory.keys_and_values == "host"
    assert report.memory.device_peak is not None
    assert report.memory.device_peak <= least < report.manifest.kv_bytes
