"""The gather kernel equals its eager reference, bit for bit."""

import pytest
import torch

from decode_engine.kernels.gather import gather_rows, gather_rows_reference
from index_store.errors import InvalidArgumentError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 16, 64, 128])
@pytest.mark.parametrize(("tail", "kept"), [(0, 1), (5, 63), (5, 64), (40, 500)])
def test_equals_reference(dtype: torch.dtype, head_dim: int, tail: int, kept: int) -> None:
    generator = torch.Generator().manual_seed(kept)
    context = torch.randn(3, 100, 2, head_dim, generator=generator).to(dtype)
    room = torch.randn(3, 64, 2, head_dim, generator=generator).to(dtype)
    extremes = torch.tensor(
        [0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny]
    )
    smallest = torch.finfo(dtype).smallest_normal / 8  # subnormal
    context.view(3, -1)[:, :7] = torch.cat([extremes, torch.tensor([smallest, -smallest])]).to(dtype)[:7]
    ids = torch.randint(0, 100 + tail, (3, 2, kept), dtype=torch.int32, generator=generator)
    ids[:, :, 0] = 0
    rows = gather_rows(context, room[:, :tail], ids)
    assert rows.dtype == torch.float32
    expected = gather_rows_reference(context, room[:, :tail], ids)
    assert torch.equal(rows.view(torch.int32), expected.view(torch.int32))


def test_no_keys_and_wrong_dtypes() -> None:
    context, tail = torch.zeros(2, 9, 2, 4), torch.zeros(2, 3, 2, 4)
    assert gather_rows(context, tail, torch.zeros(2, 1, 0, dtype=torch.int32)).shape == (2, 1, 0, 2, 4)
    with pytest.raises(InvalidArgumentError, match="float32, float16, bfloat16"):
        gather_rows(context.double(), tail.double(), torch.zeros(2, 1, 1, dtype=torch.int32))
    with pytest.raises(InvalidArgumentError):
        gather_rows(context, tail.bfloat16(), torch.zeros(2, 1, 1, dtype=torch.int32))
