"""Attention to keys and values in host memory: streamed, picked and copied, with everything else on the device.

On the CPU both are one memory; there a tensor that can only be cut, picked from and copied shows what would mix them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_engine.evaluation.probe import sample_layer
from decode_engine.layers import dense_layer
from decode_engine.layers import partial_attention as host_rows
from decode_engine.layers.dense_layer import DenseLayer, attend_dense_together
from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import (
    attend_shared,
    attend_streamed,
    copy_rows,
    pick_rows,
    stream_blocks,
)
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import LayerAttention, SparseLayer
from index_store.attention.attention_state import AttentionState
from index_store.attention.fused import Division
from index_store.indexes.coarse_rows.two_planes import ContextRows
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.store.catalog import Store
from tests.support.layers import ALL_METHODS, build_index, build_search, moved, small_spec, with_budget
from tests.support.store import indexed_context, synthetic_context

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
HEADS, GROUP, DIM, COUNT = 2, 3, 16, 300

_ALLOWED = frozenset(
    {"__getitem__", "__get__", "size", "stride", "storage_offset", "data_ptr", "element_size", "as_strided"}
    | {"index_select", "copy_", "dim", "numel"}
)


class HostOnly(Tensor):
    """A tensor that can be cut, picked from and copied, and nothing else."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.__name__ not in _ALLOWED:
            raise AssertionError(f"{func.__name__} mixes host and device")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def host_only(kv_HN2D: Tensor, device: torch.device) -> Tensor:
    """On the CPU guarded; where there is a device of its own memory nothing else is needed."""
    return kv_HN2D.as_subclass(HostOnly) if device == CPU else kv_HN2D


def make_kv(count: int = COUNT, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(HEADS, count, 2, DIM, generator=torch.Generator().manual_seed(count)).to(dtype)


def small_windows(method: Method) -> Method:
    return replace(with_budget(method, 0.2), recent=16, append_block=8)


def run(layer: LayerAttention, device: torch.device) -> Tensor:
    """A prompt, part of which leaves the recent window, then three steps."""
    generator = torch.Generator().manual_seed(1)
    outs, position = [], COUNT
    for count in (40, 1, 1, 1):
        q = torch.randn(HEADS, count, GROUP, DIM, generator=generator)
        k, v = torch.randn(2, HEADS, count, DIM, generator=generator)
        outs.append(layer.attend(q.to(device), k.to(device), v.to(device), position).cpu())
        position += count
    return torch.cat(outs, dim=1)


def test_the_guard_guards() -> None:
    guarded = make_kv().as_subclass(HostOnly)
    with pytest.raises(AssertionError, match="mixes"):
        torch.cat([guarded, guarded])
    with pytest.raises(AssertionError, match="mixes"):
        guarded.float()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 300])
