"""Kernels over coarse copies equal their eager references.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels.coarse.coded_tiles import TO_BFLOAT16
from decode_engine.kernels.coarse.reference import CoarseSequence, attend_others_reference
from decode_engine.kernels.coarse.sizes import CoarseShape, CoarseSizes
from decode_engine.kernels.families import coarse_refusal
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.product_rows import ProductRows
from index_store.indexes.coarse_rows.scalars.coding_numba import code_rows
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

pytestmark = pytest.mark.gpu if DEVICE == "cuda" else []
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

# keys, first, end, keep
SHORT, LONG, LATE = (63, 3, 60, 9), (300, 4, 270, 30), (400, 200, 400, 30)
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
        (1, 64, (2, 3), 1, False, DTYPE, [LONG]),
        (3, 64, (3, 2), 4, True, torch.float16, [SHORT, LATE]),
        (8, 128, (3, 3), 1, True, DTYPE, [LONG]),
        (5, 128, (2, 2), 1, False, torch.float16, [LONG]),
        (16, 256, (4, 3), 2, False, DTYPE, [LATE]),
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
    coarse = make_sizes(group, head_dim, *bits, value_groups, kv_heads=2 if None in sizes else 1)
    sequences = [None if size is None else make_sequence(coarse, *size) for size in sizes]
    assert_equals_reference(
        coarse, dtype, sequences, apart=apart, tolerance=2e-2 if dtype != torch.float32 else 1e-4
    )


@pytest.mark.parametrize(
    ("group", "head_dim", "bits", "apart", "dtype", "sizes"),
    [
        (4, 128, (2, 2), False, torch.bfloat16, [LONG, None, SHORT]),
        (1, 64, (2, 2), True, torch.float32, [LATE]),
        (8, 64, (4, 4), False, torch.float16, [LONG]),
        (16, 128, (2, 4), True, torch.bfloat16, [LATE]),
        (3, 256, (4, 2), False, torch.bfloat16, [LONG]),
        (16, 256, (2, 2), False, torch.float32, [SHORT]),
        (4, 128, (4, 4), False, torch.float32, [ALL_KEPT, NONE_SEARCHED]),
        (2, 64, (2, 4), True, torch.float16, [NONE_KEPT, MORE_THAN_ALL]),
    ],
)
def test_product_codes_are_taken_as_they_are(
    group: int,
    head_dim: int,
    bits: tuple[int, int],
    apart: bool,
    dtype: torch.dtype,
    sizes: list[tuple[int, int, int, int] | None],
) -> None:
    """Neither codewords nor queries are rounded, and weights to 11 bits: errors are smaller than scalar codes'."""
    coarse = make_sizes(group, head_dim, *bits, kv_heads=2 if None in sizes else 1, product=True)
    sequences = [None if size is None else make_sequence(coarse, *size) for size in sizes]
    assert_equals_reference(
        coarse, dtype, sequences, apart=apart, tolerance=1e-4 if dtype == torch.float32 else 5e-4
    )


