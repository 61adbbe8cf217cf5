"""When a layer searches, and with which query: every step, or every few."""

from __future__ import annotations

from dataclasses import replace

import torch

from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import SparseLayer
from index_store.methods.presets import get_method
from tests.decode_engine.layers.plain_attention import G, context, tokens
from tests.support.layers import build_search

N, STEPS, PERIOD = 300, 12, 4


def chosen(seen: Observation) -> list[set[int]]:
    """Selected keys by KV head."""
    ids, counts = seen.selection.ids_HTK[:, 0], seen.selection.counts_HT[:, 0]
    return [set(row[:count].tolist()) for row, count in zip(ids, counts, strict=True)]


def test_a_period_reuses_the_selection_and_searches_again_after_it() -> None:
    """But for a prompt, which is searched position by position."""
    method = replace(get_method("csattention", 0.1), recent=8, append_block=4)
    kv, figures = context(N), [Figures(), Figures()]
    search = build_search(method, kv, G)
    seen: list[list[Observation]] = [[], []]
    layers = [
        SparseLayer(kv, search, replace(method, period=period), own)
        for period, own in zip((PERIOD, 1), figures, strict=True)
    ]
    for layer, told in zip(layers, seen, strict=True):
        layer.observer = told.append
        for step in range(STEPS):
            layer.attend(*tokens(1, step), N + step)
    for step, one in enumerate(seen[0]):
        assert chosen(one) == chosen(seen[1][step // PERIOD * PERIOD])
        assert (one.vectors_read + one.bytes_read > 0) == (step % PERIOD == 0)
    assert [own.searches for own in figures] == [STEPS / PERIOD, STEPS]
    layers[0].attend(*tokens(20, 99), N + STEPS)
    assert figures[0].searches == STEPS / PERIOD + 20


def test_a_repeated_step_uses_the_same_selection_again() -> None:
    method, kv = replace(get_method("oracle", 0.1), recent=8, append_block=4, period=3), context(N)
    search = build_search(method, kv, G)
    outs: list[list[torch.Tensor]] = []
    for times in (1, 2):
        layer = SparseLayer(kv, search, method, Figures())
        outs.append([layer.attend(*tokens(1, step), N + step) for step in range(STEPS) for _ in range(times)])
    assert all(torch.equal(one, two) for one, two in zip(outs[0], outs[1][1::2], strict=True))
