"""A weight in a byte, or in two, is read back as its eager form says, from each place of a word."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from decode_engine.kernels.weight_bytes import (
    of_byte,
    of_half,
    rounded_half_reference,
    rounded_reference,
    to_byte,
    to_half,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def there_and_back_kernel(
    weights_ptr: tl.tensor, found_ptr: tl.tensor, count: tl.tensor, TILE: tl.constexpr
) -> None:
    """Row i of found: the weights through byte i of a word."""
    n = tl.arange(0, TILE)
    byte = to_byte(tl.load(weights_ptr + n, mask=n < count, other=0.0))
    word = byte | (byte << 8) | (byte << 16) | (byte << 24)
    for index in tl.static_range(4):
        tl.store(found_ptr + index * count + n, of_byte(word, index), mask=n < count)


def test_weights_there_and_back() -> None:
    torch.manual_seed(0)
    edges = torch.tensor([0.0, 1.0, 2.0**-31, 2.0**-40, 1.0 - 2.0**-24])
    weights = torch.cat([edges, torch.rand(95).mul(-34.0).exp2()]).to(DEVICE)
    found = torch.full((4, len(weights)), torch.nan, device=DEVICE)
    there_and_back_kernel[(1,)](weights, found, len(weights), TILE=128)
    rounded = rounded_reference(weights)
    assert torch.equal(found, rounded.expand(4, -1))
    large = weights > 2.0**-30
    assert float(((rounded - weights).abs() / weights)[large].max()) <= 1 / 16
    assert float((rounded - weights).abs().max()) <= 1 / 16


@triton.jit
def half_kernel(weights_ptr: tl.tensor, found_ptr: tl.tensor, count: tl.tensor, TILE: tl.constexpr) -> None:
    """Row i of found: the weights through half i of a word."""
    n = tl.arange(0, TILE)
    half = to_half(tl.load(weights_ptr + n, mask=n < count, other=0.0))
    for index in tl.static_range(2):
        tl.store(found_ptr + index * count + n, of_half(half | (half << 16), index), mask=n < count)


def test_weights_in_16_bits_there_and_back() -> None:
    torch.manual_seed(0)
    edges = torch.tensor([0.0, 1.0, 2.0**-31, 2.0**-40, 1.0 - 2.0**-24])
    weights = torch.cat([edges, torch.rand(95).mul(-34.0).exp2()]).to(DEVICE)
    found = torch.full((2, len(weights)), torch.nan, device=DEVICE)
    half_kernel[(1,)](weights, found, len(weights), TILE=128)
    rounded = rounded_half_reference(weights)
    assert torch.equal(found, rounded.expand(2, -1))
    large = weights > 2.0**-30
    assert float(((rounded - weights).abs() / weights)[large].max()) <= 2.0**-12
