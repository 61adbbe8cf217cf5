"""Key clusters partition the keys, hold their true moments, survive the store and see what is appended."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import Asked, LayerSource
from index_store.indexes.key_clusters.build import check_frequencies, divide_keys, move_queries, undo_rotary
from index_store.indexes.key_clusters.build_triton import (
    build_device_clusters,
    list_device_members,
    measure_members,
    measure_members_reference,
)
from index_store.indexes.key_clusters.index import ClusterTree, KeyClusters, OnlineClusters, expand
from index_store.indexes.key_clusters.parameters import TreeParameters
from index_store.indexes.key_clusters.tree_numba import search_tree, search_tree_reference
from index_store.indexes.kmeans.kmeans import assign_clusters
from index_store.selection.ranking import ScoredClusters
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.devices import DEVICE, DTYPES, make_kv

HEADS, KEYS, DIM, GROUP = 2, 700, 16, 3
FREQUENCIES = 10_000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))

FLAT: dict[str, Scalar] = {
    "keys_per_cluster": 8,
    "metric": "cosine",
    "block": 256,
    "iterations": 5,
    "moments": "none",
    "window": 0,
    "sinks": 5,
}
TREE: dict[str, Scalar] = {**FLAT, "keys_per_coarse": 40}
CASES: dict[str, tuple[type[KeyClusters], dict[str, Scalar]]] = {
    "cosine": (KeyClusters, FLAT),
    "full": (KeyClusters, {**FLAT, "metric": "euclidean", "moments": "diagonal", "block": 0}),
    "windowed": (KeyClusters, {**FLAT, "window": 32, "moments": "diagonal"}),
    "tree": (ClusterTree, TREE),
    "windowed tree": (ClusterTree, {**TREE, "window": 32, "moments": "diagonal", "metric": "euclidean"}),
}
every_case = pytest.mark.parametrize("name", CASES)


def source(seed: int = 0, keys: int = KEYS) -> LayerSource:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(HEADS, keys, 2, DIM, generator=generator).bfloat16()
    sample = QuerySample(torch.zeros(HEADS, 1, GROUP, DIM), torch.zeros(1, dtype=torch.int64))
    return LayerSource(kv, sample, FREQUENCIES)


def queries(positions: int = 2, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, positions, GROUP, DIM, generator=generator) / DIM**0.5


def build(name: str, seed: int = 0) -> KeyClusters:
    kind, parameters = CASES[name]
    return kind.build(parameters, source(), seed)


def compared_keys(name: str) -> Tensor:
    """The keys as the clusters see them, [H, N, d]."""
    keys = source().keys_HND.float()
    return undo_rotary(keys, 0, FREQUENCIES) if CASES[name][1]["window"] else keys


def members_of(arrays: Mapping[str, Tensor], head: int) -> list[list[int]]:
    offsets = arrays["offsets"][head].tolist()
    members = arrays["members"][head].tolist()
    return [members[a:b] for a, b in pairwise(offsets)]


@every_case
def test_every_key_but_the_sinks_is_in_exactly_one_cluster(name: str) -> None:
    arrays = build(name).arrays()
    for head in range(HEADS):
        lists = members_of(arrays, head)
        assert sorted(key for keys in lists for key in keys) == list(range(5, KEYS))
        assert arrays["assignment"][head, :5].tolist() == [-1] * 5
        for cluster, keys in enumerate(lists):
            assert keys == sorted(keys)
            assert (arrays["assignment"][head, keys] == cluster).all()
            assert arrays["counts"][head, cluster] == len(keys)


@every_case
def test_moments_equal_direct_sums(name: str) -> None:
    arrays = build(name).arrays()
    keys, values = compared_keys(name), source().values_HND.float()
    moments = CASES[name][1]["moments"]
    assert ("variances" in arrays) == (moments != "none")
    for head in range(HEADS):
        for cluster, members in enumerate(members_of(arrays, head)):
            if not members:
                assert not arrays["means"][head, cluster].any()
                continue
            k, v = keys[head, members], values[head, members]
            torch.testing.assert_close(arrays["means"][head, cluster], k.mean(0), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(arrays["value_sums"][head, cluster], v.sum(0), rtol=1e-4, atol=1e-4)
            if "variances" in arrays:
                variance = k.var(0, unbiased=False)
                torch.testing.assert_close(arrays["variances"][head, cluster], variance, rtol=1e-3, atol=1e-4)


def test_cosine_clusters_directions_but_averages_raw_keys() -> None:
    directions = torch.eye(DIM)[torch.arange(400) % 4]
    lengths = torch.where(torch.arange(400) % 8 < 4, 1.0, 9.0)[:, None]
    kv = (directions * lengths)[None, :, None].expand(1, 400, 2, DIM).contiguous()
    sample = QuerySample(torch.zeros(1, 1, 1, DIM), torch.zeros(1, dtype=torch.int64))
    parameters: dict[str, Scalar] = {**FLAT, "block": 0, "sinks": 0, "keys_per_cluster": 20}
    found = {}
    for metric in ("cosine", "euclidean"):
        index = KeyClusters.build({**parameters, "metric": metric}, LayerSource(kv, sample), 0)
        found[metric] = index.arrays()
    lists = {metric: [keys for keys in members_of(a, 0) if keys] for metric, a in found.items()}
    assert all(len({key % 4 for key in keys}) == 1 for keys in lists["cosine"])
    assert any(len({key % 8 for key in keys}) == 2 for keys in lists["cosine"])
    assert all(len({key % 8 for key in keys}) == 1 for keys in lists["euclidean"])
    largest = found["cosine"]["counts"][0].argmax()
    members = members_of(found["cosine"], 0)[int(largest)]
    torch.testing.assert_close(found["cosine"]["means"][0, largest], kv[0, members, 0].mean(0))


@settings(max_examples=80, deadline=None)
@given(count=st.integers(1, 900), sinks=st.integers(0, 20), block=st.integers(0, 200), per=st.integers(1, 40))
def test_blocks_divide_the_keys(count: int, sinks: int, block: int, per: int) -> None:
    if 0 < block < per:
        block = per
    blocks = divide_keys(count, per, block, sinks)
    assert blocks[0].first == min(sinks, count)
    assert blocks[-1].end == count
    assert blocks[0].first_cluster == 0
    for one, following in pairwise(blocks):
        assert one.end - one.first == block
        assert (one.end, one.end_cluster) == (following.first, following.first_cluster)
    for one in blocks:
        assert one.end_cluster - one.first_cluster == max(1, -(-(one.end - one.first) // per))
    last = blocks[-1].end - blocks[-1].first
    if block:
        assert last <= 1.5 * block
        assert last >= 0.5 * block or len(blocks) == 1
    else:
        assert len(blocks) == 1


@every_case
def test_clusters_stay_inside_their_block(name: str) -> None:
    kind, parameters = CASES[name]
    arrays = build(name).arrays()
    parsed = kind.parameters_type.parse(parameters)
    blocks = divide_keys(KEYS, parsed.keys_per_cluster, parsed.block, parsed.sinks)
    for block in blocks:
        inside = arrays["assignment"][:, block.first : block.end]
        assert int(inside.min()) >= block.first_cluster
        assert int(inside.max()) < block.end_cluster


@every_case
def test_logits_are_products_with_the_means(name: str) -> None:
    index = build(name)
    arrays = index.arrays()
    search: dict[str, Scalar] = {"coarse_keep": 1.0} if isinstance(index, ClusterTree) else {}
    ranking = index.rank(queries(), 5, KEYS, None, search, position=KEYS + 3)
    moved = queries()
    if CASES[name][1]["window"]:
        moved = move_queries(moved, KEYS + 3, 32, FREQUENCIES)
        assert not torch.allclose(moved, queries(), atol=0.1)
    expected = torch.einsum("htgd,hcd->htgc", moved, arrays["means"])
    expected.masked_fill_((arrays["counts"] == 0)[:, None, None], -torch.inf)
    torch.testing.assert_close(ranking.logits_HTGM, expected, rtol=1e-4, atol=1e-5)
    assert (ranking.items.first_key, ranking.items.end_key) == (5, KEYS)
    if not search:
        assert ranking.vectors_read == expected.shape[-1]
    torch.testing.assert_close(ranking.pieces[0].queries_HTGD, moved)


def test_one_key_per_cluster_ranks_like_the_exact_index() -> None:
    kv = source().kv_HN2D.float()
    index = KeyClusters.build({**FLAT, "keys_per_cluster": 1, "sinks": 0, "block": 100}, source(), 0)
    ranking = index.rank(queries(), 0, KEYS, None, {})
    exact = ExactIndex(kv[:, :, 0]).rank(queries(), 0, KEYS, None, {})
    members = ranking.items.groups[0].keys_HX.long()
    by_key = torch.empty_like(ranking.logits_HTGM)
    by_key.scatter_(3, members[:, None, None].expand_as(by_key), ranking.logits_HTGM)
    torch.testing.assert_close(by_key, exact.logits_HTGM, rtol=1e-4, atol=1e-5)


def counted(pieces: tuple[ScoredClusters, ...], ids: Tensor) -> Tensor:
    """How many pieces stand for each key and query head, [H, T, G, K]."""
    total = torch.zeros(1)
    for piece in pieces:
        cluster = piece.clusters.cluster_of(ids.expand(HEADS, -1))
        alive = piece.logits_HTGC.gather(
            3, cluster.clamp(min=0)[:, None, None].expand(*piece.logits_HTGC.shape[:3], -1)
        )
        total = total + (~torch.isneginf(alive) & (cluster >= 0)[:, None, None])
    return total


@every_case
@pytest.mark.parametrize("new", [0, 130])
def test_pieces_stand_for_each_key_once(name: str, new: int) -> None:
    index = build(name)
    appended = index.start_appending()
    if new:
        appended.append(torch.randn(HEADS, new, 2, DIM))
    ids = torch.arange(KEYS + new)
    for pieces in (
        index.pieces(Asked(queries(), 5, KEYS + new, appended, {}, KEYS + new)),
        index.rank(queries(), 5, KEYS + new, appended, {}, position=KEYS + new).pieces,
    ):
        total = counted(pieces, ids)
        assert (total[..., 5:] == 1).all()
        assert (total[..., :5] == 0).all()
        for piece in pieces:
            assert (piece.clusters.variances_HCD is not None) == (CASES[name][1]["moments"] != "none")


@pytest.mark.parametrize("keys", [1, 5, 6, 9])
@every_case
def test_tiny_contexts(name: str, keys: int) -> None:
    kind, parameters = CASES[name]
    index = kind.build(parameters, source(keys=keys), 0)
    assert all(array.numel() > 0 for array in index.arrays().values())
    ranking = index.rank(queries(), min(5, keys), keys, None, {}, position=keys)
    assert bool(torch.isneginf(ranking.logits_HTGM).all()) == (keys <= 5)
    assert (counted(ranking.pieces, torch.arange(keys)).sum(-1) == max(0, keys - 5)).all()


def test_keys_without_direction_and_equal_keys_are_clustered() -> None:
    kv = source().kv_HN2D.clone()
    kv[:, 100:400] = 0.0
    kv[:, 400:] = 1.5
    for kind, parameters in CASES.values():
        zeroed = LayerSource(kv, source().queries, FREQUENCIES)
        arrays = kind.build(parameters, zeroed, 0).arrays()
        assert int(arrays["counts"].sum()) == HEADS * (KEYS - 5)
        assert all(bool(torch.isfinite(array).all()) for array in arrays.values())


def test_windowed_rope_needs_positions() -> None:
    index = build("windowed")
    with pytest.raises(InvalidArgumentError, match="position"):
        index.rank(queries(), 5, KEYS, None, {})
    with pytest.raises(InvalidArgumentError, match="position"):
        index.pieces(Asked(queries(), 5, KEYS, None, {}, -1))


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
    for one, other in zip(tree.pieces(Asked(queries(), 5, KEYS, None, {}, -1)), ranked, strict=True):
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
    for bad in ({"metric": "manhattan"}, {"iterations": 0}):
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


WIDTH, FIRST = 8, 1000


def online(**changes: Any) -> OnlineClusters:
    arguments: dict[str, Any] = {
        "heads": HEADS,
        "head_dim": WIDTH,
        "first_id": FIRST,
        "keys_per_cluster": 4,
        "metric": "euclidean",
        "block": 32,
        "moments": "diagonal",
        "frequencies": None,
        "seed": 0,
    }
    return OnlineClusters(**{**arguments, **changes})


def some_kv(count: int, seed: int = 0, dim: int = WIDTH, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(heads, count, 2, dim, generator=torch.Generator().manual_seed(seed))


def topical_kv(count: int, topics: int, seed: int = 0, dim: int = 16) -> torch.Tensor:
    """Keys scattered around a few topics, which later keys use as much as early ones."""
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(HEADS, topics, dim, generator=generator)
    keys = centres[:, torch.randint(0, topics, (count,), generator=generator)]
    keys = keys + torch.randn(HEADS, count, dim, generator=generator)
    return torch.stack([keys, torch.randn(HEADS, count, dim, generator=generator)], dim=2)


def append_in_batches(clusters: OnlineClusters, kv: torch.Tensor, batch: int) -> OnlineClusters:
    for part in kv.split(batch, dim=1):
        clusters.append(part)
    return clusters


def member_lists(clusters: OnlineClusters, head: int) -> list[list[int]]:
    members = clusters.members
    offsets, keys = members.offsets_HM[head].tolist(), members.keys_HX[head].tolist()
    return [keys[begin:end] for begin, end in pairwise(offsets)]


@settings(max_examples=30, deadline=None)
@given(
    batches=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    block=st.sampled_from([0, 1, 2, 7, 16]),
    keys_per_cluster=st.integers(1, 9),
    metric=st.sampled_from(["cosine", "euclidean"]),
    repeated=st.booleans(),
)
def test_every_key_is_in_exactly_one_cluster(
    batches: list[int], block: int, keys_per_cluster: int, metric: str, repeated: bool
) -> None:
    clusters = online(block=block, keys_per_cluster=keys_per_cluster, metric=metric, moments="none")
    for number, size in enumerate(batches):
        kv = some_kv(size, seed=number)
        clusters.append(
            kv.round().clamp(0, 1) if repeated else kv
        )  # equal and zero keys leave clusters empty
    total = sum(batches)
    assert clusters.count == total
    found, members = clusters.clusters, clusters.members
    assert found.assignment_HX.shape == (HEADS, total)
    assert found.means_HCD.shape[:2] == found.counts_HC.shape == members.sizes_HM.shape
    assert torch.equal(found.counts_HC.int(), members.sizes_HM)
    ids = torch.arange(FIRST, FIRST + total)
    assert torch.equal(members.keys_HX.sort(1).values, ids.int().expand(HEADS, -1))
    owners = torch.arange(members.sizes_HM.shape[1])
    for head in range(HEADS):
        listed = owners.repeat_interleave(members.sizes_HM[head])
        assert torch.equal(found.cluster_of(members.keys_HX)[head], listed)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("block", [0, 32])
def test_moments_are_direct_sums_over_the_members(metric: str, block: int) -> None:
    kv = some_kv(150)
    kv[:, :, 0] += 5.0  # a common offset must not spoil the centred moments
    clusters = append_in_batches(online(metric=metric, block=block), kv, 13)
    found = clusters.clusters
    assert found.variances_HCD is not None
    for head in range(HEADS):
        for cluster, members in enumerate(member_lists(clusters, head)):
            assert found.counts_HC[head, cluster] == len(members)
            if not members:
                assert not found.means_HCD[head, cluster].any()
                continue
            keys, values = kv[head, [id_ - FIRST for id_ in members]].double().unbind(1)
            centred = keys - keys.mean(0)
            for stored, expected in (
                (found.means_HCD, keys.mean(0)),
                (found.value_sums_HCD, values.sum(0)),
                (found.variances_HCD, centred.square().mean(0)),
            ):
                torch.testing.assert_close(stored[head, cluster].double(), expected, rtol=1e-4, atol=1e-4)


def test_closed_blocks_never_change() -> None:
    clusters = online()
    clusters.append(some_kv(48))  # W + W/2 keys: the first W close
    before = clusters.clusters
    closed = 32 // 4
    kept = [
        array[:, :closed].clone()
        for array in (before.counts_HC, before.means_HCD, before.value_sums_HCD, before.variances_HCD)
        if array is not None
    ]
    assignment = before.assignment_HX[:, :32].clone()
    lists = [member_lists(clusters, head)[:closed] for head in range(HEADS)]
    assert int(assignment.max()) < closed <= int(before.assignment_HX[:, 32:].min())
    append_in_batches(clusters, some_kv(200, seed=1), 7)
    after = clusters.clusters
    assert after.variances_HCD is not None
    for old, new in zip(
        kept, (after.counts_HC, after.means_HCD, after.value_sums_HCD, after.variances_HCD), strict=True
    ):
        assert torch.equal(old, new[:, :closed])
    assert torch.equal(assignment, after.assignment_HX[:, :32])
    assert lists == [member_lists(clusters, head)[:closed] for head in range(HEADS)]


def test_blocks_split_when_the_last_one_reaches_one_and_a_half_of_them() -> None:
    clusters = online(moments="none")
    sizes = []
    for step in range(12):
        clusters.append(some_kv(8, seed=step))
        open_from = (max(0, clusters.count - 16)) // 32 * 32
        sizes.append(clusters.count - open_from)
        assignment = clusters.clusters.assignment_HX
        for begin in range(0, open_from, 32):  # closed blocks own their clusters alone
            inside = set(assignment[0, begin : begin + 32].tolist())
            outside = set(assignment[0, :begin].tolist()) | set(assignment[0, begin + 32 :].tolist())
            assert not inside & outside
            assert len(inside) <= 8
    assert sizes == [8, 16, 24, 32, 40, 16, 24, 32, 40, 16, 24, 32]


def test_one_cluster_for_every_few_keys() -> None:
    clusters = append_in_batches(online(block=0, moments="none"), some_kv(400), 16)
    assert clusters.clusters.counts_HC.shape == (HEADS, 100)
    filled = (clusters.clusters.counts_HC > 0).sum(1)
    assert (filled > 80).all()
    single = append_in_batches(online(block=0, moments="none"), some_kv(50), 1)
    assert single.clusters.counts_HC.shape == (HEADS, 13)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_a_new_topic_among_the_latest_keys_becomes_a_cluster_that_its_query_finds(metric: str) -> None:
    clusters = online(head_dim=16, block=256, metric=metric)
    append_in_batches(clusters, topical_kv(400, 10), 40)
    batch = topical_kv(32, 10, seed=7)
    planted = torch.zeros(16)
    planted[3] = 60.0
    batch[:, 5:9, 0] = planted + 0.1 * torch.randn(4, 16, generator=torch.Generator().manual_seed(3))
    clusters.append(batch)
    found = clusters.clusters
    best = (found.means_HCD @ planted).masked_fill(found.counts_HC == 0, -torch.inf).argmax(1)
    ids = torch.arange(FIRST + 405, FIRST + 409).expand(HEADS, -1)
    assert torch.equal(found.cluster_of(ids), best[:, None].expand(-1, 4))
    for head in range(HEADS):
        assert set(ids[0].tolist()) <= set(member_lists(clusters, head)[int(best[head])])


def spread(points_XD: torch.Tensor, assignment_X: torch.Tensor) -> float:
    """Mean distance of points to their cluster's mean."""
    total = 0.0
    for cluster in assignment_X.unique():
        members = points_XD[assignment_X == cluster]
        total += float((members - members.mean(0)).norm(dim=-1).sum())
    return total / len(points_XD)


