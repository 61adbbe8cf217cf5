"""The kernel that pools a group's weights equals its eager reference."""

from __future__ import annotations

import pytest
import torch

from index_store.attention.pooled_weights_numba import pooled_weights, pooled_weights_reference


@pytest.mark.parametrize("count", [1, 63, 1024, 20_000])
@pytest.mark.parametrize(("positions", "group"), [(1, 2), (3, 4)])
def test_it_equals_the_reference(count: int, positions: int, group: int) -> None:
    """Also of logits that are missing, of heads without any, and of weights too small for a float."""
    generator = torch.Generator().manual_seed(count)
    logits = 30 * torch.randn(2, positions, group, count, generator=generator)
    logits[:, :, 0, ::3] = -torch.inf
    logits[:, :, :, ::6] = -torch.inf
    logits[1, 0, 1] = -torch.inf
    logits[:, :, :, 1::6] -= 500
    found, expected = pooled_weights(logits), pooled_weights_reference(logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-30)
    assert torch.equal(found.isneginf(), torch.isneginf(logits).all(2))


def test_no_keys_have_no_weights() -> None:
    assert pooled_weights(torch.empty(2, 1, 3, 0)).shape == (2, 1, 0)
