"""A cluster tree, clusters built by kernels, and keys whose rotation is undone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.key_clusters.build import check_frequencies, divide_keys, move_queries, undo_rotary
from index_store.indexes.key_clusters.build_triton import (
    build_device_clusters,
    covary_members,
    covary_members_reference,
    list_device_members,
    measure_members,
    measure_members_reference,
)
from index_store.indexes.key_clusters.index import ClusterTree, KeyClusters, expand
from index_store.indexes.key_clusters.parameters import TreeParameters
from index_store.indexes.key_clusters.tree_numba import search_tree, search_tree_reference
from index_store.store.description.json_fields import Scalar
from tests.index_store.indexes.key_clusters.test_key_clusters import (
    DIM,
    FLAT,
    FREQUENCIES,
    HEADS,
    KEYS,
    TREE,
    queries,
    source,
)
from tests.support.devices import DEVICE, DTYPES, make_kv

DIAGONAL: dict[str, Scalar] = {**TREE, "moments": "diagonal"}
_PARSED = TreeParameters.parse(DIAGONAL)
BLOCKS = divide_keys(KEYS, _PARSED.keys_per_cluster, _PARSED.block, _PARSED.sinks)


@pytest.fixture(scope="module")
def tree() -> ClusterTree:
    return ClusterTree.build(DIAGONAL, source(), 0)


def test_coarse_clusters_stay_inside_their_block(tree: ClusterTree) -> None:
    arrays = tree.arrays()
    first = 0
    for block in BLOCKS:
        parents = arrays["parents"][:, block.first_cluster : block.end_cluster]
        own = -(-(block.end - block.first) // 40)
        assert first <= int(parents.min()) <= int(parents.max()) < first + own
        first += own


def test_a_tree_that_keeps_everything_ranks_like_flat_clusters(tree: ClusterTree) -> None:
    flat = KeyClusters.build({**FLAT, "moments": "diagonal"}, source(), 0)
    by_key = []
    for index, search in ((flat, {}), (tree, {"coarse_keep": 1.0})):
        ranking = index.rank(queries(), 5, KEYS, None, search)
        cluster = index.arrays()["assignment"][:, 5:].long()
        logits = ranking.logits_HTGM
        by_key.append(logits.gather(3, cluster[:, None, None].expand(*logits.shape[:3], -1)))
    torch.testing.assert_close(by_key[0], by_key[1], rtol=1e-5, atol=1e-6)
    assert tree.rank(queries(), 5, KEYS, None, {"coarse_keep": 1.0}).vectors_read == (
        flat.rank(queries(), 5, KEYS, None, {}).vectors_read + tree.arrays()["coarse_counts"].shape[1]
    )


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.5, 0.9])
def test_the_best_coarse_clusters_are_expanded_until_they_hold_the_share(
    tree: ClusterTree, keep: float
) -> None:
    arrays = tree.arrays()
    ranking = tree.rank(queries(), 5, KEYS, None, {"coarse_keep": keep})
    fine, coarse = ranking.pieces
    compared = 0
    for head in range(HEADS):
        counts = arrays["coarse_counts"][head]
        for position in range(2):
            query = queries()[head, position]
            weights = (query @ arrays["coarse_means"][head].t()).exp()
            weights[:, counts == 0] = 0.0
            scores = (weights / (weights @ counts)[:, None]).mean(0)
            pruned = ~torch.isneginf(coarse.logits_HTGC[head, position, 0])
            assert not pruned[counts == 0].any()
            expanded = ~pruned & (counts > 0)
            held = counts[expanded].sum() / counts.sum()
            smallest = counts[expanded][scores[expanded].argmin()] / counts.sum()
            assert held >= keep > held - smallest
            if bool(pruned.any()):
                assert scores[expanded].min() >= scores[pruned].max() * (1 - 1e-5)
            below = expanded[arrays["parents"][head].long()]
            finite = ~torch.isneginf(fine.logits_HTGC[head, position])
            assert torch.equal(finite, (below & (arrays["counts"][head] > 0)).expand_as(finite))
            compared += int(below.sum())
    assert ranking.vectors_read == arrays["coarse_counts"].shape[1] + compared / (HEADS * 2)
    # The scores of what is left are normalised over what is left.
    total = (ranking.log_weights_HTGM().exp() * arrays["counts"][:, None, None]).sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_pieces_take_the_default_share(tree: ClusterTree) -> None:
    ranked = tree.rank(queries(), 5, KEYS, None, {"coarse_keep": 0.5}).pieces
    for one, other in zip(tree.pieces(queries(), 5, KEYS, None), ranked, strict=True):
        assert torch.equal(one.logits_HTGC, other.logits_HTGC)


def test_the_sessions_own_clusters_always_survive(tree: ClusterTree) -> None:
    appended = tree.start_appending()
    appended.append(-10 * queries(40)[:, :, :2].mean(2, keepdim=True).expand(-1, -1, 2, -1))
    ranking = tree.rank(queries(), 5, KEYS + 40, appended, {"coarse_keep": 0.1})
    own = ranking.items.groups[1].offsets_HM.shape[1] - 1
    filled = (appended.clusters.counts_HC > 0)[:, None, None]
    assert torch.equal(~torch.isneginf(ranking.logits_HTGM[..., -own:]), filled.expand(-1, 2, 3, -1))
    assert len(ranking.pieces) == 3


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    positions=st.integers(0, 3),
    group=st.integers(1, 5),
    coarse=st.integers(1, 40),
    dim=st.sampled_from([1, 7, 63, 64]),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_the_kernel_equals_its_reference(
    seed: int, positions: int, group: int, coarse: int, dim: int, share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(0, 6, (2, coarse), generator=generator)
    sizes[:, 0] += 6 * coarse - sizes.sum(1)  # all heads have as many fine clusters
    offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0)).to(torch.int32)
    fine = 6 * coarse
    counts = torch.randint(0, 4, (2, fine), generator=generator).float()
    means = torch.randn(2, fine, dim, generator=generator)
    expanded = torch.rand(2, positions, coarse, generator=generator) < share
    alive = expanded.any(1) if positions else torch.zeros(2, coarse, dtype=torch.bool)
    expected = search_tree_reference(
        asked := torch.randn(2, positions, group, dim, generator=generator), means, counts, offsets, expanded
    )
    # Means below coarse clusters that nobody expanded are not read.
    means[~alive.gather(1, parents_of(offsets, fine))] = torch.nan
    found = search_tree(asked, means, counts, offsets, expanded)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def parents_of(offsets_HK: Tensor, fine: int) -> Tensor:
    sizes = offsets_HK.diff(dim=1).long()
    return torch.stack([torch.arange(len(row)).repeat_interleave(row) for row in sizes]).view(2, fine)


def test_expanding_nothing_but_empty_clusters_expands_nothing() -> None:
    logits = torch.full((2, 1, 3, 4), -torch.inf)
    assert not expand(logits, torch.zeros(2, 4), 1.0).any()


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


def embed(vectors_HTD: Tensor, positions_T: Tensor) -> Tensor:
    """The rotary embedding as models apply it: x cos + rotate_half(x) sin."""
    angles = (positions_T.double()[:, None] * FREQUENCIES.double()).float().repeat(1, 2)
    low, high = vectors_HTD.chunk(2, dim=-1)
    return vectors_HTD * angles.cos() + torch.cat([-high, low], dim=-1) * angles.sin()


@pytest.mark.parametrize("first", [0, 7, 130_000])
def test_undoing_inverts_the_embedding(first: int) -> None:
    keys = torch.randn(2, 50, DIM, generator=torch.Generator().manual_seed(0))
    embedded = embed(keys, torch.arange(first, first + 50))
    torch.testing.assert_close(undo_rotary(embedded, first, FREQUENCIES), keys, rtol=0, atol=2e-2)
    if first < 100:
        torch.testing.assert_close(undo_rotary(embedded, first, FREQUENCIES), keys, rtol=0, atol=1e-5)
    assert undo_rotary(embedded.bfloat16(), first, FREQUENCIES).dtype == torch.float32


def test_products_at_a_true_distance_of_the_window_are_kept() -> None:
    generator = torch.Generator().manual_seed(1)
    window, first = 24, 300
    keys = torch.randn(2, 40, DIM, generator=generator)
    queries = torch.randn(2, 40, 3, DIM, generator=generator)
    positions = torch.arange(first, first + 40)
    embedded_queries = torch.stack([embed(queries[:, :, g], positions + window) for g in range(3)], dim=2)
    true = torch.einsum("htgd,htd->htg", embedded_queries, embed(keys, positions))
    moved = move_queries(embedded_queries, first + window, window, FREQUENCIES)
    undone = undo_rotary(embed(keys, positions), first, FREQUENCIES)
    torch.testing.assert_close(torch.einsum("htgd,htd->htg", moved, undone), true, rtol=1e-4, atol=1e-4)


def test_every_distance_looks_like_the_window() -> None:
    """Equal keys get equal products, wherever they stand."""
    key = torch.randn(1, 1, DIM, generator=torch.Generator().manual_seed(2)).expand(1, 200, DIM)
    query = torch.randn(1, 1, 1, DIM, generator=torch.Generator().manual_seed(3))
    undone = undo_rotary(embed(key, torch.arange(200)), 0, FREQUENCIES)
    products = torch.einsum("htgd,hkd->hk", move_queries(query, 500, 64, FREQUENCIES), undone)
    torch.testing.assert_close(products, products[:, :1].expand_as(products), rtol=1e-4, atol=1e-4)


def test_missing_or_odd_frequencies_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="window 0"):
        check_frequencies(None, DIM)
    with pytest.raises(InvalidArgumentError, match=r"\(4,\)"):
        check_frequencies(torch.ones(4), DIM)
    assert check_frequencies(FREQUENCIES, DIM) is FREQUENCIES
