"""Layers over rows in 8 bits: what they attend to are the decoded rows, whatever the method."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.partial_attention import copy_rows, pick_rows, stream_blocks
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer, attend_sparse_together
from index_store.attention.logit_form import LogitForm
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.row_planes.two_planes import TwoPlanes
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from tests.index_store.indexes.row_planes.test_two_planes import planes_of
from tests.support.layers import ALL_METHODS, build_search, with_budget, with_everything

HEADS, GROUP, CONTEXT, DIM = 2, 3, 300, 32


def make_context() -> tuple[TwoPlanes, Tensor]:
    """Rows in two planes, and decoded."""
    kv = torch.randn(HEADS, CONTEXT, 2, DIM, generator=torch.Generator().manual_seed(5)).bfloat16()
    planes = planes_of(kv)
    return planes, planes.decode(0, CONTEXT)


def make_step(seed: int, positions: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, positions, GROUP, DIM, generator=generator) * DIM**-0.5 * 3
    keys, values = torch.randn(2, HEADS, positions, DIM, generator=generator).bfloat16().float()
    return q, keys, values


def search_over(method: Method, planes: TwoPlanes, decoded: Tensor) -> LayerSearch:
    search = build_search(method, decoded, GROUP)
    index = ExactIndex(planes) if isinstance(search.index, ExactIndex) else search.index
    partition = ExactIndex(planes) if isinstance(search.partition, ExactIndex) else search.partition
    return LayerSearch(index, partition, search.thresholds)


@pytest.mark.parametrize("form", [LogitForm(), LogitForm(cap=5.0)])
@pytest.mark.parametrize("positions", [1, 20])
def test_full_attention_is_that_over_decoded_rows(
    form: LogitForm, positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_engine.layers.partial_attention.DECODED_BYTES", 64 * 2 * HEADS * 2 * DIM)
    planes, decoded = make_context()
    step = make_step(1, positions)
    found = DenseLayer(planes, Figures(), form=form).attend(*step, CONTEXT)
    expected = DenseLayer(decoded, Figures(), form=form).attend(*step, CONTEXT)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert DenseLayer(planes, Figures()).tail.rows.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ALL_METHODS)
def test_a_full_budget_is_full_attention_to_decoded_rows(name: str) -> None:
    planes, decoded = make_context()
    method = with_everything(ALL_METHODS[name])
    layer = SparseLayer(planes, search_over(method, planes, decoded), method, Figures())
    dense = DenseLayer(decoded, Figures())
    for position in range(CONTEXT, CONTEXT + 3):
        step = make_step(position)
        found, expected = layer.attend(*step, position), dense.attend(*step, position)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["refined", "csattention", "oracle", "oracle+centred", "tactic"])
def test_a_selection_is_attended_to_as_over_decoded_rows(name: str) -> None:
    planes, decoded = make_context()
    method = with_budget(get_method(name), 0.1)
    search = search_over(method, planes, decoded)
    over_planes = SparseLayer(planes, search, method, Figures())
    plain = SparseLayer(decoded, search, method, Figures())
    assert (over_planes.sharing is not None) == (name == "refined")
    # The last steps search a part of the tail, too.
    for position, positions in ((CONTEXT, 12), (CONTEXT + 12, 1), (CONTEXT + 13, 190), (CONTEXT + 203, 1)):
        step = make_step(position, positions)
        found, expected = over_planes.attend(*step, position), plain.attend(*step, position)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_steps_taken_together_have_the_bits_of_steps_alone() -> None:
    planes, decoded = make_context()
    method = with_budget(get_method("refined"), 0.1)
    search = search_over(method, planes, decoded)

    def layer_behind(tail: int) -> SparseLayer:
        layer = SparseLayer(planes, search, method, Figures())
        layer.attend(*make_step(tail, tail), CONTEXT)
        return layer

    tails = (3, 150, 40)
    calls = [(layer_behind(tail), *make_step(tail + 1), CONTEXT + tail) for tail in tails]
    together = attend_sparse_together(calls)
    for tail, found in zip(tails, together, strict=True):
        assert torch.equal(found, layer_behind(tail).attend(*make_step(tail + 1), CONTEXT + tail))


def test_rows_are_read_as_they_are_decoded() -> None:
    planes, decoded = make_context()
    cpu = torch.device("cpu")
    assert torch.equal(torch.cat(list(stream_blocks(planes, cpu)), dim=1), decoded)
    assert torch.equal(copy_rows(planes, 7, 90, cpu), decoded[:, 7:90])
    assert copy_rows(planes, 9, 3, cpu).shape == (HEADS, 0, 2, DIM)
    ids = torch.randint(0, CONTEXT, (HEADS, 2, 5), dtype=torch.int32)
    wanted = decoded[torch.arange(HEADS)[:, None, None], ids.long()]
    assert torch.equal(pick_rows(planes, ids).view(wanted.shape), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("low_on_host", [False, True])
@pytest.mark.parametrize("name", ["full", "refined"])
def test_a_device_attends_to_the_same_rows(name: str, low_on_host: bool) -> None:
    planes, decoded = make_context()
    tensors = {
        field.name: getattr(planes.coarse, field.name).cuda()
        for field in fields(planes.coarse)
        if isinstance(getattr(planes.coarse, field.name), Tensor)
    }
    coarse = replace(planes.coarse, **tensors)
    low = planes.low_HN2C if low_on_host else planes.low_HN2C.cuda()
    beside = torch.device("cuda", 0) if low_on_host else None
    there = TwoPlanes(coarse, low, planes.dtype)
    method = get_method(name)
    for positions in (1, 12):
        step = make_step(7, positions)
        on_device = tuple(tensor.cuda() for tensor in step)
        if name == "full":
            found = DenseLayer(there, Figures(), beside).attend(*on_device, CONTEXT)
            expected = DenseLayer(decoded, Figures()).attend(*step, CONTEXT)
        else:  # hosts round scores otherwise, and may list another key at the border
            search = build_search(method, decoded.cuda(), GROUP)
            found = SparseLayer(there, search, method, Figures(), beside).attend(*on_device, CONTEXT)
            expected = SparseLayer(decoded.cuda(), search, method, Figures()).attend(*on_device, CONTEXT)
        torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=1e-2, atol=1e-2)
