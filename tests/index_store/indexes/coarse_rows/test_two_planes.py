"""Rows in 8 bits: how far they are off, that their high plane is the coarse copy, and compiled loops as references."""

import pytest
import torch

from index_store.indexes.coarse_rows.coding_numba import code_rows
from index_store.indexes.coarse_rows.parameters import BLOCK
from index_store.indexes.coarse_rows.planes_numba import decode_listed, decode_run
from index_store.indexes.coarse_rows.two_planes import (
    TwoPlanes,
    decode_listed_reference,
    decode_run_reference,
    find_low_plane,
)
from tests.index_store.indexes.coarse_rows.test_scalar_rows import random_rows


def planes_of(kv: torch.Tensor, groups: int = 1) -> TwoPlanes:
    coarse = code_rows(kv, 0, 4, 4, groups)
    return TwoPlanes(coarse, find_low_plane(kv, coarse), kv.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decoded_numbers_are_within_a_32nd_of_a_coarse_step(dtype: torch.dtype) -> None:
    kv = random_rows(300, 64, dtype=dtype)
    kv[:, :, :, 3] = 7.0  # exact in float16
    kv[:, :, :, 5] *= 1e-6
    kv[:, 7, :, 9] = 60_000.0  # an outlier
    planes = planes_of(kv, 2)
    keys, values = planes.decode(0, 300).unbind(2)
    steps = planes.coarse.key_scales_HBD.float().repeat_interleave(BLOCK, dim=1)[:, :300]
    assert ((keys - kv[:, :, 0].float()).abs() <= steps * (1.0001 / 32) + 1e-6).all()
    steps = planes.coarse.value_scales_HNV.float().repeat_interleave(32, dim=2)
    # Beside an outlier of 60,000, float32 itself rounds by 1/512.
    assert ((values - kv[:, :, 1].float()).abs() <= steps * (1.01 / 32) + 1e-6).all()
    assert torch.equal(keys[..., 3], kv[:, :, 0, :].float()[..., 3])


def test_the_high_plane_is_the_coarse_copy() -> None:
    """A number lies in the cell of its coarse level, in one of 16 parts that the low plane names in order."""
    kv = random_rows(200, 32)
    planes = planes_of(kv)
    coarse = torch.stack([planes.coarse.decode_keys(0, 200), planes.coarse.decode_values(0, 200)], dim=2)
    steps = torch.stack(
        [
            planes.coarse.key_scales_HBD.float().repeat_interleave(BLOCK, dim=1)[:, :200],
            planes.coarse.value_scales_HNV.float().expand(-1, -1, 32),
        ],
        dim=2,
    )
    parts = ((planes.decode(0, 200) - coarse) / steps + 0.5) * 16
    assert (parts > 0.49).all()
    assert (parts < 15.51).all()
    assert torch.allclose(parts, parts.floor() + 0.5, atol=5e-3)
    # Values' own ends are levels, in the middle of whose cells they lie: all that is between occurs.
    assert parts.floor().unique().tolist() == list(range(16))


@pytest.mark.parametrize(("head_dim", "groups"), [(8, 1), (40, 5), (96, 3), (128, 1)])
@pytest.mark.parametrize("count", [1, 63, 100, 500])
def test_compiled_loops_equal_the_references(head_dim: int, groups: int, count: int) -> None:
    kv = random_rows(count, head_dim, dtype=torch.bfloat16)
    kv[0, :, :, 1] = 7.0
    planes = planes_of(kv, groups)
    coarse, low = planes.coarse, planes.low_HN2C
    whole = decode_run(coarse, low, 0)
    assert torch.equal(whole, decode_run_reference(coarse, low, 0))
    first = count // 3
    assert torch.equal(decode_run(coarse, low[:, first:], first), whole[:, first:])
    ids = torch.randint(0, count, (len(kv), 37), dtype=torch.int32)
    listed = decode_listed(coarse, low, ids)
    assert torch.equal(listed, decode_listed_reference(coarse, low, ids))
    assert torch.equal(listed[1], whole[1, ids[1].long()])


def test_heads_may_be_farther_apart_than_their_rows() -> None:
    kv = random_rows(150, 64)
    planes = planes_of(kv)
    room = torch.full((2, 400, 2, 32), 255, dtype=torch.uint8)
    room[:, :150] = planes.low_HN2C
    apart = TwoPlanes(planes.coarse, room[:, :150], torch.float32)
    assert torch.equal(apart.decode(20, 140), planes.decode(20, 140))
    ids = torch.tensor([[3, 149], [0, 77]], dtype=torch.int32)
    assert torch.equal(apart.pick(ids), planes.pick(ids))
    assert torch.equal(apart.heads(slice(1, 2)).pick(ids[1:]), planes.pick(ids)[1:])
    fetched = planes.low_HN2C[torch.arange(2)[:, None], ids.long()]
    assert torch.equal(planes.refine_listed(ids, fetched), planes.pick(ids))


def test_long_contexts_are_refined_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = random_rows(700, 32)
    whole = planes_of(kv)
    monkeypatch.setattr("index_store.indexes.coarse_rows.scalar_rows._CODED_BYTES", 1)
    assert torch.equal(planes_of(kv).low_HN2C, whole.low_HN2C)
