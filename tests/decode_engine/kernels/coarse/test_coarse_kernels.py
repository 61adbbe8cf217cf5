"""Kernels over coarse rows list the keys that the reference lists, and multiply coded values as it does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from decode_engine.kernels.coarse import key_tiles, registers, value_tiles, warp_pass
from decode_engine.kernels.coarse.reference import CoarseSequence
from decode_engine.kernels.coarse.sizes import CoarseConstants, CoarseSizes
from index_store.errors import InvalidArgumentError
from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.scalar_rows import pack
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
from tests.support.warps.warp_interpreter import Language, Numbers
from tests.support.warps.warp_launches import WARP_MODULES, interpreted

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


SIZES = [
    *((tile, 128, bits, 1, 4) for tile in (16, 32, 64) for bits in (2, 3, 4)),
    (32, 64, 4, 2, 8), (32, 128, 4, 2, 4), (32, 128, 2, 2, 16), (32, 128, 3, 1, 16), (16, 256, 4, 2, 4),
    (32, 256, 2, 1, 8),
]  # fmt: skip
"""Keys of a tile, channels, bits, groups of channels, and query heads of a product."""


@pytest.mark.parametrize(("tile", "head_dim", "bits", "groups", "heads"), SIZES)
def test_sums_are_those_of_integers(tile: int, head_dim: int, bits: int, groups: int, heads: int) -> None:
    generator = np.random.default_rng(tile + head_dim + bits)
    codes_TD = generator.integers(0, 2**bits, (tile, head_dim))
    weights_VTC = generator.integers(0, 2**15, (groups, tile, heads))
    evens_VC = generator.standard_normal((groups, heads)).astype(np.float32)
    packed = pack(torch.from_numpy(codes_TD).to(torch.uint8), bits).numpy().view(np.int32)
    rows = max(8, heads)
    with interpreted():
        for module in WARP_MODULES:
            module.gl = Language((0, 0), (1, 1))
        order = key_tiles.key_of(Numbers(np.arange(tile, dtype=np.int32)), tile).array
        words = registers.stored_word(
            Numbers(np.arange(registers.held_words(head_dim, bits), dtype=np.int32)), head_dim, bits
        )
        held = Numbers(np.ascontiguousarray(packed[order][:, words.array]))
        both = np.concatenate([weights_VTC >> 8, weights_VTC & 255], 2).astype(np.uint8)  # [V, T, Y]
        columns = np.ascontiguousarray(both.transpose(0, 2, 1)).reshape(-1, tile).view(np.int32)
        constants = CoarseConstants(1, heads, rows, 1, 2 * heads, head_dim, bits, groups, tile, 0)
        state = value_tiles.no_sums_yet(constants), value_tiles.nothing_pending(constants)
        unit = Numbers(np.float32(0.25))
        for _ in range(2):
            state = value_tiles.add_values(*state, held, Numbers(columns), unit, constants)
        sums = value_tiles.add_pending(*state, unit)
        evens = tuple(Numbers(np.resize(even, rows)) for even in evens_VC)
        planes = value_tiles.values_of(sums, evens, constants)
        places = registers.value_places(head_dim, bits)
        for plane, found in enumerate(planes):
            row = Numbers(np.arange(16, dtype=np.int32))
            channels = registers.channels_of(plane, row, places).array
            group = channels[0] * groups // head_dim
            expected = 2 * 0.25 * (codes_TD[:, channels].T @ weights_VTC[group]) + evens_VC[group]
            np.testing.assert_allclose(found.array[:, :heads], expected, rtol=1e-6)


@pytest.mark.parametrize(("tile", "rows", "together"), [(16, 8, 1), (32, 8, 2), (32, 16, 1), (64, 8, 2)])
def test_small_weights_are_rounded_evenly(tile: int, rows: int, together: int) -> None:
    """As often up as they are parts of one: else what many keys of a flat context weigh together would be lost."""
    with interpreted():
        for module in WARP_MODULES:
            module.gl = Language((0, 0), (1, 1))
        constants = CoarseConstants(1, rows // together, rows, together, 2 * rows, 128, 4, 1, tile, 0)
        found = warp_pass.thresholds(constants).array - np.float32(2**15)
    count = min(tile, 32)
    np.testing.assert_array_equal(np.unique(found), (np.arange(count) + 0.5) / count)
    for weight in (0.1, 0.5, 0.8, 3.3):
        assert abs(np.floor(weight + found).mean() - weight) <= 0.5 / count


def test_weights_have_15_bits_in_a_unit_above_them() -> None:
    """Also one that is just below a power of two, and is rounded up."""
    below = np.nextafter(np.float32(2.0) ** np.arange(-60, 20, dtype=np.float32), np.float32(0))
    numbers = np.concatenate([below, np.float32([0.0, 1e-38, 3.0, 2.5e-7])])
    with interpreted():
        for module in WARP_MODULES:
            module.gl = Language((0, 0), (1, 1))
        units = warp_pass.unit_above(Numbers(numbers)).array
    assert (np.log2(units) % 1 == 0).all()
    weights = numbers / units
    assert weights.max() <= 32766
    assert weights[numbers > 1e-30].min() > 2**14 - 20
