"""Whatever way positions take, they attend exactly to what is selected or always attended, and add the remainder.

Steps alone and together, prompts whose positions search each or share a selection, and queries of the context again:
the reference takes the selection that the layer tells of, and computes the rest without blocks, loops or passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import LayerSearch, SparseLayer, attend_sparse_together
from index_store.attention.attention_state import PLAIN, AttentionState, LogitForm
from index_store.methods.method import Method
from index_store.selection.remainder_states import ExactKeys, remainder_state
from tests.decode_engine.layers.plain_attention import G, H, context, tokens
from tests.support.layers import ALL_METHODS, build_search, with_budget

COUNT, RECENT, BLOCK = 300, 20, 16
"""Short prompts and few steps: all that is searched is in the context."""


Make = Callable[[], SparseLayer]


def step(make: Make) -> None:
    make().attend(*tokens(1, 1), COUNT)


def steps_together(make: Make) -> None:
    layers = [make() for _ in range(3)]
    if layers[0].sharing is not None:
        attend_sparse_together([(layer, *tokens(1, seed), COUNT) for seed, layer in enumerate(layers)])
    else:
        for layer in layers:
            layer.attend(*tokens(1, 4), COUNT)


def prompt(make: Make) -> None:
    make().attend(*tokens(9, 2), COUNT)


def shared_prompt(make: Make) -> None:
    make().attend(*tokens(9, 2), COUNT, shared=True)


def replay(make: Make) -> None:
    make().replay(tokens(5, 3)[0], COUNT - 40)


def expected(seen: Observation, search: LayerSearch, method: Method) -> Tensor:
    """Attention out [H, T, G, D] of what was observed."""
    rows = torch.cat([seen.rows.context_HN2D, seen.rows.tail_Ht2D], dim=1).float()
    selection = seen.selection
    outs = []
    for t in range(seen.q_HTGD.shape[1]):
        position, q = seen.position + t, seen.q_HTGD[:, t : t + 1]
        own = t if selection.ids_HTK.shape[1] > 1 else 0
        attended = torch.zeros(H, position + 1, dtype=torch.bool)
        attended[:, : seen.sinks] = attended[:, seen.search_end :] = True
        for head in range(H):
            kept = selection.ids_HTK[head, own, : int(selection.counts_HT[head, own])]
            assert ((kept >= seen.sinks) & (kept < seen.search_end)).all()
            attended[head, kept.long()] = True
        keys, values = rows[:, : position + 1, 0], rows[:, : position + 1, 1]
        logits = seen.form.capped(torch.einsum("htgd,hnd->htgn", q, keys))
        seen_logits = logits.masked_fill(~attended[:, None, None], -torch.inf)
        state = AttentionState(seen_logits.softmax(-1) @ values[:, None], seen_logits.logsumexp(-1))
        state = seen.form.add_sink(state)
        if not method.drops_remainder:
            index = search.index if search.partition is None else search.partition
            pieces = index.pieces(q, seen.sinks, seen.search_end, None, position)
            # Clusters also hold keys that a query of the context must not see.
            end = max(position + 1, COUNT)
            taken = torch.nn.functional.pad(attended, (0, end - position - 1), value=True)
            ids = torch.arange(end, dtype=torch.int32).expand(H, 1, -1)
            raw = torch.einsum("htgd,hnd->htgn", q, rows[:, :end, 0])
            exact = ExactKeys(ids, taken[:, None], raw, rows[:, None, :end, 1])
            left = remainder_state(method.remainder, pieces, [exact], seen.form)
            assert left is not None
            state = state.merge(left)
        outs.append(state.out)
    return torch.cat(outs, dim=1)


@cache
def prepared(name: str) -> tuple[Method, Tensor, LayerSearch]:
    method = replace(with_budget(ALL_METHODS[name], 0.1), recent=RECENT, append_block=BLOCK)
    kv = context(COUNT)
    return method, kv, build_search(method, kv, G)


SINK, CAPPED = LogitForm(sink_HG=torch.ones(H, G)), LogitForm(cap=20.0)


@pytest.mark.parametrize(
    ("way", "form"),
    [
        *((way, PLAIN) for way in (step, steps_together, prompt, shared_prompt, replay)),
        (steps_together, SINK),
        (shared_prompt, SINK),
        (step, CAPPED),
        (prompt, CAPPED),
    ],
)
@pytest.mark.parametrize("name", ALL_METHODS)
def test_every_way_attends_to_what_was_selected_and_to_the_rest(
    name: str, way: Callable[[Make], None], form: LogitForm
) -> None:
    method, kv, search = prepared(name)
    found: list[tuple[Tensor, Tensor]] = []

    def make() -> SparseLayer:
        layer = SparseLayer(kv, search, method, Figures(), form=form)
        # Compared at once: what is told are views of a tail that grows.
        layer.observer = lambda seen: found.append((seen.out_HTGD, expected(seen, search, method)))
        return layer

    way(make)
    assert found
    # A CPU's loop rounds the weights of coarse rows to 127 units of the largest beside them.
    close = 2e-2 if method.remainder.name == "coarse" else 1e-4
    for out, reference in found:
        torch.testing.assert_close(out, reference, rtol=close, atol=close)
