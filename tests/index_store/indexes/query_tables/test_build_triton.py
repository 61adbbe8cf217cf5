"""Tables built by kernels equal the eager references."""

from __future__ import annotations

import pytest
import torch

from index_store.indexes.query_tables.build_triton import (
    build_device_tables,
    score_tables,
    score_tables_reference,
)
from tests.support.devices import DEVICE, DTYPES, make_kv


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("subspaces", "centroids", "count"), [(8, 16, 130), (16, 5, 33)])
@pytest.mark.parametrize("strided", [True, False])
def test_tables(dtype: torch.dtype, subspaces: int, centroids: int, count: int, strided: bool) -> None:
    keys = make_kv(count, dtype)[:, :, 0]
    order = torch.arange(64)
    dims = order.view(-1, subspaces).t() if strided else order.view(subspaces, -1)
    dims = dims.contiguous().to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.functional.normalize(
        torch.randn(2, subspaces, centroids, 64 // subspaces, generator=generator), dim=-1
    ).to(DEVICE)
    made = made.to(dtype).float()
    scales, scores = score_tables(keys, made, dims)
    expected_scales, expected = score_tables_reference(keys, made, dims)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-4, atol=0.0)
    difference = (scores.int() - expected.int()).abs()
    assert int(difference.max()) <= 1  # where rounding is a matter of the last bit
    assert float(difference.float().mean()) < 0.002


def test_whole_tables_equal_the_hosts_but_for_their_seeds() -> None:
    keys = make_kv(90, torch.float32)[:, :, 0]
    generator = torch.Generator().manual_seed(3)
    sample = torch.randn(2, 60, 64, generator=generator).to(DEVICE)
    dims = torch.arange(64).view(-1, 8).t().contiguous()
    for cosine in (False, True):
        arrays = build_device_tables(keys, sample, dims, centroids=12, iterations=1, seed=0, cosine=cosine)
        assert arrays["scores"].shape == (2, 8, 12, 90)
        slices = keys[..., dims.to(DEVICE)]
        if cosine:
            slices = torch.nn.functional.normalize(slices, dim=-1)
        products = torch.einsum("hnmb,hmcb->hmcn", slices, arrays["centroids"])
        stored = arrays["scores"].float() * arrays["scales"][..., None, None]
        assert float((stored - products).abs().max()) <= 0.51 * float(arrays["scales"].max())
        assert int(arrays["scores"].int().abs().max()) == 127