@pytest.mark.parametrize("block", [0, 512])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("topics", [20, 150])
def test_clusters_are_nearly_as_tight_as_those_of_k_means_from_scratch(
    block: int, metric: str, topics: int
) -> None:
    kv = topical_kv(2000, topics)
    clusters = online(head_dim=16, block=block, metric=metric, keys_per_cluster=16, moments="none")
    append_in_batches(clusters, kv, 64)
    assignment = clusters.clusters.assignment_HX
    for head in range(HEADS):
        points = kv[head, :, 0]
        if metric == "cosine":
            points = torch.nn.functional.normalize(points, dim=-1)
        size = block or len(points)
        fresh = torch.cat(
            [
                assign_clusters(part, -(-len(part) // 16), 10, seed=0, metric=metric) + number * 1000
                for number, part in enumerate(points.split(size))
            ]
        )
        assert spread(points, assignment[head]) < 1.25 * spread(points, fresh)


def test_memory_grows_by_little_more_than_the_clusters() -> None:
    clusters = online(heads=1, block=256, keys_per_cluster=16, moments="diagonal")
    sizes = {}
    for step in range(256):
        clusters.append(some_kv(64, seed=step, heads=1))
        sizes[clusters.count] = clusters.nbytes
    # Per token: its cluster, its place in the member list, and a sixteenth of three vectors and a count.
    per_token = 4 + 4 + (3 * WIDTH * 4 + 4) / 16
    working = 384 * (2 * WIDTH * 4 + 8)  # the open block's keys, values and clusters
    for count, size in sizes.items():
        assert size <= 2 * per_token * count + working + 8192
    assert sizes[16384] <= 2.1 * sizes[8192]


def test_rotated_keys_are_turned_back_by_their_position() -> None:
    frequencies = 10_000.0 ** (-torch.arange(WIDTH // 2) / (WIDTH // 2))
    kv = some_kv(90)
    turned = append_in_batches(online(frequencies=frequencies), kv, 13)
    still = kv.clone()
    still[:, :, 0] = undo_rotary(kv[:, :, 0], FIRST, frequencies)
    plain = append_in_batches(online(), still, 13)
    torch.testing.assert_close(turned.clusters.means_HCD, plain.clusters.means_HCD)
    assert torch.equal(turned.clusters.assignment_HX, plain.clusters.assignment_HX)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": "manhattan"}, "cosine, euclidean"),
        ({"keys_per_cluster": 0}, "at least 1"),
        ({"block": -1}, "at least 0"),
        ({"frequencies": torch.ones(3)}, "one inverse frequency"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        online(**change)