@pytest.mark.parametrize(("of_queries", "of_codewords"), [(2.0**17, 2.0**-14), (2.0**-30, 2.0**12)])
def test_queries_beyond_float16_meet_product_codes(of_queries: float, of_codewords: float) -> None:
    """They are multiplied in units of their own."""
    sizes = make_sizes(3, 64, 2, 4, product=True)
    sequence = make_sequence(sizes, *SHORT)
    assert isinstance(sequence.rows, ProductRows)
    books = sequence.rows.key_codebooks_HSWw * of_codewords
    sequence = replace(sequence, rows=replace(sequence.rows, key_codebooks_HSWw=books))
    q = make_queries(sizes, torch.bfloat16, 1) * of_queries
    found = Searched(sizes, q, [sequence], apart=False)
    expected = attend_others_reference(q, [sequence], found.lists)
    torch.testing.assert_close(found.out_RGD, expected.out, rtol=5e-4, atol=5e-4)
    torch.testing.assert_close(found.lse_RG, expected.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("product", [False, True])
def test_keys_far_from_zero_cost_no_digits(product: bool) -> None:
    """Offsets never meet codes, and what rounding leaves over is no error that all keys share."""
    sizes = make_sizes(2, 128, product=product)
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
    sizes = make_sizes(4, 64)
    q, sequence = make_queries(sizes, DTYPE, 1), make_sequence(sizes, *LONG)
    found = [
        Searched(replace(sizes, shape=replace(SMALL, programs=programs)), q, [sequence], apart=programs == 2)
        for programs in (1, 2)
    ]
    assert [each.lists.counts_RP.shape[1] for each in found] == [1, 2]
    for row in range(sizes.kv_heads):
        assert listed_keys(found[0].lists, row) == listed_keys(found[1].lists, row)
    torch.testing.assert_close(found[0].out_RGD, found[1].out_RGD, rtol=1e-4, atol=1e-4)


def test_sizes_that_kernels_cannot_do_are_refused() -> None:
    assert coarse_refusal(4, 128, (4, 4), 2, 1000) is None
    for arguments, words in (
        ((17, 128, (4, 4), 1, 1000), "group 17"),
        ((4, 80, (4, 4), 1, 1000), "head dimension 80"),
        ((4, 128, (4, 4), 1, 2**22), "4194304 keys"),
        ((4, 128, (4, 4), 4, 1000), "4 groups of channels in a value of 4 bits"),
    ):
        assert words in str(coarse_refusal(*arguments))
    with pytest.raises(InvalidArgumentError, match="group 17"):
        CoarseSizes(2, 17, 128, 4, 4, 1, 1000)
    with pytest.raises(
        InvalidArgumentError, match="product codes of 3 bits a channel of keys and 2 of values"
    ):
        make_sizes(4, 128, 3, 2, product=True)


def test_product_codes_have_no_kernels_of_one_warp() -> None:
    registers = replace(SMALL, registers=True, samplers=8)
    for product in (False, True):
        assert make_sizes(4, 128, 2, 2, shape=registers, product=product).in_registers != product


@pytest.mark.parametrize(("bits", "shift", "word"), list(TO_BFLOAT16))
def test_codes_become_numbers_by_a_few_instructions(bits: int, shift: int, word: int) -> None:
    """The instructions are run here one by one, over all bytes; what a compiler makes of them runs on a card."""
    words = torch.randint(-(2**31), 2**31, (500,), generator=torch.Generator().manual_seed(word))
    registers = {"$1" if word == 16 else "$2": words & 0xFFFFFFFF}
    body = re.sub(r"[{}]|\.reg \.b32 t;", "", TO_BFLOAT16[bits, shift, word])
    for line in filter(None, map(str.strip, body.split(";"))):
        name, target, *operands = line.replace(",", "").split()
        registers[target] = INSTRUCTIONS[name](*(registers.get(each, each) for each in operands))
    found = torch.stack([registers[f"${number}"] for number in range(16 // word)], 1)
    numbers = torch.stack([found & 0xFFFF, found >> 16], 2).flatten(1).to(torch.int32)
    values = (numbers << 16).view(torch.float32)
    codes = torch.stack([(words >> (place + shift)) & ((1 << bits) - 1) for place in range(0, 32, word)], 1)
    assert torch.equal(values, 16.0 + codes.float())


def _permute(a: Tensor, b: str, selected: str) -> Tensor:
    """Bytes of a, 0 to 3, and of b, 4 to 7, chosen by hexadecimal digits from the last one on."""
    both = [(a >> (8 * byte)) & 255 for byte in range(4)] + [
        int(b, 16) >> (8 * byte) & 255 for byte in range(4)
    ]
    chosen = [both[int(digit, 16)] << (8 * byte) for byte, digit in enumerate(reversed(selected[2:]))]
    return torch.as_tensor(sum(chosen))


INSTRUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "shl.b32": lambda a, by: (a << int(by)) & 0xFFFFFFFF,
    "shr.b32": lambda a, by: a >> int(by),
    "lop3.b32": lambda a, mask, other, _and_or: (a & int(mask, 16)) | int(other, 16),
    "prmt.b32": _permute,
}


def test_samples_have_room_for_as_many_keys_as_they_say() -> None:
    assert CoarseShape(samplers=4, runs=2).sampled == 128
