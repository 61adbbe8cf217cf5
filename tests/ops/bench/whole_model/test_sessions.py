"""How many sessions fit: counted by what the engine counts."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from decode_engine.engine.session_memory import session_bytes
from decode_engine.model.warm_up import made_up_context
from index_store.memory.context_loading import placed_bytes
from index_store.memory.placement import MemoryBytes, Placement
from index_store.methods.presets import METHODS
from index_store.store.description.context_id import ModelIdentity
from tests.ops.bench.conftest import Run, load_bench

LARGE = ModelIdentity("large", "llama", "0" * 64, "0" * 64, 32, 32, 8, 128, 128256, 2**17)
NARROW = replace(LARGE, layers=2, query_heads=2, kv_heads=2, head_dim=32)
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_bench("whole_model/sessions_gpu")


@pytest.mark.parametrize("name", ["full", "csattention", "squeezed-tree", "quest"])
def test_a_context_that_is_described_is_as_large_as_one_that_is_made(bench: ModuleType, name: str) -> None:
    made = made_up_context(NARROW, "bfloat16", METHODS[name], 3 * 8192).manifest
    described = bench.describe_context(NARROW, METHODS[name], 3 * 8192)
    assert described.arrays == made.arrays
    assert [index.layers for index in described.indexes] == [index.layers for index in made.indexes]


def test_sessions_take_what_the_engine_counts(bench: ModuleType) -> None:
    method = METHODS["full"]
    manifest = bench.describe_context(LARGE, method, 131072)
    for placement in Placement:
        served = bench.Served(manifest, method, placement, 512)
        context = placed_bytes(manifest, GPU, placement)
        needed = served.needed(5, 2)
        rows = 8 * 8 * 131072 * 13  # eight rows for five sessions
        assert needed.device == 2 * context.device + 5 * session_bytes(method.on(manifest), 512) + rows
        assert needed.host == 2 * context.host
    assert served.batches(33).device == 64 * 8 * 131072 * 13


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


def test_a_line_for_each_placement(bench: ModuleType, run: Run) -> None:
    options = {"layers": 2, "session_tokens": 512, "device": "2GB", "hosts": "1GiB"}
    rows, code, _ = run(bench, methods="full,refined+dropped:0.01", tokens=8192, **options)
    assert (code, len(rows)) == (0, 2 * len(Placement))
    # Of these two layers alone the embeddings leave nothing.
    assert (rows[0]["own_1GiB"], rows[0]["limit_1GiB"]) == (0, "device")
