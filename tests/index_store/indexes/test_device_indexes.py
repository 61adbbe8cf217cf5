"""Whole indexes built by kernels: their arrays fit together, and they are as good as those that the host builds.

Without a CUDA device the kernels run in Triton's interpreter, over few keys.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.interface.layer_index import LayerSource, subspace_dims
from index_store.indexes.key_clusters.build import (
    build_clusters,
    build_clusters_on_device,
    build_tree,
    undo_rotary,
)
from index_store.indexes.key_clusters.parameters import ClusterParameters, TreeParameters
from index_store.indexes.query_tables.build import build_tables, build_tables_on_device
from index_store.indexes.query_tables.parameters import TableParameters
from index_store.methods.method import INDEX_SPECS
from index_store.store.stored_context import QuerySample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_source(
    count: int, dtype: torch.dtype = torch.float32, head_dim: int = 32, device: str = DEVICE
) -> LayerSource:
    """Keys around a few directions, queries that look for them, values without order."""
    generator = torch.Generator().manual_seed(count)
    centres = torch.randn(2, 40, head_dim, generator=generator)
    places = torch.randint(0, 40, (2, count), generator=generator)
    keys = centres.gather(1, places[..., None].expand(-1, -1, head_dim))
    keys = keys + 0.5 * torch.randn(2, count, head_dim, generator=generator)
    values = torch.randn(2, count, head_dim, generator=generator)
    rows = min(count, 200)
    queries = centres[:, torch.randint(0, 40, (rows * 2,), generator=generator)].view(2, rows, 2, head_dim)
    queries = queries + torch.randn(queries.shape, generator=generator)
    frequencies = 100.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    kv = torch.stack([keys, values], dim=2).to(device, dtype)
    sample = QuerySample(queries.to(device), torch.linspace(0, count - 1, rows).long())
    return LayerSource(kv, sample, frequencies)


def on_host(source: LayerSource) -> LayerSource:
    queries = QuerySample(source.queries.queries_HPGD.cpu(), source.queries.positions_P)
    return LayerSource(source.kv_HN2D.cpu(), queries, source.inverse_frequencies)


def shapes(arrays: dict[str, Tensor]) -> list[tuple[str, torch.Size, torch.dtype]]:
    """Of all arrays, in order."""
    return [(name, array.shape, array.dtype) for name, array in arrays.items()]


def key_spread(keys_HND: Tensor, arrays: dict[str, Tensor], metric: str) -> float:
    """What k-means minimises, over the keys in clusters."""
    assignment = arrays["assignment"].long()
    keys = keys_HND.float()
    if metric == "cosine":
        keys = torch.nn.functional.normalize(keys, dim=-1)
    total = 0.0
    for own, points in zip(assignment, keys, strict=True):
        inside = own >= 0
        sums = torch.zeros(int(assignment.max()) + 1, points.shape[1], device=keys.device)
        sums.index_add_(0, own[inside], points[inside])
        if metric == "cosine":
            centres = torch.nn.functional.normalize(sums, dim=-1)
        else:
            centres = sums / own[inside].bincount(minlength=len(sums)).clamp(min=1)[:, None]
        total += float((points[inside] - centres[own[inside]]).square().sum())
    return total


CLUSTERS = [
    ClusterParameters(8, "cosine", 128, 5, "none", 0, 4),
    ClusterParameters(8, "euclidean", 128, 5, "diagonal", 0, 4),
    ClusterParameters(8, "euclidean", 0, 5, "diagonal", 64, 0),
]


@pytest.mark.parametrize("parameters", CLUSTERS, ids=lambda parameters: parameters.moments)
def test_clusters(parameters: ClusterParameters) -> None:
    source = make_source(290)
    found = build_clusters_on_device(parameters, source, 0)
    expected = build_clusters(parameters, on_host(source), 0)
    assert shapes(found) == shapes(expected)
    keys = source.keys_HND
    if parameters.window:
        assert source.inverse_frequencies is not None
        keys = undo_rotary(keys, 0, source.inverse_frequencies)
        torch.testing.assert_close(found["frequencies"].cpu(), expected["frequencies"])
    theirs = key_spread(keys.cpu(), expected, parameters.metric)
    assert key_spread(keys, found, parameters.metric) < 1.06 * theirs  # the seeds are others
    again = build_clusters_on_device(parameters, source, 0)
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert not torch.equal(build_clusters_on_device(parameters, source, 1)["assignment"], found["assignment"])
    # Two sums of the same clusters, computed in another way.
    counts = found["assignment"][0][found["assignment"][0] >= 0].bincount(minlength=found["counts"].shape[1])
    assert found["counts"][0].tolist() == counts.tolist()
    own = found["assignment"][0] == 3
    torch.testing.assert_close(found["means"][0, 3], keys[0, own].float().mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("moments", ["none", "diagonal"])
def test_a_tree(moments: str) -> None:
    """Fine clusters in the order of their parents, whose moments are direct sums."""
    parameters = TreeParameters(4, "cosine", 128, 4, moments, 0, 4, keys_per_coarse=20)
    source = make_source(300)
    fine, found = build_clusters(parameters, source, 0), build_tree(parameters, source, 0)
    coarse_of_key = found["parents"].long().gather(1, found["assignment"].clamp(min=0).long())
    coarse_of_key = torch.where(found["assignment"] >= 0, coarse_of_key, -1)
    coarse = found["coarse_counts"].shape[1]
    for head in range(2):
        assert torch.equal(found["parents"][head], found["parents"][head].sort().values)
        begin = found["coarse_offsets"][head]
        sizes = found["parents"][head].long().bincount(minlength=coarse)
        assert torch.equal(begin.diff().long(), sizes)
        for number in range(coarse):
            own = coarse_of_key[head] == number
            assert float(found["coarse_counts"][head, number]) == int(own.sum())
            if not bool(own.any()):
                continue
            keys, values = source.keys_HND[head, own], source.values_HND[head, own]
            close = {"rtol": 1e-3, "atol": 1e-4}
            torch.testing.assert_close(found["coarse_means"][head, number], keys.mean(0), **close)
            torch.testing.assert_close(found["coarse_value_sums"][head, number], values.sum(0), **close)
            if moments == "diagonal":
                variance = keys.var(0, correction=0)
                torch.testing.assert_close(found["coarse_variances"][head, number], variance, **close)
        # Keys are in the fine clusters that they were in, under other numbers.
        pairs = torch.stack([fine["assignment"][head], found["assignment"][head]]).unique(dim=1)
        assert pairs.shape[1] == len(fine["assignment"][head].unique())


def test_a_tree_over_empty_clusters() -> None:
    """Half of the keys are one and the same, so that fine clusters stay empty."""
    source = make_source(200)
    source.kv_HN2D[:, 100:] = source.kv_HN2D[:, 100:101]
    parameters = TreeParameters(4, "euclidean", 0, 3, "none", 0, 0, keys_per_coarse=25)
    found = build_tree(parameters, source, 0)
    assert bool((found["counts"] == 0).any())
    assert (found["coarse_counts"].sum(1) == 200).all()
    assert int((found["coarse_counts"] > 0).sum(1).min()) >= 4


@pytest.mark.parametrize(
    ("layout", "scores", "subspaces", "centroids"),
    [
        ("dense", "dot", 8, 16),
        ("dense", "cosine", 4, 12),
        ("lists", "cosine", 4, 12),
        ("dense", "dot", 1, 140),
    ],
)
def test_tables(layout: str, scores: str, subspaces: int, centroids: int) -> None:
    parameters = TableParameters.parse(
        {
            "layout": layout,
            "subspaces": subspaces,
            "centroids": centroids,
            "split": "strided",
            "scores": scores,
            "alpha": 0.2,
            "iterations": 1,
        }
    )
    source = make_source(100)
    build = build_tables if layout == "lists" else build_tables_on_device
    found = build(parameters, source, 0)
    expected = build_tables(parameters, on_host(source), 0)
    assert shapes(found) == shapes(expected)
    slices = source.keys_HND[..., subspace_dims(parameters, 32).to(DEVICE)]
    if scores == "cosine":
        slices = torch.nn.functional.normalize(slices, dim=-1)
    products = torch.einsum("hnmb,hmcb->hmcn", slices, found["centroids"])
    if layout == "lists":
        torch.testing.assert_close(products.topk(20, dim=-1).values, products.gather(-1, found["ids"].long()))
        products = products.gather(-1, found["ids"].long())
    stored = found["scores"].float() * found["scales"][..., None, None]
    assert float((stored - products).abs().max()) <= 0.51 * float(found["scales"].max())
    again = build(parameters, source, 0)
    assert all(torch.equal(found[name], again[name]) for name in found)


@pytest.mark.parametrize("spoil", [float("nan"), 0.0])
def test_tables_need_queries_with_directions(spoil: float) -> None:
    source = make_source(40)
    source.queries.queries_HPGD[1] = spoil
    parameters = TableParameters.parse({**INDEX_SPECS["query_tables"].parameters, "subspaces": 8})
    for build in (build_tables, build_tables_on_device):
        with pytest.raises(InvalidArgumentError, match="k-means got"):
            build(parameters, on_host(source) if build is build_tables else source, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(INDEX_SPECS))
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 64)]
)
def test_every_index_on_a_device(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Built where the keys are, alike each time, and as good as on the host."""
    spec = INDEX_SPECS[name]
    source = make_source(6000, dtype, head_dim)
    found = INDEX_CLASSES[spec.kind].build(spec.parameters, source, 0).arrays()
    expected = INDEX_CLASSES[spec.kind].build(spec.parameters, on_host(source), 0).arrays()
    assert all(array.is_cuda and array.is_contiguous() for array in found.values())
    assert shapes(found) == shapes(expected)
    again = INDEX_CLASSES[spec.kind].build(spec.parameters, source, 0).arrays()
    assert all(torch.equal(found[key], again[key]) for key in found)
    keys = source.keys_HND.float()
    if "assignment" in found:
        if spec.parameters["window"]:
            assert source.inverse_frequencies is not None
            keys = undo_rotary(keys, 0, source.inverse_frequencies)
        metric = str(spec.parameters["metric"])
        ours, theirs = (
            key_spread(keys, {"assignment": arrays["assignment"].cuda()}, metric)
            for arrays in (found, expected)
        )
        assert ours < 1.02 * theirs
    elif "key_codes" in found:
        restored = [
            CoarseRows.from_arrays(spec.parameters, arrays, source.kv_HN2D) for arrays in (found, expected)
        ]
        for decode in ("decode_keys", "decode_values"):
            raw = (keys if decode == "decode_keys" else source.values_HND.float()).cpu()
            ours, theirs = (
                float((getattr(index.rows, decode)(0, 6000).cpu() - raw).square().sum()) for index in restored
            )
            assert ours < 1.02 * theirs
    elif "centroids" in found:
        dims = subspace_dims(TableParameters.parse(spec.parameters), head_dim).cuda()
        points = torch.nn.functional.normalize(source.queries.queries_HPGD.flatten(1, 2)[..., dims], dim=-1)
        reaches = [
            float(torch.einsum("hpmb,hmcb->hpmc", points, arrays["centroids"].cuda()).amax(-1).mean())
            for arrays in (found, expected)
        ]
        assert 1 - reaches[0] < 1.02 * (1 - reaches[1])
