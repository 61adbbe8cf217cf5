"""Where layers look: what is told is what was selected, weighed as attention does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decode_engine.layers.looking import MOST_PLACES, Looking, looked_at
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.orders.events import Looks
from index_store.methods.presets import get_method
from tests.support.layers import build_layer, with_everything

HEADS, TOKENS, GROUP, DIM = 2, 300, 3, 16


def context_rows() -> Tensor:
    return torch.randn(HEADS, TOKENS, 2, DIM, generator=torch.Generator().manual_seed(5))


def layer_of(name: str, everything: bool = False) -> SparseLayer:
    method = get_method(name)
    return build_layer(with_everything(method) if everything else method, context_rows(), GROUP)


def step(layer: SparseLayer, position: int, count: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(position)
    queries = torch.randn(HEADS, count, GROUP, DIM, generator=generator)
    rows = torch.randn(2, HEADS, count, DIM, generator=generator)
    layer.attend(queries, rows[0], rows[1], position)
    return queries


@pytest.mark.parametrize("name", ["oracle", "csattention", "refined"])
def test_with_all_keys_selected_the_weights_are_those_of_attention(name: str) -> None:
    layer, seen = layer_of(name, everything=True), list[Observation]()
    layer.observer = seen.append
    queries = step(layer, TOKENS, 4)
    keys = torch.cat([context_rows(), layer.tail.rows], dim=1)[:, :, 0]
    logits = queries[:, 2] @ keys[:, : TOKENS + 3].transpose(-1, -2)
    expected = logits.softmax(-1).mean((0, 1))
    (one,) = [each for each in seen if each.position <= TOKENS + 2 < each.position + each.q_HTGD.shape[1]]
    ids, weights = looked_at(one, TOKENS + 2 - one.position, TOKENS)
    found = torch.zeros(TOKENS).index_add_(0, ids, weights)
    torch.testing.assert_close(found[one.sinks : one.search_end], expected[one.sinks : one.search_end])
    assert not found[: one.sinks].any()
    assert not found[one.search_end :].any()


def test_one_in_so_many_tokens_is_told_by_groups_of_layers() -> None:
    layers, told = [layer_of("csattention") for _ in range(6)], list[Looks]()
    looking = Looking(TOKENS + 9, 3, TOKENS, [1, 2, 4, 5, 6, 7], told.append)
    kept: dict[int, set[int]] = {}

    def observe(number: int, seen: Observation) -> None:
        for row in range(seen.q_HTGD.shape[1]):
            ids, counts = seen.selection.ids_HTK[:, row], seen.selection.counts_HT[:, row]
            for head in range(HEADS):
                kept.setdefault(seen.position + row, set()).update(ids[head, : counts[head]].tolist())
        looking.observe(number, seen)

    for number, layer in zip([1, 2, 4, 5, 6, 7], layers, strict=True):
        layer.observer = lambda seen, number=number: observe(number, seen)  # type: ignore[misc]
    for position, count in ((TOKENS, 6), (TOKENS + 6, 4), *((TOKENS + at, 1) for at in range(10, 18))):
        for layer in layers:
            step(layer, position, count)
    assert [look.token for look in told] == [0, 3, 6]
    for token, groups in ((look.token, look.layers) for look in told):
        assert [(group.first, group.last) for group in groups] == [(1, 2), (4, 5), (6, 7)]
        for group in groups:
            assert 0 < len(group.positions) <= MOST_PLACES
            assert set(group.positions) <= kept[TOKENS + 9 + token]
            assert sorted(group.weights, reverse=True) == list(group.weights)
            assert 0 < sum(group.weights) <= 1
