"""Queries of a trained model in place of a random one's: they are what every step asks with, and only meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.made_up import trained_rows
from harness.made_up.trained_rows import asked
from harness.steps.general_steps import first_tokens, forward, start_sessions
from torch._dynamo.backends.common import aot_autograd
from transformers import AttentionInterface

from decode_engine.model.decode_attention import ATTENTION_NAME
from decode_engine.model.warm_up import made_up_context
from index_store.methods.presets import get_method
from tests.support.tiny_model import IDENTITY, make_model

WIDE = replace(IDENTITY, layers=2, query_heads=2, kv_heads=1, head_dim=64)

pytestmark = pytest.mark.usefixtures("without_gpu")


def test_every_layer_is_asked_with_what_was_given() -> None:
    method = get_method("full")
    rows = torch.randn(1, 300, 2, 64, generator=torch.Generator().manual_seed(1))
    context = made_up_context(WIDE, "float32", method, 300, kv=lambda _: rows)
    assert torch.equal(context.kv(1), rows)
    model = make_model(WIDE)

    def logits(count: int) -> torch.Tensor:
        contexts = [context] * count
        return forward(model, start_sessions(contexts, method), first_tokens(contexts))

    own = logits(2)
    # Of very large queries a step attends to one key: the one that is nearest.
    first, second = (40.0 * rows[:, key, 0][None, :, None].expand(2, 2, 1, -1) for key in (5, 9))
    with asked([first, first]):
        near_first = logits(2)
        with pytest.raises(
            ValueError, match=r"queries \(1, 2, 1, 64\) in torch.float32, given are \(2, 2, 1, 64\)"
        ):
            logits(1)
    with asked([second, first]):
        assert not torch.allclose(logits(2), near_first)
    assert not torch.allclose(near_first, own)
    assert torch.equal(logits(2), own)


def test_a_compiled_step_still_computes_its_own_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a step would lack the projections that a model's step has."""
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        counts.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    weights = torch.randn(8, 2 * 64)
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    monkeypatch.setattr(trained_rows, "decode_attention", lambda module, query, *_: 2.0 * query)

    def step(rows: torch.Tensor) -> torch.Tensor:
        return AttentionInterface()[ATTENTION_NAME](module, (rows @ weights).view(1, 2, 1, 64))

    queries = torch.randn(1, 2, 1, 64)
    with asked([queries]):
        compiled = torch.compile(step, backend=aot_autograd(fw_compiler=count))
        assert torch.equal(compiled(torch.randn(1, 8)), 2.0 * queries)
    assert counts == [1]
