"""How many sessions fit: counted by what the engine counts, and compared with what contexts and steps take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import typer

from decode_engine.engine.session_memory import session_bytes
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.cluster_selection import device_clusters
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement
from index_store.methods.index_specs import INDEX_SPECS
from index_store.methods.method import METHODS, get_method
from index_store.store.manifest import ModelIdentity
from tests.ops.scripts import check_refusal_without_device, load_script
from tests.ops.tiny_model import IDENTITY, make_model

FOLDER = Path(__file__).resolve().parents[2] / "ops" / "bench"
LARGE = ModelIdentity("large", "llama", "0" * 64, "0" * 64, 32, 32, 8, 128, 128256, 2**17)
NARROW = replace(LARGE, layers=2, query_heads=2, kv_heads=2, head_dim=32)
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(FOLDER / "sessions_gpu.py")


@pytest.mark.parametrize("name", ["full", "csattention", "pq", "squeezed-tree", "quest"])
def test_a_context_that_is_described_is_as_large_as_one_that_is_made(bench: ModuleType, name: str) -> None:
    made = made_up_context(NARROW, "bfloat16", METHODS[name], 3 * 8192).manifest
    described = bench.describe_context(NARROW, METHODS[name], 3 * 8192)
    assert described.arrays == made.arrays
    assert [index.layers for index in described.indexes] == [index.layers for index in made.indexes]


def test_lengths_that_do_not_grow_in_proportion_are_refused(bench: ModuleType) -> None:
    for tokens in (0, 8191, 12288):
        with pytest.raises(typer.BadParameter, match="multiple of 8192"):
            bench.describe_context(NARROW, METHODS["full"], tokens)


def test_sessions_take_what_the_engine_counts(bench: ModuleType) -> None:
    method = METHODS["full"]
    manifest = bench.describe_context(LARGE, method, 131072)
    for placement in Placement:
        served = bench.Served(manifest, method, placement, 512)
        context = placed_bytes(manifest, GPU, placement)
        needed = served.needed(5, 2)
        rows = 8 * 8 * 131072 * 13  # eight rows for five sessions
        assert needed.device == 2 * context.device + 5 * session_bytes(manifest, method, 512) + rows
        assert needed.host == 2 * context.host
    assert served.batches(33).device == 33 * 8 * 131072 * 13


def test_buffers_of_a_search_on_the_host_count_there(bench: ModuleType) -> None:
    method = get_method("csattention+dropped")
    manifest = bench.describe_context(LARGE, method, 8192)
    host = [bench.Served(manifest, method, placement, 512).batches(2).host for placement in Placement]
    assert host == [0, 0, 2 * 8 * 8192 * 9]


def test_what_is_derived_from_clusters_counts(bench: ModuleType) -> None:
    wide = replace(NARROW, head_dim=64)
    context = made_up_context(wide, "bfloat16", METHODS["csattention"], 1000)
    made = device_clusters(context, INDEX_SPECS["remainder_clusters"], 0)
    own = [made.means_HCD, made.value_means_HCD, made.sizes_HC, made.variances]
    served = bench.Served(context.manifest, METHODS["csattention"], Placement.DEVICE, 512)
    assert served.derived == 2 * sum(tensor.nbytes for tensor in own if tensor is not None) > 0
    dropped = bench.Served(context.manifest, get_method("csattention+dropped"), Placement.DEVICE, 512)
    assert dropped.derived == 0


def test_the_largest_number_fits_and_one_more_does_not(bench: ModuleType) -> None:
    method = METHODS["full"]
    manifest = bench.describe_context(LARGE, method, 131072)
    served = bench.Served(manifest, method, Placement.HYBRID, 512)
    for room, limit in ((MemoryBytes(2**37, 2**40), "host"), (MemoryBytes(2**42, 2**34), "device")):
        count, found = bench.most_sessions(served, room, shared=False)
        assert (found, count > 0) == (limit, True)
        assert served.needed(count, count).fits(room)
        assert not served.needed(count + 1, count + 1).fits(room)
    shared, _ = bench.most_sessions(served, MemoryBytes(2**37, 2**34), shared=True)
    assert shared > count
    assert bench.most_sessions(served, MemoryBytes(2**37, 0), shared=True) == (0, "device")


def test_the_table_has_a_row_for_each_placement(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"layers": 2, "session_tokens": 512, "device": "2GB", "hosts": "1GiB"}
    bench.main(methods="full,pq+dropped:0.01", tokens=8192, **options, as_table=True)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 2 * len(Placement)
    # Of these two layers alone the embeddings leave nothing.
    assert "| 0 (device) |" in rows[2]


def test_a_comparison_needs_a_device() -> None:
    check_refusal_without_device(FOLDER / "memory_gpu.py")


def test_more_than_counted_is_a_miss() -> None:
    check = load_script(FOLDER / "memory_gpu.py")
    row = {"context_counted": 10**9, "context_taken": 10**9, "rest_counted": 10**8, "rest_taken": 10**8}
    assert not check.misses(row)
    assert check.misses({**row, "context_taken": 1_120_000_000})
    assert check.misses({**row, "rest_taken": 130_000_000})


def test_contexts_are_loaded_and_stepped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the counter, which only a GPU has."""
    monkeypatch.setattr("decode_engine.steps.stepper._LEAST_KEYS", 256)
    check = load_script(FOLDER / "memory_gpu.py")
    monkeypatch.setattr(check, "DTYPE", "float32")
    monkeypatch.setattr(check, "STEPS", 1)
    counted = iter([0, 3 * 10**5, 4 * 10**5] * 6)
    monkeypatch.setattr(check, "allocated", lambda device: next(counted))
    wide: Any = replace(IDENTITY, layers=1, query_heads=2, kv_heads=1, head_dim=64)
    rows = list(check.compared(make_model(wide), wide, "full", METHODS["full"], torch.device("cpu"), 300))
    assert [row["placement"] for row in rows] == ["device", "hybrid", "host"]
    for row in rows:
        assert (row["context_taken"], row["rest_taken"]) == (3 * 10**5, 10**5)
        assert row["rest_counted"] > 0
        assert "missed" not in row
    assert rows[0]["context_counted"] > 300 * 2 * 64 * 4 > rows[1]["context_counted"]


def test_a_placement_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    check = load_script(FOLDER / "memory_gpu.py")
    monkeypatch.setattr(check, "DTYPE", "float32")

    def take(*arguments: Any) -> tuple[int, int]:
        if Placement.HYBRID in arguments:
            raise RuntimeError("no room")
        return 0, 0

    monkeypatch.setattr(check, "taken", take)
    rows = list(check.compared(None, IDENTITY, "full", METHODS["full"], torch.device("cpu"), 300))
    assert [row.get("error") for row in rows] == [None, "RuntimeError: no room", None]
    assert not any("missed" in row for row in rows)
