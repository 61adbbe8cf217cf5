"""Every tensor is made on the device of those that it is made from.

On the CPU that shows where new tensors go to a device without memory by default: what forgets its device then fails.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.evaluation.probe import sample_layer
from decode_engine.layers.dense_layer import DenseLayer
from decode_engine.layers.figures import Figures
from decode_engine.layers.selected_attention import Observation
from decode_engine.layers.sparse_layer import LayerAttention, SparseLayer
from index_store.methods.method import Method
from index_store.methods.presets import METHODS, get_method
from index_store.selection.budgets import Budget, Mass, Threshold, TokenCount
from tests.support.devices import crossed
from tests.support.layers import build_layer

HEADS, GROUP, DIM, COUNT, PROMPT, STEPS = 2, 3, 16, 400, 45, 4
KERNELS = (
    "selection.remainders_numba",
    "selection.collect_numba",
    "selection.top_k_numba",
    "indexes.key_clusters.tree_numba",
    "indexes.query_tables.search_numba",
)

ROUNDING_KERNELS = ("indexes.coarse_rows.index",)
"""Where loops are chosen that round to 8 bits, which no device does: there is nothing to compare them with here."""

EXPRESSIONS = [
    *METHODS,
    *(
        f"{name}+{remainder}"
        for name in ("oracle", "csattention", "quest")
        for remainder in ("monopole", "dipole")
    ),
    "multipole+centred",
    "csattention@period=3",
]
BUDGETS: dict[str, Budget] = {
    "tokens": TokenCount(20),
    "mass": Mass(0.5),
    "threshold": Threshold(threshold=0.002),
}


def small(method: Method) -> Method:
    """The method with windows for a few hundred tokens, and a threshold that needs no calibration."""
    budget = Threshold(threshold=0.002) if isinstance(method.budget, Threshold) else method.budget
    return replace(method, budget=budget, recent=8, append_block=min(method.append_block, 16))


def run_layer(
    layer: LayerAttention, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, list[Observation]]:
    """A prompt and some decode steps; the layer's outputs and what was observed of them."""
    seen: list[Observation] = []
    if isinstance(layer, SparseLayer):
        layer.observer = seen.append
    queries, keys, values = inputs
    outs = []
    for first, end in ((0, PROMPT), *((PROMPT + step, PROMPT + step + 1) for step in range(STEPS))):
        part = slice(first, end)
        outs.append(layer.attend(queries[:, part], keys[:, part], values[:, part], COUNT + first))
    return torch.cat(outs, dim=1), seen


def some_tokens() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    total = PROMPT + STEPS
    queries = torch.randn(HEADS, total, GROUP, DIM, generator=generator) * 2 / DIM**0.5
    keys, values = torch.randn(2, HEADS, total, DIM, generator=generator)
    return queries, keys, values


def some_context() -> Tensor:
    return torch.randn(HEADS, COUNT, 2, DIM, generator=torch.Generator().manual_seed(2))


def make_layer(method: Method, kv_HN2D: Tensor) -> LayerAttention:
    if method.sparse:
        return build_layer(method, kv_HN2D, GROUP)
    return DenseLayer(kv_HN2D, Figures())


def run_eagerly(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(f"index_store.{kernels}"), "on_host", lambda _: False)


def check(method: Method, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, kv_HN2D = some_tokens(), some_context()
    if kernels == "eager":
        for rounding in ROUNDING_KERNELS:
            run_eagerly(rounding, monkeypatch)
    expected, _ = run_layer(make_layer(method, kv_HN2D), inputs)
    layer = make_layer(method, kv_HN2D)
    if kernels == "eager":
        for name in KERNELS:
            run_eagerly(name, monkeypatch)
    with torch.device("meta"):
        out, seen = run_layer(layer, inputs)
        samples = [sample_layer(0, each, torch.tensor([0], device="cpu")) for each in seen]
    assert out.device.type == "cpu"
    assert all(sample.mass_HTG.device.type == "cpu" for sample in samples)
    # A key more or less where two are as good as one another.
    close = torch.isclose(out, expected, rtol=1e-3, atol=1e-4).all(-1)
    assert close.float().mean() > 0.97


@crossed(
    {
        "kernels": ["compiled", "eager"],
        "expression": EXPRESSIONS,
    }
)
def test_no_layer_forgets_the_device(expression: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(small(get_method(expression)), kernels, monkeypatch)


@crossed(
    {
        "kernels": ["compiled", "eager"],
        "budget": BUDGETS,
        "preset": ["oracle", "csattention", "multipole-tree", "multipole-windowed"],
    }
)
def test_no_budget_forgets_the_device(
    preset: str, budget: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(replace(small(METHODS[preset]), budget=BUDGETS[budget]), kernels, monkeypatch)
