"""Scalar codes: packing, how far decoded numbers are off, blocks, and the eager scores and sums over them."""

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import BITS, BLOCK, row_bytes, value_groups
from index_store.indexes.coarse_rows.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows, code_rows_reference, pack, unpack

HEADS = 2


def random_rows(count: int, head_dim: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[H, count, 2, d] with channels of different means and spreads."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(HEADS, 1, 2, head_dim, generator=generator) * 5
    mean = torch.randn(HEADS, 1, 2, head_dim, generator=generator) * 10
    return (torch.randn(HEADS, count, 2, head_dim, generator=generator) * spread + mean).to(dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_packed_codes_come_back(bits: int, head_dim: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, head_dim), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (3, 5, row_bytes(head_dim, bits))
    assert torch.equal(unpack(packed, bits), codes)


def test_the_layout_of_packed_codes() -> None:
    codes = torch.tensor([5, 1, 2, 7, 3, 6, 0, 4], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [5 | 3 << 4, 1 | 6 << 4, 2 | 0 << 4, 7 | 4 << 4]
    two = codes & 3
    low = [int(two[j]) | int(two[j + 2]) << 2 | int(two[j + 4]) << 4 | int(two[j + 6]) << 6 for j in (0, 1)]
    assert pack(two, 2).tolist() == low
    top = sum((int(code) >> 2) << place for place, code in enumerate(codes))
    assert pack(codes, 3).tolist() == [*low, top]


@pytest.mark.parametrize(("bits", "narrowest"), [(4, 2), (2, 4), (3, 8)])
def test_heads_whose_codes_fill_no_bytes_are_refused(bits: int, narrowest: int) -> None:
    assert row_bytes(narrowest, bits) == narrowest * bits // 8
    with pytest.raises(InvalidArgumentError, match=f"multiple of {narrowest}"):
        row_bytes(narrowest // 2, bits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", BITS)
def test_decoded_numbers_are_within_half_a_step(bits: int, dtype: torch.dtype) -> None:
    kv = random_rows(300, 64, dtype=dtype)
    kv[:, :, :, 3] = 7.0  # exact in float16
    kv[:, :, :, 5] *= 1e-6
    kv[:, 7, :, 9] = 60_000.0  # an outlier
    rows = code_rows(kv, 0, bits, bits, 2)
    keys, values = kv.float().unbind(2)
    steps = rows.key_scales_HBD.float().repeat_interleave(BLOCK, dim=1)[:, :300]
    assert ((rows.decode_keys(0, 300) - keys).abs() <= steps * 0.5001 + 1e-6).all()
    steps = rows.value_scales_HNV.float().repeat_interleave(32, dim=2)
    assert ((rows.decode_values(0, 300) - values).abs() <= steps * 0.5001 + 1e-6).all()
    assert torch.equal(rows.decode_keys(0, 300)[..., 3], keys[..., 3])


@pytest.mark.parametrize("bits", BITS)
def test_steps_are_as_fine_as_the_range_allows(bits: int) -> None:
    kv = random_rows(256, 64)
    rows = code_rows(kv, 0, bits, bits, 1)
    blocks = kv[:, :, 0].view(HEADS, 2, BLOCK, 64)
    wanted = (blocks.amax(2) - blocks.amin(2)) / (2**bits - 1)
    # An offset below 64 is rounded by up to 2^-6, which the steps have to make up for, twice.
    assert (rows.key_scales_HBD.float() <= wanted * 1.002 + 2**-5).all()


@pytest.mark.parametrize("code", [code_rows, code_rows_reference])
def test_numbers_that_float16_cannot_hold_are_refused(code: Callable[..., ScalarRows]) -> None:
    for bad in (70_000.0, float("inf"), float("nan")):
        for place in (0, 1):
            kv = random_rows(3, 16)
            kv[1, 2, place, 3] = bad
            with pytest.raises(InvalidArgumentError, match="float16"):
                code(kv, 0, 4, 4, 1)


@pytest.mark.parametrize("bits", [(4, 4), (3, 2), (2, 3)])
@pytest.mark.parametrize(("head_dim", "groups"), [(8, 1), (40, 5), (96, 3), (128, 1)])
@pytest.mark.parametrize(("count", "first_id"), [(1, 127), (63, 100), (500, 0), (300, 77)])
def test_compiled_codes_equal_the_reference(
    bits: tuple[int, int], head_dim: int, groups: int, count: int, first_id: int
) -> None:
    kv = random_rows(count, head_dim, dtype=torch.bfloat16)
    kv[:, ::3] = kv[:, :1].clone()  # ties
    kv[0, :, :, 1] = 7.0  # no range
    kv[:, :, :, 2] = 0.0
    if count > 5:
        kv[:, 5] = -3.0
    found = code_rows(kv, first_id, *bits, groups)
    expected = code_rows_reference(kv, first_id, *bits, groups)
    for field in fields(ScalarRows):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("first_id", [0, 100, 128, 333])
def test_blocks_lie_at_multiples_of_128_positions(first_id: int) -> None:
    """Rows are coded as if their blocks were coded one by one."""
    kv = random_rows(500, 32)
    rows = code_rows(kv, first_id, 4, 3, 1)
    assert rows.key_scales_HBD.shape[1] == (first_id + 499) // BLOCK - first_id // BLOCK + 1
    first = 0
    while first < 500:
        end = min(500, (first_id + first) // BLOCK * BLOCK + BLOCK - first_id)
        alone = code_rows(kv[:, first:end], first_id + first, 4, 3, 1)
        assert alone.key_scales_HBD.shape[1] == 1
        assert torch.equal(alone.decode_keys(0, end - first), rows.decode_keys(first, end))
        assert torch.equal(alone.decode_values(0, end - first), rows.decode_values(first, end))
        first = end


def test_long_contexts_are_coded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_rows(700, 32)
    whole = code_rows(kv, 50, 4, 4, 1)
    monkeypatch.setattr("index_store.indexes.coarse_rows.scalar_rows._CODED_BYTES", 1)
    parts = code_rows(kv, 50, 4, 4, 1)
    assert torch.equal(whole.decode_keys(0, 700), parts.decode_keys(0, 700))
    assert torch.equal(whole.decode_values(0, 700), parts.decode_values(0, 700))


def test_value_groups_are_few_and_even() -> None:
    assert [value_groups(dim, 128) for dim in (64, 128, 160, 192, 256)] == [1, 1, 2, 2, 2]
    assert value_groups(96, 64) == 2
    assert value_groups(80, 64) == 2


@pytest.mark.parametrize("first_id", [0, 77])
def test_eager_scores_and_sums_are_those_of_decoded_rows(
    first_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = code_rows(random_rows(301, 40), first_id, 4, 2, 5)
    queries = torch.randn(HEADS, 3, 40, generator=torch.Generator().manual_seed(1)) / 40**0.5
    monkeypatch.setattr("index_store.indexes.coarse_rows.reference._TILE_BYTES", 4 * 40 * HEADS * 50)
    logits = torch.full((HEADS, 3, 200), torch.nan)
    score_keys_reference(rows, queries, 60, 260, logits)
    torch.testing.assert_close(logits, queries @ rows.decode_keys(60, 260).transpose(1, 2))
    logits[:, 1, 20:] = -torch.inf
    logits[:, 2] = -torch.inf
    state = attend_values_reference(rows, logits, 60)
    values = rows.decode_values(60, 260)
    weights = logits.softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(state.out, weights @ values)
    torch.testing.assert_close(state.lse, logits.logsumexp(-1))


def test_some_heads_alone_and_no_rows_at_all() -> None:
    rows: ScalarRows = code_rows(random_rows(130, 16), 0, 3, 4, 1)
    assert torch.equal(rows.heads(slice(1, 2)).decode_keys(0, 130), rows.decode_keys(0, 130)[1:])
    state = attend_values_reference(rows, torch.empty(HEADS, 3, 0), 130)
    assert torch.equal(state.out, torch.zeros(HEADS, 3, 16))
    assert torch.isneginf(state.lse).all()
