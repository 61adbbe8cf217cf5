"""What families of kernels take, and weights in bytes."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from decode_engine.kernels import families
from decode_engine.kernels.families import Family
from decode_engine.kernels.weight_bytes import of_byte, rounded_reference, to_byte

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = {name: each for name, each in vars(families).items() if isinstance(each, Family)}
LISTED = re.compile(r"\(64, 128\b")


def test_head_dimensions_stand_in_the_table_alone() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("kernels", "steps", "host_search")
        for path in (ROOT / "decode_engine" / folder).rglob("*.py")
        if LISTED.search(path.read_text())
    }
    assert found == {"decode_engine/kernels/families.py"}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_lies_at_a_bound_is_taken_and_what_lies_beyond_it_is_refused(name: str) -> None:
    family = FAMILIES[name]
    keys = family.keys or (1, 1)
    for head_dim, group, count in product(family.head_dims, (1, family.max_group), keys):
        assert family.refusal(group, head_dim, count) is None
    beyond = [(0, 64, keys[0]), (family.max_group + 1, 64, keys[0]), (1, 96, keys[0])]
    beyond += [(1, 64, keys[0] - 1), (1, 64, keys[1] + 1)] if family.keys else []
    for group, head_dim, count in beyond:
        words = str(family.refusal(group, head_dim, count))
        assert f"group {group}, head dimension {head_dim}" in words
        assert f"{family.takes} groups of 1 to {family.max_group} and dimensions 64" in words
        assert (f"{count} keys; " in words) == bool(family.keys)
    if family.parts:
        (word, (least, _)), (of_word, (_, of_most)) = family.parts.items()
        assert family.refusal(1, 64, keys[0], (least, of_most)) is None
        for parts in ((least - 1, of_most), (least, of_most + 1), (24, of_most)):
            words = str(family.refusal(1, 64, keys[0], parts))
            assert f"{parts[0]} {word} of {parts[1]} {of_word} for head dimension 64; {family.takes}" in words


@pytest.mark.parametrize("bits", [(4, 4), (4, 2), (2, 2), (3, 3), (4, 3)])
def test_coarse_rows_have_bits_and_groups(bits: tuple[int, int]) -> None:
    """What kernels of one warp have room for in registers."""
    for head_dim, group, groups in product((64, 128, 256), (1, 8, 9, 16), (1, 2, 4)):
        refused = str(families.coarse_refusal(group, head_dim, bits, groups, 1000))
        expected = "None"
        if head_dim == 256 and group > 8:
            expected = (
                f"group {group}, head dimension 256; the kernels over coarse rows take groups of 1 to 8"
            )
        elif head_dim == 64 and bits != (4, 4):
            expected = f"codes of {bits[0]} bits a channel of keys and {bits[1]} of values, head dimension 64"
        elif groups == 4:
            expected = "4 groups of channels in a value; the kernels over coarse rows take 1 to 2"
        assert refused.startswith(expected)


def test_coarse_rows_refuse_what_their_family_refuses() -> None:
    for arguments, words in (
        ((17, 128, (4, 4), 1, 1000), "group 17"),
        ((4, 80, (4, 4), 1, 1000), "head dimension 80"),
        ((4, 128, (4, 4), 1, 2**22), "4194304 keys"),
        ((4, 128, (4, 5), 1, 1000), "codes of 4 bits a channel of keys and 5 of values"),
    ):
        assert words in str(families.coarse_refusal(*arguments))


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
