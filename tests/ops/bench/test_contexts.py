"""Contexts of benchmarks: the same contents wherever they are, in host memory that is used anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.made_up import contexts

from index_store.memory.host_memory import HostBlock
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS, get_method
from tests.support.tiny_model import IDENTITY

WIDE = replace(IDENTITY, layers=3, query_heads=2, kv_heads=1, head_dim=64)
LENGTH = 400
KV_BYTES = LENGTH * 2 * 64 * 4
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("without_gpu")


def test_a_range_is_filled_and_used_anew() -> None:
    memory = contexts.HostRange(1024, HostBlock(1024))
    whole = torch.arange(200, dtype=torch.float32).view(2, 100)
    first = memory.put(whole[:, ::2])
    second = memory.put(torch.tensor([7], dtype=torch.int8))
    assert torch.equal(first, whole[:, ::2])
    assert second.data_ptr() == first.data_ptr() + 512
    with pytest.raises(RuntimeError, match="do not fit"):
        memory.put(whole)
    memory.clear()
    assert memory.put(second).data_ptr() == first.data_ptr()


def test_tables_have_a_range_for_each_kind_that_is_searched() -> None:
    sizes = {
        names: [
            each.nbytes for each in contexts.make_ranges(32e-6, [METHODS[name] for name in names.split()])
        ]
        for names in ("full pq", "csattention", "csattention csattention-paper pq")
    }
    kinds = {name: len(found) for name, found in sizes.items()}
    assert kinds == {"full pq": 1, "csattention": 2, "csattention csattention-paper pq": 2}
    assert sizes["csattention"] == [32000, 34000]
    assert sizes["csattention csattention-paper pq"] == [32000, 68000]
    assert len(contexts.make_ranges(32e-6)) == 1


def test_contexts_of_all_placements_hold_the_same() -> None:
    method = get_method("csattention+dropped")
    ranges = contexts.make_ranges(2 * 2 * KV_BYTES * 1e-9, [method])
    ranges[1] = contexts.HostRange(2**21, contexts.table_block(2**21))
    made_from = contexts.PlacedContexts(WIDE, [method], LENGTH, 2, CPU, ranges)
    assert made_from.distinct == 2
    made = {placement: made_from.make(placement) for placement in Placement}
    for row in range(2):
        device, hybrid, host = (made[placement][row] for placement in Placement)
        for layer in range(WIDE.layers):
            assert device.kv(layer).data_ptr() != hybrid.kv(layer).data_ptr() == host.kv(layer).data_ptr()
            assert torch.equal(device.kv(layer), host.kv(layer))
            arrays = [each.index("query_tables", layer).arrays() for each in (device, hybrid, host)]
            for name, array in arrays[0].items():
                assert array.data_ptr() == arrays[1][name].data_ptr() != arrays[2][name].data_ptr()
                assert torch.equal(array, arrays[2][name])
    assert not torch.equal(made[Placement.DEVICE][0].kv(0), made[Placement.DEVICE][1].kv(0))


def test_layers_with_contents_of_their_own() -> None:
    deep = replace(WIDE, layers=32)
    ranges = contexts.make_ranges(5 * KV_BYTES * 1e-9)
    found = [contexts.distinct_layers(deep, LENGTH, batch, ranges) for batch in (1, 2, 16)]
    assert found == [5, 2, 1]
    assert [contexts.distinct_layers(deep, LENGTH, batch) for batch in (1, 4, 16)] == [8, 2, 2]
    assert contexts.distinct_layers(replace(WIDE, layers=1), LENGTH, 1) == 1


def test_contexts_outlive_what_they_were_made_from() -> None:
    made_from = contexts.PlacedContexts(WIDE, [METHODS["pq"]], LENGTH, 1, CPU)
    (context,) = made_from.make(Placement.DEVICE)
    before = context.kv(2).clone()
    made_from.release()
    assert torch.equal(context.kv(2), before)
    assert context.index("product_codes", 2).key_count == LENGTH
    contexts.release([context])
    with pytest.raises(Exception, match="released"):
        context.tokens()
