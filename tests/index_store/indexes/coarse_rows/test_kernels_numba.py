"""The compiled loops over scalar codes equal their eager references, row by row whatever stands beside a row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.attention.rows_in_line_numba import RowsInLine
from index_store.attention.vectors.bytes_numba import instruction_sets, make_block_product
from index_store.attention.vectors.code import LANES
from index_store.indexes.coarse_rows.coded_passes_numba import CodedPass
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.key_scores_numba import score_keys
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.reference import attend_values_reference, score_keys_reference
from index_store.indexes.coarse_rows.scalar_rows import ScalarRows
from index_store.indexes.coarse_rows.value_sums_numba import NEGLIGIBLE, attend_values

HEADS = 2


def coded(count: int, head_dim: int, bits: tuple[int, int], groups: int = 1, first_id: int = 0) -> ScalarRows:
    generator = torch.Generator().manual_seed(count + head_dim)
    spread = torch.rand(HEADS, 1, 2, head_dim, generator=generator) * 3
    kv = torch.randn(HEADS, count, 2, head_dim, generator=generator) * spread + spread
    return code_rows(kv, first_id, *bits, groups)


def queries(rows: int, head_dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(HEADS, rows, head_dim, generator=generator) * head_dim**-0.5


def score(rows: ScalarRows, q_HRD: Tensor, first: int, out_HRX: Tensor) -> None:
    score_keys([CodedPass(rows, first, range(q_HRD.shape[1]))], q_HRD, RowsInLine.of([out_HRX]))


def attend(
    rows: ScalarRows, logits_HRX: Tensor, first: int, elsewhere_HR: Tensor | None = None
) -> AttentionState:
    """Of a copy, since logits become weights."""
    return attend_values(rows, RowsInLine.of([logits_HRX.clone()]), first, elsewhere_HR)


def score_bound(rows: ScalarRows, q_HRD: Tensor) -> Tensor:
    """[H, R, 1]: what rounding queries to 127 units may do to a logit."""
    units = (q_HRD[:, :, None].abs() * rows.key_scales_HBD[:, None].float()).amax(dim=(2, 3)) / 127
    return units[..., None] * (2**rows.key_bits - 1) / 4 * q_HRD.shape[2] + 1e-4


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    ("count", "first", "end", "lead"), [(1, 0, 1, 0), (500, 4, 500, 0), (300, 127, 263, 77), (63, 0, 63, 100)]
)
@pytest.mark.parametrize("row_count", [1, 6, 33])
def test_scores_equal_the_reference(
    bits: int, head_dim: int, count: int, first: int, end: int, lead: int, row_count: int
) -> None:
    rows, q = coded(count, head_dim, (bits, 4), first_id=lead), queries(row_count, head_dim)
    out = torch.full((HEADS, row_count, end - first + 3), torch.nan)
    expected = torch.empty(HEADS, row_count, end - first)
    score(rows, q, first, out[..., 2:-1])
    score_keys_reference(rows, q, first, end, expected)
    assert out[..., [0, 1, -1]].isnan().all()
    error = (out[..., 2:-1] - expected).abs()
    assert (error <= score_bound(rows, q)).all()
    if error.numel() > 100:  # signs of errors differ
        assert error.mean() < 0.4 * head_dim**-0.5 * score_bound(rows, q).mean()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize(("head_dim", "groups"), [(32, 1), (40, 1), (80, 5), (96, 3), (128, 1), (256, 2)])
@pytest.mark.parametrize(("count", "first"), [(1, 0), (2300, 4), (63, 100)])
@pytest.mark.parametrize("row_count", [1, 6, 33])
def test_attention_equals_the_reference(
    bits: int, head_dim: int, groups: int, count: int, first: int, row_count: int
) -> None:
    rows = coded(count + first + 1, head_dim, (4, bits), groups)
    logits = 2 * count**0.5 * queries(row_count, count)
    logits[:, :, 5::7] = -torch.inf
    logits[:, 0] = -torch.inf  # nothing counts
    found, expected = attend(rows, logits, first), attend_values_reference(rows, logits, first)
    assert (found.out[:, 0] == 0).all()
    assert (found.lse[:, 0] == -torch.inf).all()
    torch.testing.assert_close(found.lse, expected.lse, rtol=1e-5, atol=1e-5)
    # A weight is off by half a unit, which is 1/127 of the largest in its tile of 128.
    steps = rows.value_scales_HNV[:, first : first + count].float().amax(dim=(1, 2))[:, None, None]
    shares = torch.exp(logits - expected.lse[..., None]).nan_to_num_(0)
    units = sum(tile.amax(-1, keepdim=True) * tile.shape[-1] for tile in shares.split(128, dim=-1)) / 127
    bound = steps * units * (2**bits - 1) / 4 + 1e-4
    error = (found.out - expected.out).abs()
    assert (error <= bound).all()
    assert error.mean() < 0.15 * bound.mean() + 1e-4


@pytest.mark.parametrize("first", [0, 37])
def test_values_of_next_to_no_weight_are_not_read(first: int) -> None:
    """Row by row; keys that count elsewhere count for what is next to nothing."""
    rows = coded(1000 + first, 64, (4, 4))
    logits = queries(3, 1000)
    begin = BLOCK - first % BLOCK  # of the first whole block
    for number, below in ((0, 9.0), (3, 2.0), (4, 9.0)):
        logits[:, :2, begin + number * BLOCK :][..., :BLOCK] -= below
    poisoned = replace(rows, value_scales_HNV=rows.value_scales_HNV.clone())
    for number in (0, 4):
        poisoned.value_scales_HNV[:, first + begin + number * BLOCK :][:, :BLOCK] = torch.nan
    found = attend(poisoned, logits, first)
    assert found.out[:, :2].isfinite().all()
    assert found.out[:, 2].isnan().all()  # whose attention is flat
    whole, weights = logits.logsumexp(-1, keepdim=True), logits.softmax(-1)
    values = rows.decode_values(first, first + 1000)
    largest = 2 * NEGLIGIBLE * float(values.abs().max())
    assert float((found.out - weights @ values)[:, :2].abs().max()) < largest
    lost = 1 - (found.lse - whole[..., 0]).exp()[:, :2]
    assert float(lost.min()) > 0
    assert float(lost.max()) < NEGLIGIBLE
    beside = attend(rows, logits, first, whole[..., 0] + 20)
    assert (beside.lse == -torch.inf).all()
    assert (beside.out == 0).all()


def test_many_rows_are_attended_in_several_launches() -> None:
    rows = coded(200, 32, (4, 4))
    logits = queries(300, 200)
    torch.testing.assert_close(
        attend(rows, logits, 0).out, attend_values_reference(rows, logits, 0).out, atol=0.02, rtol=0
    )


def test_no_keys_and_no_rows_are_an_empty_state() -> None:
    rows = coded(5, 32, (4, 4))
    score(rows, queries(2, 32), 3, torch.empty(HEADS, 2, 0))
    for shape in ((HEADS, 2, 0), (HEADS, 0, 4)):
        state = attend(rows, torch.empty(shape), 0)
        assert state.out.shape == (*shape[:2], 32)
        assert (state.lse == -torch.inf).all()


def test_rows_of_several_tensors_are_scored_and_attended_as_alone() -> None:
    """Sessions search up to where each of them is, and their logits are columns of what each has."""
    rows, q = coded(2500, 64, (4, 4)), queries(37, 64)
    line = torch.full((HEADS * 37 * 2503,), torch.nan)
    shapes = ((HEADS, 30, 2300), (HEADS, 1, 2496), (HEADS, 6, 64))
    parts, place = [], 5
    for heads, count, columns in shapes:
        whole = line[place : place + heads * count * (columns + 3)].view(heads, count, columns + 3)
        parts.append(whole[..., 2:-1])
        place += whole.numel() + 1
    score_keys([CodedPass(rows, 4, range(37))], q, RowsInLine.of(parts))
    assert int((~line.isnan()).sum()) == sum(part.numel() for part in parts)
    logits = [part.clone() for part in parts]
    state = attend_values(rows, RowsInLine.of(parts), 4)
    first = 0
    for part in logits:
        own = slice(first, first + part.shape[1])
        alone = torch.empty(part.shape)
        score(rows, q[:, own], 4, alone)
        assert torch.equal(alone, part)
        by_itself = attend(rows, alone, 4)
        assert torch.equal(by_itself.out, state.out[:, own])
        assert torch.equal(by_itself.lse, state.lse[:, own])
        first = own.stop


def test_rows_that_no_line_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected rows in one"):
        RowsInLine.of([torch.empty(2, 5, HEADS).transpose(1, 2)])
    with pytest.raises(ValueError, match="2 pieces of memory"):
        RowsInLine.of([torch.empty(HEADS, 2, 5), torch.empty(HEADS, 2, 5)])


@pytest.mark.parametrize("sets", [frozenset(), frozenset({"avx2"}), instruction_sets()])
def test_products_of_bytes_are_exact_with_any_instructions(sets: frozenset[str]) -> None:
    if not sets <= instruction_sets():
        sets = frozenset()  # what this processor lacks cannot run
    block = make_block_product(4, 1, sets)

    @njit
    def run(codes, weights, sums):  # type: ignore[no-untyped-def]
        block(codes, 0, weights, 0, len(codes), sums, 0, 0)

    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (9, LANES, 4), dtype=np.uint8)
    codes[0] = 15
    weights = generator.integers(-127, 128, (4, 9, 4), dtype=np.int8)
    weights[:2, 0] = [[127] * 4, [-127] * 4]
    sums = np.empty((4, LANES), np.int32)
    run(codes.view(np.uint32)[..., 0], weights.reshape(4, -1), sums)
    expected = np.einsum("knb,rkb->rn", codes.astype(np.int32), weights.astype(np.int32))
    assert (sums == expected).all()
