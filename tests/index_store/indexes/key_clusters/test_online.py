"""Online clusters partition the appended keys, whatever batches they came in, and stay as good as fresh ones."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.errors import InvalidArgumentError
from index_store.indexes.key_clusters.build import undo_rotary
from index_store.indexes.key_clusters.index import OnlineClusters
from index_store.indexes.kmeans.kmeans import assign_clusters

HEADS, DIM, FIRST = 2, 8, 1000


def online(**changes: Any) -> OnlineClusters:
    arguments: dict[str, Any] = {
        "heads": HEADS,
        "head_dim": DIM,
        "first_id": FIRST,
        "keys_per_cluster": 4,
        "metric": "euclidean",
        "block": 32,
        "moments": "full",
        "frequencies": None,
        "seed": 0,
    }
    return OnlineClusters(**{**arguments, **changes})


def some_kv(count: int, seed: int = 0, dim: int = DIM, heads: int = HEADS) -> torch.Tensor:
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
    assert found.covariances_HCDD is not None
    for head in range(HEADS):
        for cluster, members in enumerate(member_lists(clusters, head)):
            assert found.counts_HC[head, cluster] == len(members)
            if not members:
                assert not found.means_HCD[head, cluster].any()
                assert not found.covariances_HCDD[head, cluster].any()
                continue
            keys, values = kv[head, [id_ - FIRST for id_ in members]].double().unbind(1)
            centred = keys - keys.mean(0)
            covariance = torch.einsum("xi,xj->ij", values - values.mean(0), centred)
            for stored, expected in (
                (found.means_HCD, keys.mean(0)),
                (found.value_sums_HCD, values.sum(0)),
                (found.variances_HCD, centred.square().mean(0)),
                (found.covariances_HCDD, covariance),
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
    per_token = 4 + 4 + (3 * DIM * 4 + 4) / 16
    working = 384 * (2 * DIM * 4 + 8)  # the open block's keys, values and clusters
    for count, size in sizes.items():
        assert size <= 2 * per_token * count + working + 8192
    assert sizes[16384] <= 2.1 * sizes[8192]


def test_rotated_keys_are_turned_back_by_their_position() -> None:
    frequencies = 10_000.0 ** (-torch.arange(DIM // 2) / (DIM // 2))
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
        ({"moments": "some"}, "none, diagonal, full"),
        ({"keys_per_cluster": 0}, "at least 1"),
        ({"block": -1}, "at least 0"),
        ({"frequencies": torch.ones(3)}, "one inverse frequency"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        online(**change)
