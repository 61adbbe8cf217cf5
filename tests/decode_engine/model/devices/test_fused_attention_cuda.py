"""Prompts on a GPU: the fused kernel's states equal those of plain float32 arithmetic."""

from __future__ import annotations

import pytest
import torch

from decode_engine.layers.partial_attention import attend_shared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("keys", "positions", "group", "dim"),
    [(700, 40, 4, 128), (9, 9, 1, 64), (33, 8, 8, 64), (20_000, 1600, 4, 128)],
)
def test_fused_states_equal_plain_ones(causal: bool, keys: int, positions: int, group: int, dim: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    made = torch.randn(2, positions, group, dim, generator=generator, device="cuda").bfloat16()
    q_HTGD = made.float() * dim**-0.5
    kv_HN2D = torch.randn(2, keys, 2, dim, generator=generator, device="cuda").bfloat16()
    fused = attend_shared(q_HTGD, kv_HN2D, causal=causal)
    plain = attend_shared(q_HTGD, kv_HN2D.float(), causal=causal)
    torch.testing.assert_close(fused.out, plain.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(fused.lse, plain.lse, atol=1e-2, rtol=1e-2)
