"""Kernels over coarse copies equal their eager references, on a CUDA device or in an interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.coarse.reference import CoarseSequence
from decode_engine.kernels.coarse.sizes import CoarseSizes
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.coding_numba import code_rows
from tests.decode_engine.kernels.problems.coarse_problems import (
    SMALL,
    Searched,
    assert_equals_reference,
    listed_keys,
    make_queries,
    make_sequence,
    make_sizes,
)
from tests.support.devices import DEVICE

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else pytest.mark.usefixtures("few_programs")
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

# keys, first, end, keep
SHORT, LONG, LATE = (63, 3, 60, 9), (300, 4, 270, 30), (400, 200, 400, 30)
SAMPLED = (1900, 8, 1890, 150)
"""More keys than a sample takes."""
ALL_KEPT, MORE_THAN_ALL, NONE_KEPT, NONE_SEARCHED = (
    (100, 0, 100, 100),
    (130, 7, 120, 5000),
    (100, 7, 90, 0),
    (70, 10, 10, 5),
)


@pytest.mark.parametrize(
    ("group", "head_dim", "bits", "value_groups", "apart", "dtype", "sizes"),
    [
        (4, 128, (4, 4), 1, False, DTYPE, [LONG, None]),
        (4, 64, (4, 4), 2, True, DTYPE, [LATE]),
        (3, 64, (4, 4), 1, True, torch.float16, [SHORT, LATE]),
        (5, 128, (2, 3), 1, False, torch.float16, [LONG]),
        (8, 256, (4, 3), 2, False, DTYPE, [LATE]),
        (2, 128, (3, 4), 1, True, DTYPE, [SAMPLED]),
        (2, 64, (4, 4), 1, False, DTYPE, [ALL_KEPT, NONE_SEARCHED]),
        (2, 64, (4, 4), 1, True, DTYPE, [NONE_KEPT, MORE_THAN_ALL]),
    ],
)
def test_kernels_find_what_the_references_find(
    group: int,
    head_dim: int,
    bits: tuple[int, int],
    value_groups: int,
    apart: bool,
    dtype: torch.dtype,
    sizes: list[tuple[int, int, int, int] | None],
) -> None:
    kv_heads, keys = 2 if None in sizes else 1, max(each[0] for each in sizes if each)
    coarse = make_sizes(group, head_dim, *bits, value_groups, max_keys=keys, kv_heads=kv_heads)
    sequences = [None if size is None else make_sequence(coarse, *size) for size in sizes]
    assert_equals_reference(coarse, dtype, sequences, apart=apart, tolerance=2e-2)


def test_keys_far_from_zero_cost_no_digits() -> None:
    """Offsets never meet codes, and what rounding leaves over is no error that all keys share."""
    sizes = make_sizes(2, 128)
    sequence = make_sequence(sizes, 150, 0, 150, 0, offset=100.0)
    assert_equals_reference(sizes, torch.float16, [sequence], apart=False, tolerance=2e-2)


def test_as_many_tied_keys_are_listed_as_others() -> None:
    sizes = make_sizes(2, 64)
    kv = torch.randn(sizes.kv_heads, 1, 2, 64, generator=torch.Generator().manual_seed(1))
    rows = code_rows(kv.expand(-1, 300, -1, -1).to(DEVICE), 0, 4, 4, 1)
    found = Searched(sizes, make_queries(sizes, DTYPE, 1), [CoarseSequence(rows, 0, 300, 40)], apart=False)
    for row in range(sizes.kv_heads):
        assert len(listed_keys(found.lists, row)) == pytest.approx(40, abs=4)


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    sizes = make_sizes(4, 64, kv_heads=2)
    sequences = [make_sequence(sizes, *size) for size in (SHORT, LONG)]
    q = make_queries(sizes, DTYPE, 2)
    together = Searched(sizes, q, sequences, apart=False)
    for b, sequence in enumerate(sequences):
        alone = Searched(sizes, q[b : b + 1].contiguous(), [sequence], apart=False)
        for h in range(sizes.kv_heads):
            assert listed_keys(alone.lists, h) == listed_keys(together.lists, sizes.kv_heads * b + h)


def test_how_work_is_cut_changes_no_list() -> None:
    """Nor, but for rounding, what the others add up to."""
    sizes = make_sizes(4, 64, max_keys=1024)
    q, sequence = make_queries(sizes, DTYPE, 1), make_sequence(sizes, *LONG)
    found = [
        Searched(replace(sizes, shape=replace(SMALL, programs=programs)), q, [sequence], apart=programs == 2)
        for programs in (1, 2)
    ]
    assert [each.lists.counts_RP.shape[1] for each in found] == [4, 8]
    for row in range(sizes.kv_heads):
        assert listed_keys(found[0].lists, row) == listed_keys(found[1].lists, row)
    torch.testing.assert_close(found[0].out_RGD, found[1].out_RGD, rtol=1e-3, atol=1e-3)


def test_sizes_that_kernels_cannot_do_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="group 17"):
        CoarseSizes(2, 17, 128, 4, 4, 1, 1000)
    with pytest.raises(InvalidArgumentError, match="codes of 2 bits a channel of keys and 2 of values"):
        make_sizes(4, 64, 2, 2)