@pytest.mark.parametrize("rows", [1, 4, 500])
def test_streamed_blocks_are_all_rows_in_order(
    count: int, rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv(count)
    monkeypatch.setattr(host_rows, "STREAM_BYTES", rows * HEADS * 2 * DIM * 4)
    blocks = [block.cpu().clone() for block in stream_blocks(host_only(kv, device), device)]
    assert all(block.shape[1] <= rows for block in blocks)
    assert torch.equal(torch.cat([kv[:, :0], *blocks], dim=1), kv)


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_streamed_blocks_are_as_long_as_attention_of_many_queries_takes_them(heads: int) -> None:
    row_bytes = 2 * 128 * 2
    assert host_rows.STREAM_BYTES // (heads * row_bytes) == Division.of(heads, row_bytes, 132).shortest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("positions", [1, 20])
def test_streamed_attention_is_attention(
    positions: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = make_kv()
    monkeypatch.setattr(host_rows, "STREAM_BYTES", 37 * HEADS * 2 * DIM * 4)
    q = torch.randn(HEADS, positions, GROUP, DIM)
    expected = attend_shared(q, kv, causal=False)
    found = attend_streamed(q.to(device), host_only(kv, device))
    torch.testing.assert_close(found.out.cpu(), expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse.cpu(), expected.lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_picked_and_copied(device: torch.device) -> None:
    kv = make_kv(dtype=torch.float16)
    ids = torch.randint(0, COUNT, (HEADS, 3, 11), dtype=torch.int32)
    picked = pick_rows(host_only(kv, device), ids.to(device))
    assert picked.device.type == device.type
    heads = torch.arange(HEADS)[:, None, None]
    assert torch.equal(picked.cpu().view(HEADS, 3, 11, 2, DIM), kv[heads, ids.long()])
    assert torch.equal(copy_rows(host_only(kv, device), 5, 50, device).cpu(), kv[:, 5:50])
    assert copy_rows(kv, 5, 3, device).shape == (HEADS, 0, 2, DIM)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 24])
def test_rows_of_page_locked_memory(dim: int) -> None:
    """Read by a kernel where rows are powers of two, and otherwise picked on the host."""
    kv = torch.randn(HEADS, COUNT, 2, dim, dtype=torch.float16).pin_memory()
    ids = torch.randint(0, COUNT, (HEADS, 3, 11), dtype=torch.int32)
    heads = torch.arange(HEADS)[:, None, None]
    for part in (slice(None), slice(1, None)):
        picked = pick_rows(kv[part], ids[part].to("cuda"))
        assert torch.equal(picked.cpu().view(*ids[part].shape, 2, dim), kv[heads, ids.long()][part])


@pytest.mark.parametrize("device", DEVICES)
def test_dense_layers(device: torch.device) -> None:
    kv = make_kv()
    expected = run(DenseLayer(kv, Figures()), CPU)
    layer = DenseLayer(host_only(kv, device), Figures(), device)
    torch.testing.assert_close(run(layer, device), expected, rtol=1e-4, atol=1e-5)
    assert layer.tail.rows.device.type == device.type


def test_dense_layers_of_one_context_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = make_kv()
    layers = [DenseLayer(kv, Figures(), CPU) for _ in range(3)]
    q, k = torch.randn(HEADS, 1, GROUP, DIM), torch.randn(HEADS, 1, DIM)
    read: list[Tensor] = []

    def attend(q_HTGD: Tensor, kv_HN2D: Tensor, cap: float | None) -> AttentionState:
        read.append(q_HTGD)
        return attend_streamed(q_HTGD, kv_HN2D, cap)

    monkeypatch.setattr(dense_layer, "attend_streamed", attend)
    outs = attend_dense_together([(layer, q, k, k, COUNT) for layer in layers])
    assert [queries.shape[1] for queries in read] == [3]
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("name", ALL_METHODS)
def test_searching_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rows are gathered in both, as on a device.
    monkeypatch.setattr("decode_engine.layers.selected_attention.readable", lambda *rows: False)
    method, kv = small_windows(ALL_METHODS[name]), make_kv()
    search = build_search(method, kv, GROUP)
    seen: list[list[Observation]] = [[], []]
    expected = SparseLayer(kv, search, method, Figures())
    layer = SparseLayer(host_only(kv, CPU), search, method, Figures(), CPU)
    layer.observer, expected.observer = seen[0].append, seen[1].append
    assert torch.equal(run(layer, CPU), run(expected, CPU))
    assert layer.nbytes == expected.nbytes
    assert all(
        torch.equal(found.selection.ids_HTK, wanted.selection.ids_HTK)
        for found, wanted in zip(*seen, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL_METHODS)
def test_searching_layers_on_a_device(name: str) -> None:
    method, kv, device = small_windows(ALL_METHODS[name]), make_kv(), torch.device("cuda")
    search = build_search(method, kv, GROUP)
    seen: list[Observation] = []
    layer = SparseLayer(kv, moved(search, method, kv, device), method, Figures(), device)
    layer.observer = seen.append
    local = SparseLayer(kv.to(device), moved(search, method, kv.to(device), device), method, Figures())
    torch.testing.assert_close(run(layer, device), run(local, device), rtol=1e-4, atol=1e-5)
    assert sample_layer(0, seen[0], torch.tensor([0])).mass_HTG.device.type == "cuda"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "full",
        "oracle",
        "csattention+dropped",
        "csattention-paper",
        "multipole+dropped",
        "refined+dropped",
    ],
)
def test_placements_give_the_same_answers(tmp_path: Path, name: str, device: torch.device) -> None:
    method = replace(get_method(name), recent=16, append_block=8)
    spec = (
        get_method("csattention").index if method.index is None or not method.index.stored else method.index
    )
    kv = torch.randn(3, HEADS, COUNT, 2, DIM, generator=torch.Generator().manual_seed(0))
    built = [build_index(spec, kv[layer], group=GROUP) for layer in (1, 2)]
    context = indexed_context(spec.name, small_spec(spec).parameters, built, kv, group=GROUP)
    store = Store(tmp_path / "store", create=True)
    context.write(store)
    room = MemoryBytes(2**26, 2**26)
    outs = []
    for placement in Placement:
        arena = Arena(room, device=device, placement=placement)
        with arena.acquire(store, context.id, early=True) as resident:
            session = Session(resident, method.on(resident.manifest))
            assert session.nbytes == 0
            assert session.device == resident.device == device
            outs.append(torch.cat([run(layer, device) for layer in session.layers]))
            assert {layer.tail.rows.device.type for layer in session.layers} == {device.type}
            session.close()
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)


class Asked(ResidentContext):
    """A context that notes which layers it was asked for."""

    asked: list[int]

    def rows(self, layer: int) -> ContextRows:
        self.asked.append(layer)
        return super().rows(layer)


def test_a_session_waits_for_no_layer_before_it_needs_it() -> None:
    context = synthetic_context(dtype="float32")
    resident = Asked(context.manifest, context.tokens, dict(enumerate(context.kv)), {})
    resident.asked = []
    session = Session(resident, get_method("full").on(resident.manifest))
    assert resident.asked == []
    with torch.inference_mode():
        tail = session.layers[1].tail
    assert resident.asked == [1]
    assert session.nbytes == tail.nbytes
    tail.write(0, *torch.ones(2, 2, 1, tail.rows.shape[3]))  # also outside of inference mode
    assert session.layers[-1] is session.layers[2]
    assert session.layers[1:] == [session.layers[1], session.layers[2]]
    session.close()
    assert len(session.layers) == 0
