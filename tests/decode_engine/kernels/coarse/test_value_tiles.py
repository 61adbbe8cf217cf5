"""Products of weights with coded values, as tensor cores take bytes: what lies where, and how weights are rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decode_engine.kernels.coarse import key_tiles, registers, value_tiles, warp_pass
from index_store.indexes.coarse_rows.scalars.packing import pack
from tests.support.warps.warp_interpreter import Language
from tests.support.warps.warp_launches import WARP_MODULES, interpreted
from tests.support.warps.warp_numbers import Numbers

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
        state = (
            value_tiles.no_sums_yet(2 * heads, head_dim),
            value_tiles.nothing_pending(2 * heads, head_dim),
        )
        unit = Numbers(np.float32(0.25))
        for _ in range(2):
            state = value_tiles.add_values(
                *state, held, Numbers(columns), unit, tile, head_dim, bits, groups, 2 * heads
            )
        sums = value_tiles.add_pending(*state, unit)
        evens = tuple(Numbers(np.resize(even, rows)) for even in evens_VC)
        planes = value_tiles.values_of(sums, evens, rows, 2 * heads, head_dim, bits)
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
        found = warp_pass.thresholds(tile, rows, together).array - np.float32(2**15)
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
