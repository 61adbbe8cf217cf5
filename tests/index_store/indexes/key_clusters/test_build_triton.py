"""Clusters built by kernels equal the eager references and the arrays that the host builds."""

from __future__ import annotations

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.build_triton import (
    build_device_clusters,
    covary_members,
    covary_members_reference,
    list_device_members,
    measure_members,
    measure_members_reference,
)
from tests.support.devices import DEVICE, DTYPES, make_kv


def test_members_are_those_of_the_host() -> None:
    from index_store.indexes.key_clusters.build import list_members

    generator = torch.Generator().manual_seed(0)
    assignment = torch.randint(-1, 12, (3, 200), generator=generator).to(torch.int32)
    found = list_device_members(assignment.to(DEVICE), 13)
    for one, other in zip(found, list_members(assignment, 13), strict=True):
        assert torch.equal(one.cpu(), other)
        assert one.dtype == torch.int32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spread", "clusters"), [(True, 9), (False, 9), (True, 2)])
def test_moments(dtype: torch.dtype, spread: bool, clusters: int) -> None:
    """Of a few members, and of more than three tiles of them."""
    kv = make_kv(120, dtype)
    kv[:, :, 0] += 3.0  # means away from zero
    assignment = torch.randint(-1, clusters, (2, 120), generator=torch.Generator().manual_seed(0))
    lists = list_device_members(assignment.to(DEVICE, torch.int32), 10)
    found = measure_members(kv[:, :, 0], kv[:, :, 1], *lists, spread)
    expected = measure_members_reference(kv[:, :, 0], kv[:, :, 1], *lists, spread)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        torch.testing.assert_close(found[name], array, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 40])
def test_covariances(head_dim: int) -> None:
    kv = make_kv(120, torch.float16, head_dim)
    assignment = torch.randint(-1, 9, (2, 120), generator=torch.Generator().manual_seed(0))
    lists = list_device_members(assignment.to(DEVICE, torch.int32), 10)
    moments = measure_members(kv[:, :, 0], kv[:, :, 1], *lists, spread=False)
    found = covary_members(kv[:, :, 0], kv[:, :, 1], *lists, moments)
    cpu = [tensor.cpu() for tensor in (kv[:, :, 0], kv[:, :, 1], *lists)]
    expected = covary_members_reference(*cpu, {name: array.cpu() for name, array in moments.items()})
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-3)


def test_built_clusters_are_whole() -> None:
    kv = make_kv(290, torch.float32)
    blocks = divide_keys(290, 8, 128, 4)
    arrays = build_device_clusters(kv, blocks, metric="euclidean", iterations=3, moments="diagonal", seed=0)
    assert (arrays["counts"].sum(1) == 286).all()
    members = arrays["members"][:, :286].sort(dim=1).values
    assert torch.equal(members.cpu(), torch.arange(4, 290, dtype=torch.int32).expand(2, -1))
    sums = arrays["value_sums"].sum(1)
    torch.testing.assert_close(sums, kv[:, 4:, 1].sum(1), rtol=1e-4, atol=1e-4)
    for first, end, begin, stop in blocks:
        inside = arrays["assignment"][:, first:end]
        assert int(inside.min()) >= begin
        assert int(inside.max()) < stop
    for bad in ({"moments": "some"}, {"metric": "manhattan"}, {"iterations": 0}):
        options = {"metric": "cosine", "iterations": 1, "moments": "none", "seed": 0, **bad}
        with pytest.raises(InvalidArgumentError):
            build_device_clusters(kv, blocks, **options)  # type: ignore[arg-type]
