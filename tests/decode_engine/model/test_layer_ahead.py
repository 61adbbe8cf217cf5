"""Queries foretold by the layer before: right where that layer changes nothing, and only a hint elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.session import Session
from decode_engine.layers.sparse_layer import SparseLayer
from decode_engine.steps.layer_ahead import predicted_queries
from index_store.errors import MethodUnsupportedError
from index_store.methods.presets import get_method
from tests.support.serving.served import PROMPT, Served, serve

LAYERS = 3


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp(request.param), request.param, methods=("csattention",))


@contextmanager
def without_effect(model: nn.Module, layer: int) -> Iterator[None]:
    """The layer adds nothing to the residual stream."""
    weights = [
        model.get_parameter(f"model.layers.{layer}.{name}.weight")
        for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    kept = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.zero_()
        yield
    finally:
        for weight, values in zip(weights, kept, strict=True):
            weight.data.copy_(values)


def true_queries(session: Session) -> dict[int, list[Tensor]]:
    """Filled while the session decodes: every layer's queries [H, T, G, d], scaled."""
    found: dict[int, list[Tensor]] = {}
    for number, layer in enumerate(session.layers):
        assert isinstance(layer, SparseLayer)

        def observe(seen: Observation, number: int = number) -> None:
            found.setdefault(number, []).append(seen.q_HTGD)

        layer.observer = observe
    return found


def cosines(predicted_1QTD: Tensor, true: list[Tensor]) -> Tensor:
    """[H, T, G]."""
    q_HTGD = torch.cat(true, dim=1)
    heads, _, group, head_dim = q_HTGD.shape
    predicted = predicted_1QTD[0].view(heads, group, -1, head_dim).transpose(1, 2)
    return torch.nn.functional.cosine_similarity(predicted, q_HTGD, dim=-1)


def test_predictions_are_right_behind_a_layer_without_effect(served: Served) -> None:
    model = served.runner.model
    prompt = served.runner.tokenizer.encode(PROMPT)
    for idle in range(LAYERS - 1):
        session = served.start(get_method("csattention", 0.1))
        found, predicted = true_queries(session), dict[int, Tensor]()
        with without_effect(model, idle), predicted_queries(model, predicted):
            served.runner.forward([session], [prompt])
        assert set(predicted) == set(range(1, LAYERS))
        for layer in range(1, LAYERS):
            cosine = cosines(predicted[layer], found[layer])
            if layer == idle + 1:
                scale = predicted[layer].shape[-1] ** -0.5
                norms = torch.cat(found[layer], dim=1).norm() / scale
                torch.testing.assert_close(predicted[layer].norm(), norms, rtol=1e-4, atol=0)
                assert float(cosine.min()) > 0.9999
            else:
                assert float(cosine.min()) < 0.99


def test_nothing_is_predicted_afterwards(served: Served) -> None:
    predicted = dict[int, Tensor]()
    with predicted_queries(served.runner.model, predicted):
        pass
    session = served.start(get_method("csattention", 0.1))
    served.runner.forward([session], [[5]])
    assert predicted == {}


def test_ahead_behind_layers_without_effect_is_the_same_as_searching_in_time(served: Served) -> None:
    prompt = served.runner.tokenizer.encode(PROMPT)
    model = served.runner.model
    with without_effect(model, 0), without_effect(model, 1):
        plain = served.start(get_method("csattention", 0.1))
        ahead = served.start(get_method("csattention@ahead@correct=0.999", 0.1))
        for fed in (prompt, [5], [77]):
            expected, found = (served.runner.forward([session], [fed])[0] for session in (plain, ahead))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ahead.figures.correctable > ahead.figures.corrected == 0


def test_corrected_everywhere_it_is_the_same_as_searching_in_time(served: Served) -> None:
    prompt = served.runner.tokenizer.encode(PROMPT)
    plain, ahead, blind = (
        served.start(get_method(f"csattention{schedule}", 0.02))
        for schedule in ("", "@ahead@correct=1", "@ahead")
    )
    for fed in (prompt, [5], [77]):
        expected, found, unchecked = (
            served.runner.forward([session], [fed])[0] for session in (plain, ahead, blind)
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(unchecked, expected, rtol=1e-4, atol=1e-4)
    assert ahead.figures.corrected == ahead.figures.correctable > 0


def test_models_with_other_layers_are_refused() -> None:
    bare, other = nn.Module(), nn.Module()
    other.model = nn.Module()
    other.model.layers = nn.ModuleList([nn.Linear(2, 2)])
    for model in (bare, other):
        with (
            pytest.raises(MethodUnsupportedError, match="does not know the layers of Module"),
            predicted_queries(model, {}),
        ):
            pass
