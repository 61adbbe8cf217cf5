"""Layers with small functions in one launch each, beside the model's own."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from index_store.models.fused.kernels_triton import (
    Gate,
    gated,
    gated_reference,
    rms_norm,
    rms_norm_reference,
    rotate,
    rotate_reference,
)
from index_store.models.fused.layers import fuse_layers

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
DEVICES = [
    pytest.param("cpu", torch.float16),
    pytest.param("cpu", torch.float32),
    *(
        pytest.param(
            "cuda",
            dtype,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        )
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
]
WHOLE = {"norms": 5, "gates": 2, "rotations": 2, "projections": 2}
EXPECTED = {
    "llama": WHOLE,
    "qwen2": WHOLE,  # biases
    "qwen3": {**WHOLE, "norms": 9},  # of heads, too
    "gemma": WHOLE,  # weights that count from one, another gate
    "phi": {**WHOLE, "norms": 0, "gates": 0},  # half of a head is turned
    "phi3": {**WHOLE, "gates": 0, "projections": 0},  # joined already
    "glm": {**WHOLE, "gates": 0, "rotations": 0},  # turned in pairs
    "cohere": {**WHOLE, "norms": 0, "rotations": 0},  # norms with a mean
}


def made(kind: str, dtype: torch.dtype, device: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=dtype)
    model.requires_grad_(False).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.to(device)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(ids).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("kind", EXPECTED)
def test_a_model_says_the_same(kind: str, device: str, dtype: torch.dtype) -> None:
    model = made(kind, dtype, device)
    ids = torch.arange(48, device=device).view(2, 24)
    before, weights = logits(model, ids), copy.deepcopy(model.state_dict())
    assert fuse_layers(model) == EXPECTED[kind]
    scale = float(before.abs().max())
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=scale * 4 * torch.finfo(dtype).eps)
    for name, found in model.state_dict().items():
        assert torch.equal(found, weights[name])
    model.double()  # who gives it other weights gets what they say
    own = made(kind, dtype, device).double()
    torch.testing.assert_close(logits(model, ids), logits(own, ids), rtol=0, atol=scale * 1e-5)


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
def test_kernels_give_what_their_references_give(device: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    near = torch.finfo(dtype).eps
    x, weight = numbers(3, 5, 200)[:, :, ::2], numbers(100)
    for form in itertools.product((False, True), repeat=2):
        wanted = rms_norm_reference(x, weight, 1e-5, *form)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5, *form), wanted, rtol=near, atol=1e-6)
    both = numbers(2, 3, 2 * 1100)
    for kind in Gate:
        wanted = gated_reference(both, kind)
        torch.testing.assert_close(gated(both, kind), wanted, rtol=near * 2, atol=4e-6)
    q, k = numbers(2, 7, 9, 24).transpose(1, 2), numbers(2, 7, 3, 24).transpose(1, 2)
    for rotated in (24, 12):
        cos, sin = numbers(2, 7, rotated), numbers(1, 7, rotated)
        found, expected = rotate(q, k, cos, sin), rotate_reference(q, k, cos, sin)
        for each, own in zip(found, expected, strict=True):
            torch.testing.assert_close(each, own, rtol=near, atol=1e-6)
    assert rms_norm(x[:0], weight, 1e-5, False, True).shape == (0, 5, 100)
    assert gated(both[:0], Gate.SILU).shape == (0, 3, 1100)


class Doubling(nn.Module):
    """Looks like a norm, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 * self.weight


class Unwilling(Doubling):
    """Takes texts of tokens alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 3:
            raise ValueError("expected [B, T, D]")
        return super().forward(x)


class Shifted(modeling_llama.LlamaMLP):  # type: ignore[misc]
    """Looks like a gated layer, and adds something."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1  # type: ignore[no-any-return]


class Projecting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, size, bias=False) for size in (8, 4, 4))


def test_what_only_looks_alike_stays_as_it_is() -> None:
    doubling, shifted = Doubling(), Shifted(AutoConfig.for_model("llama", **SIZES))
    x, y = torch.randn(2, 32), torch.randn(1, 2, 96)
    with torch.no_grad():
        before = doubling(x), shifted(y)
        assert not any(fuse_layers(nn.ModuleList([doubling, Unwilling(), shifted])).values())
        assert torch.equal(doubling(x), before[0])
        assert torch.equal(shifted(y), before[1])


def test_projections_of_other_inputs_and_in_another_order() -> None:
    module = Projecting()
    x, other = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        before = [[part(each) for part in module.children()] for each in (x, other)]
        assert fuse_layers(module)["projections"] == 1
        torch.testing.assert_close(module.v_proj(x), before[0][2])  # before anything was asked for
        torch.testing.assert_close(module.q_proj(x), before[0][0])
        torch.testing.assert_close(module.k_proj(other), before[1][1])
        torch.testing.assert_close(module.v_proj(x), before[0][2])
        torch.testing.assert_close(module.k_proj(x), before[0][1])
        torch.testing.assert_close(module.q_proj(other), before[1][0])
