"""Key clusters partition the keys, hold their true moments, survive the store and see what is appended."""

from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.key_clusters.build import divide_keys, move_queries, undo_rotary
from index_store.indexes.key_clusters.index import ClusterTree, KeyClusters
from index_store.selection.ranking import ScoredClusters
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample

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
    "full": (KeyClusters, {**FLAT, "metric": "euclidean", "moments": "full", "block": 0}),
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
    assert ("covariances" in arrays) == (moments == "full")
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
            if "covariances" in arrays:
                expected = (v - v.mean(0)).t() @ (k - k.mean(0))
                torch.testing.assert_close(
                    arrays["covariances"][head, cluster], expected, rtol=1e-3, atol=1e-4
                )


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


@settings(max_examples=200, deadline=None)
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
        index.pieces(queries(), 5, KEYS + new, appended, position=KEYS + new),
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
        index.pieces(queries(), 5, KEYS, None)
