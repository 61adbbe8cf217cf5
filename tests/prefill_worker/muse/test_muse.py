"""MuSe in eager code and by kernels: what it approximates, clusters, gradients and refusals; and prefill with it."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from index_store.errors import InvalidArgumentError
from index_store.store.catalog import Store
from index_store.store.description.context_id import ModelIdentity
from prefill_worker.muse import MuseSettings, muse_attention
from prefill_worker.muse.attention import attend_forward
from prefill_worker.muse.backend import EAGER, kernels
from prefill_worker.muse.kernels.clustering import draw_seeds, move_centroids, place_points
from prefill_worker.muse.kernels.clusters import (
    STRETCH,
    BoundedClusters,
    average_members_reference,
    find_clusters_reference,
    gather_members,
    places_in_stretch,
    scatter_members,
)
from prefill_worker.muse.kernels.clusters import draw_seeds_reference as seeds_reference
from prefill_worker.muse.kernels.clusters import move_centroids_reference as move_reference
from prefill_worker.muse.kernels.clusters import place_points_reference as place_reference
from prefill_worker.muse.kernels.reference import (
    KeyValueMoments,
    QueryGrads,
    Summaries,
    attend_reference,
    attend_summaries_reference,
    covary_members_reference,
    mix_dipoles_reference,
    summarise_keys_reference,
)
from prefill_worker.muse.ranges import RangeAttention, planned_bytes
from prefill_worker.muse.tree import divide_triangle, earlier_ranges
from prefill_worker.reading.capture import Capture
from prefill_worker.reading.query_sample import plan_sample
from tests.prefill_worker.conftest import MakeConfig, run

SMALL = MuseSettings(clusters=12, iterations=3, block=32)


def squared_error(found: Tensor, expected: Tensor) -> float:
    return error(found, expected) ** 2


def test_as_many_clusters_as_points_are_exact() -> None:
    query, key, value = make_inputs(2, 4, 2, 50, 8)
    settings = MuseSettings(clusters=50, cap=1.0)
    found = muse_attention(query, key, value, enable_gqa=True, settings=settings)
    torch.testing.assert_close(found, scaled_dot_product_attention(query, key, value, enable_gqa=True))


def test_one_block_is_exact_causal_attention() -> None:
    query, key, value = make_inputs(2, 4, 2, 30, 8)
    found = muse_attention(query, key, value, is_causal=True, enable_gqa=True, settings=SMALL)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_scale_is_that_of_torch() -> None:
    query, key, value = make_inputs(1, 2, 2, 40, 8)
    settings = MuseSettings(clusters=40, cap=1.0)
    found = muse_attention(query, key, value, scale=0.7, settings=settings)
    torch.testing.assert_close(found, scaled_dot_product_attention(query, key, value, scale=0.7))


def test_what_each_term_is_worth() -> None:
    """The order of the paper's ablations (table 3), and more clusters are better (table 1)."""
    query, key, value = make_inputs(1, 4, 2, 600, 16)
    expected = scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def rated(settings: MuseSettings) -> float:
        return squared_error(muse_attention(query, key, value, enable_gqa=True, settings=settings), expected)

    whole = rated(SMALL)
    assert rated(replace(SMALL, clusters=48)) < 0.7 * whole
    assert whole < 0.8 * rated(replace(SMALL, dipole=False))
    assert whole < 0.5 * rated(replace(SMALL, query_clusters=1))
    clusters = [
        find_clusters_reference(x.unsqueeze(2), 12, 1.5, 3, seed) for x, seed in ((query, 1), (key, 0))
    ]
    wide_query, *of_keys = (x.unsqueeze(2) for x in (query, key, value))
    summaries = summarise_keys_reference(clusters[0].centroids, *of_keys, clusters[1], 0.25, 2)
    covariances = covary_members_reference(*of_keys, clusters[1]).covariances
    dipoles = mix_dipoles_reference(summaries.logits, covariances, 2, 1)
    nothing = summaries._replace(values=torch.zeros_like(summaries.values))
    both, only = (
        squared_error(
            attend_summaries_reference(wide_query, clusters[0], found, dipoles, 0.25)[0].squeeze(2), expected
        )
        for found in (summaries, nothing)
    )
    assert both == pytest.approx(whole)
    assert only > 4 * whole


@pytest.mark.parametrize("count", [32, 33, 64, 95, 96, 97, 200, 256])
def test_every_query_sees_every_earlier_key_once(count: int) -> None:
    seen = torch.zeros(count, count, dtype=torch.int64)
    for first in range(0, count, 32):
        block = seen[first : first + 32, first : first + 32]
        block += torch.ones_like(block).tril()
    positions = torch.arange(count)[None, None]
    for pairs in divide_triangle(count, 32):
        keys, queries = pairs.keys(positions)[0, 0], pairs.of_queries(positions)[0, 0]
        assert keys.shape == (pairs.ranges, pairs.size)
        for own_keys, own_queries in zip(keys, queries, strict=True):
            seen[own_queries[:, None], own_keys[None, :]] += 1
    assert torch.equal(seen, torch.ones(count, count).tril().long())


def test_ranges_before_a_block_are_all_blocks_before_it() -> None:
    for number in range(70):
        ranges = earlier_ranges(number)
        assert [block for first, size in ranges for block in range(first, first + size)] == list(
            range(number)
        )
        assert all(size & (size - 1) == 0 and first % size == 0 for first, size in ranges)


@pytest.mark.parametrize("count", [100, 130, 333])
def test_causal_does_not_look_ahead(count: int) -> None:
    query, key, value = make_inputs(1, 2, 1, count, 8)
    expected = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    found = muse_attention(query, key, value, is_causal=True, enable_gqa=True, settings=SMALL)
    assert squared_error(found, expected) < 0.1
    settings = MuseSettings(clusters=64, block=16)  # more clusters than a range has points
    exact = muse_attention(query, key, value, is_causal=True, enable_gqa=True, settings=settings)
    assert squared_error(exact[:, :, :128], expected[:, :, :128]) < 1e-20
    changed = [x.clone() for x in (key, value)]
    for x in changed:
        x[:, :, 64:] += 1.0
    later = muse_attention(query, *changed, is_causal=True, enable_gqa=True, settings=SMALL)
    assert torch.equal(later[:, :, :64], found[:, :, :64])


def test_lse_is_that_of_the_whole_softmax() -> None:
    query, key, value = make_inputs(1, 2, 2, 64, 8)
    settings = MuseSettings(clusters=64, block=16, cap=1.0)
    _, lse, parts = attend_forward(query, key, value, 1.0, True, settings, EAGER)
    logits = (query @ key.transpose(2, 3)).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1))
    assert [part.pairs.size for part in parts] == [16, 32]


@pytest.mark.parametrize(("count", "cap"), [(200, 1.0), (200, 1.5), (2 * STRETCH + 37, 1.2), (9, 4.0)])
def test_clusters_partition_the_points_under_the_cap(count: int, cap: float) -> None:
    # One centre: without a cap nearly all points would be in few clusters.
    points = make_points(1, 2, count, 4, spread=0.1, centres=1).unsqueeze(2)
    points[:, :, :, ::3] *= 5
    found = find_clusters_reference(points, 10, cap, 2, seed=0)
    clusters = min(10, count)
    rows = found.members[0][found.filled[0]]
    assert torch.equal(rows.sort().values, torch.arange(count, dtype=torch.int32))
    assert int(found.counts.sum(1)[1]) == count
    stretches = max(1, count // STRETCH)
    assert int(found.counts.max()) <= stretches * places_in_stretch(count, clusters, cap)
    own = gather_members(points, found.members, found.counts)
    torch.testing.assert_close(own.sum(2) / found.counts.clamp(min=1)[..., None], found.centroids)
    assert torch.equal(scatter_members(own, found.members, found.counts, count), points.flatten(0, 2))


def test_seeds_are_long_points_and_different_ones() -> None:
    points = make_points(1, 1, 400, 4).unsqueeze(2)
    points[:, :, :, 50:] *= 1e-6
    found = find_clusters_reference(points, 20, 8.0, 1, seed=3)
    # One cluster takes the short points, as far as the cap allows; the seeds among the long ones keep theirs.
    assert int((found.counts > 0).sum()) >= 15
    again = find_clusters_reference(points, 20, 8.0, 1, seed=3)
    assert torch.equal(found.members, again.members)


def test_identical_points_cluster() -> None:
    points = torch.ones(1, 1, 1, 64, 4)
    found = find_clusters_reference(points, 8, 1.0, 2, seed=0)
    assert found.counts.tolist() == [[8] * 8]
    zero = find_clusters_reference(torch.zeros_like(points), 8, 1.0, 2, seed=0)
    assert zero.counts.tolist() == [[8] * 8]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dipole", [False, True])
def test_gradcheck(causal: bool, dipole: bool) -> None:
    inputs = [x.requires_grad_() for x in make_inputs(1, 2, 1, 9, 3)]
    settings = MuseSettings(clusters=2, block=4, dipole=dipole)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return muse_attention(query, key, value, causal, enable_gqa=True, settings=settings)

    assert torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives_are_refused(causal: bool) -> None:
    inputs = [x.requires_grad_() for x in make_inputs(1, 1, 1, 9, 4)]
    out = muse_attention(*inputs, causal, settings=MuseSettings(clusters=3, block=4))
    (grad,) = torch.autograd.grad(out.square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_fewer_tokens_than_clusters(count: int, causal: bool) -> None:
    """Blocks of 2: with 5 tokens the last one is not full."""
    inputs = [x.requires_grad_() for x in make_inputs(2, 4, 2, count, 3)]
    settings = MuseSettings(clusters=8, block=2)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return muse_attention(query, key, value, causal, enable_gqa=True, settings=settings)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("dipole", [False, True])
def test_gradients_are_those_of_autograd(dipole: bool) -> None:
    query, key, value = (x.requires_grad_() for x in make_inputs(1, 4, 2, 300, 8))
    settings = MuseSettings(clusters=10, dipole=dipole, seed=5)
    grad = make_points(1, 4, 300, 8, dtype=torch.float64, seed=9)
    out = muse_attention(query, key, value, enable_gqa=True, settings=settings)
    found = torch.autograd.grad(out, (query, key, value), grad)
    wide = [x.unsqueeze(2) for x in (query, key, value)]
    of_keys, of_queries = (find_clusters_reference(wide[n], 10, 1.5, 1, 6 - n) for n in (1, 0))
    again = attend_reference(*wide, of_queries, of_keys, 8**-0.5, dipole)[0].squeeze(2)
    torch.testing.assert_close(out, again)
    for one, other in zip(found, torch.autograd.grad(again, (query, key, value), grad), strict=True):
        torch.testing.assert_close(one, other)


def test_empty_clusters_count_for_nothing() -> None:
    query, key, value = make_inputs(1, 1, 1, 40, 4)
    key[:, :, 20:] = key[:, :, :20]  # twice the same: seeds may coincide, and clusters stay empty
    wide = [x.unsqueeze(2).requires_grad_() for x in (query, key, value)]
    own = find_clusters_reference(wide[1], 6, 8.0, 1, 0)
    empty = own._replace(
        members=torch.cat([own.members, own.members[:, :1]], dim=1),
        counts=torch.cat([own.counts, own.counts[:, :1] * 0], dim=1),
        centroids=torch.cat([own.centroids, own.centroids[:, :1] * 0], dim=1),
    )
    of_queries = find_clusters_reference(wide[0], 6, 2.0, 1, 0)
    found, expected = (attend_reference(*wide, of_queries, c, 0.5)[0] for c in (empty, own))
    torch.testing.assert_close(found, expected)
    gradient = torch.autograd.grad(found.square().sum(), wide)
    assert all(bool(torch.isfinite(x).all()) for x in gradient)


def test_means_round_to_the_points_dtype() -> None:
    points = make_points(1, 1, 50, 4, dtype=torch.bfloat16).unsqueeze(2)
    found = find_clusters_reference(points, 5, 2.0, 1, 0)
    assert found.centroids.dtype == torch.bfloat16
    means = average_members_reference(points.float(), found.members, found.counts)
    torch.testing.assert_close(found.centroids.float(), means, rtol=1e-2, atol=1e-2)


def test_refuses_what_does_not_fit() -> None:
    query, key, value = make_inputs(1, 4, 2, 20, 4)
    for arguments, part in (
        ((query, key, value), "enable_gqa"),
        ((query[0], key, value), r"expected \[batch"),
        ((query, key[..., :2], value[..., :2]), "head dim"),
        ((query[:, :, :10], key, value, True, None, True), "as many queries"),
        ((query, key.float(), value, False, None, True), "float dtype"),
        ((query[:, :3], key, value, False, None, True), "multiple"),
    ):
        with pytest.raises(InvalidArgumentError, match=part):
            muse_attention(*arguments)
    for name, value_ in (
        ("clusters", 0),
        ("clusters", 129),
        ("query_clusters", 0),
        ("cap", 0.9),
        ("iterations", 0),
        ("block", 0),
    ):
        with pytest.raises(InvalidArgumentError, match=f"MuSe's {name} is"):
            MuseSettings(**{name: value_})


TOKENS, BLOCK = 333, 32
IN_BLOCKS = MuseSettings(clusters=12, block=BLOCK, iterations=2)


def read_in_blocks(
    settings: MuseSettings, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """What a context's queries get, and what they get exactly."""
    query, key, value = (x.to(device) for x in make_inputs(1, 4, 2, TOKENS, 16, dtype))
    found = read_by(RangeAttention(settings, 1), query, key, value)
    return found, scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def read_by(attention: RangeAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kv_EN2D = torch.stack([key[0], value[0]], dim=2)
    outs = []
    for start in range(0, TOKENS, BLOCK):
        end = min(TOKENS, start + BLOCK)
        block = query[0, :, start:end].unflatten(0, (2, 2))
        own = kv_EN2D[:, start:end]
        outs.append(attention.attend(0, block, start, own, lambda first, last: kv_EN2D[:, first:last]).out)
    return torch.cat(outs, dim=2).flatten(0, 1)[None]


def test_blocks_attend_to_all_before_them() -> None:
    found, exact = read_in_blocks(MuseSettings(clusters=128, block=BLOCK, cap=8.0))
    assert error(found, exact) < 1e-4
    coarse, _ = read_in_blocks(IN_BLOCKS)
    assert 1e-4 < error(coarse, exact) < 0.15
    plain, _ = read_in_blocks(MuseSettings(clusters=12, block=BLOCK, iterations=2, dipole=False))
    assert error(coarse, exact) < error(plain, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_read_in_blocks(dtype: torch.dtype) -> None:
    found, exact = read_in_blocks(MuseSettings(clusters=128, block=BLOCK, cap=8.0), "cuda", dtype)
    assert error(found, exact) < (1e-4 if dtype == torch.float32 else 0.02)
    coarse, _ = read_in_blocks(IN_BLOCKS, "cuda", dtype)
    assert error(coarse, exact) < 0.15


def held_bytes(kept: object) -> int:
    """Memory of all tensors in what is kept, in tuples, lists, dictionaries and dataclasses."""
    if isinstance(kept, Tensor):
        return kept.nbytes
    if isinstance(kept, tuple | list | dict):
        return sum(map(held_bytes, kept.values() if isinstance(kept, dict) else kept))
    if is_dataclass(kept):
        return sum(held_bytes(getattr(kept, field.name)) for field in fields(kept))
    return held_bytes(vars(kept)) if isinstance(kept, RangeAttention) else 0


@pytest.mark.parametrize("settings", [IN_BLOCKS, MuseSettings(clusters=5, block=16, dipole=False)])
def test_what_a_layer_keeps_was_planned(settings: MuseSettings) -> None:
    """333 tokens end with two ranges of blocks of 32, and with two of 16 (20 blocks before the last)."""
    model = ModelIdentity("m", "llama", "0", "0", 1, 4, 2, 16, 100, 1000)
    query, key, value = make_inputs(1, 4, 2, TOKENS, 16, torch.float32)
    kv = torch.stack([key[0], value[0]], dim=2)
    attention = RangeAttention(settings, 1)
    most = 0
    for start in range(0, TOKENS, settings.block):
        block = slice(start, start + settings.block)
        attention.attend(
            0, query[0, :, block].unflatten(0, (2, 2)), start, kv[:, block], lambda a, b: kv[:, a:b]
        )
        most = max(most, held_bytes(attention))
    planned = planned_bytes(settings, model, TOKENS, torch.float32)
    assert 0 < most <= planned < 5 * most  # what a pass takes is planned, and is not kept


def test_a_pass_is_one_block() -> None:
    query, key, value = make_inputs(1, 2, 2, 40, 8, torch.float32)
    kv = torch.stack([key[0], value[0]], dim=2)
    attention = RangeAttention(MuseSettings(block=32), 1)
    for start, count in ((0, 40), (8, 8)):
        with pytest.raises(ValueError, match="not one block"):
            attention.attend(0, query[0, :, None, :count], start, kv[:, :count], lambda a, b: kv[:, a:b])


@pytest.mark.parametrize("kept_on_host", [False, True])
def test_capture_uses_it_for_the_context_and_not_for_prompts(kept_on_host: bool) -> None:
    identity = ModelIdentity("m", "llama", "0", "0", 1, 4, 2, 16, 100, 1000)
    query, key, value = make_inputs(1, 4, 2, TOKENS + 20, 16, torch.float32)
    plan = plan_sample(TOKENS, [20], 64, 0)
    block_tokens = 64 if kept_on_host else None
    attention = RangeAttention(IN_BLOCKS, 1)
    capture = Capture(identity, TOKENS, torch.float32, plan, "cpu", block_tokens, attention)
    outs = []
    for start in range(0, TOKENS, BLOCK):
        end = min(TOKENS, start + BLOCK)
        capture.begin_context_chunk(start, end - start)
        outs.append(capture.attend(0, *(x[0, :, start:end] for x in (query, key, value))))
    found = torch.cat(outs).transpose(0, 1)[None]
    torch.testing.assert_close(found, read_by(RangeAttention(IN_BLOCKS, 1), query, key, value))
    capture.begin_prompt_chunk(0, 0, 20)
    prompt = capture.attend(0, *(x[0, :, TOKENS:] for x in (query, key, value)))
    exact = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(prompt.transpose(0, 1), exact[0, :, TOKENS:])
    capture.close()


def test_a_job_says_how_it_attended(make_config: MakeConfig) -> None:
    exact = run(make_config()).manifest
    muse = {"attention": "muse", "muse_block": 64, "muse_clusters": 8}
    found = run(make_config(**muse)).manifest
    assert exact.prefill["attention"] == "exact"
    assert found.id != exact.id
    assert found.prefill["attention"] == "muse"
    assert found.prefill["muse_block"] == found.prefill["chunk"] == 64
    assert found.prefill["muse_dipole"] is True
    other = run(make_config(**muse, muse_dipole=False)).manifest
    assert len({found.id, other.id, exact.id}) == 3
    store = Store(make_config().store)
    with store.open(found.id) as context, store.open(exact.id) as whole:
        own, theirs = (c.array("kv", 1, 0).float() for c in (context, whole))
    assert torch.equal(own[:64], theirs[:64])
    assert error(own, theirs) > 0
    again = run(make_config(**muse, chunk=50))
    assert not again.created


def test_settings_are_checked(make_config: MakeConfig) -> None:
    for changes, part in (
        ({"attention": "fast"}, "--attention"),
        ({"muse_block": 512}, "--attention muse"),
        ({"attention": "muse", "muse_clusters": 500}, "clusters"),
        ({"attention": "muse", "muse_cap": 0.5}, "cap"),
    ):
        with pytest.raises(InvalidArgumentError, match=part):
            make_config(**changes)


def make_points(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 0.4, centres: int = 8
) -> Tensor:
    """[B, H, N, D] around centres of their own per head."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, count, dim = shape
    middles = torch.randn(batch, heads, centres, dim, generator=generator, dtype=torch.float64)
    own = torch.randint(0, centres, (batch, heads, count, 1), generator=generator)
    noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (middles.gather(2, own.expand(-1, -1, -1, dim)) + spread * noise).to(dtype)


def make_inputs(
    batch: int, heads: int, kv_heads: int, count: int, dim: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; values have no centres."""
    query = make_points(batch, heads, count, dim, dtype=dtype, seed=1)
    key = make_points(batch, kv_heads, count, dim, dtype=dtype, seed=2)
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(batch, kv_heads, count, dim, generator=generator, dtype=torch.float64)
    return query, key, value.to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, as a ratio of norms."""
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-12))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True, slots=True)
class Problem:
    """Inputs of every stage, as the stages before it leave them."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    query_clusters: BoundedClusters
    key_clusters: BoundedClusters
    summaries: Summaries
    moments: KeyValueMoments
    dipoles: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor
    scale: float
    group: int
    tolerance: float


def make_problem(dtype: torch.dtype, dim: int, group: int, clusters: int) -> Problem:
    """Views into longer tensors, with other strides for queries than for keys and values."""
    heads, ranges, queries, keys = 1, 2, 53, 70
    long = make_points(1, heads * group, ranges * 2 * keys, dim, seed=1).to(DEVICE, dtype)
    query = long.view(1, -1, ranges, 2 * keys, dim)[:, :, :, keys : keys + queries]
    pairs = make_points(1, ranges * keys, 2 * heads, dim, seed=2).to(DEVICE, dtype)
    key, value = pairs.view(1, ranges, keys, heads, 2, dim).permute(4, 0, 3, 1, 2, 5)
    of_queries = EAGER.find_clusters(query, clusters - 1, 1.5, 1, 1)
    of_keys = EAGER.find_clusters(key, clusters, 1.5, 1, 0)
    scale = dim**-0.5
    summaries = EAGER.summarise_keys(of_queries.centroids, key, value, of_keys, scale, group)
    moments = EAGER.covary_members(key, value, of_keys)
    dipoles = EAGER.mix_dipoles(summaries.logits, moments.covariances, group, ranges)
    out = make_points(1, heads * group, ranges * queries, dim, seed=3).to(DEVICE, dtype)
    lse = make_points(1, heads * group, ranges * queries, 1, seed=4).to(DEVICE)[..., 0] + 3
    grad = make_points(1, heads * group, ranges * queries, dim, seed=5).to(DEVICE, dtype)
    out, lse, grad = (x.view(1, heads * group, ranges, queries, *x.shape[3:]) for x in (out, lse, grad))
    EAGER.attend_summaries(query, of_queries, summaries, dipoles, scale, out, lse, True)
    clusters_ = of_queries, of_keys
    rest = summaries, moments, dipoles, out, lse, grad, scale, group, TOLERANCE[dtype]
    return Problem(query, key, value, *clusters_, *rest)


@pytest.fixture(
    scope="module",
    params=[
        (torch.float32, 16, 2, 5),
        (torch.float16, 64, 1, 17),
        pytest.param((torch.float32, 128, 1, 64), marks=ON_GPU),
        pytest.param((torch.bfloat16, 128, 4, 33), marks=ON_GPU),
        pytest.param((torch.bfloat16, 64, 1, 128), marks=ON_GPU),
    ],
    ids=str,
)
def problem(request: pytest.FixtureRequest) -> Problem:
    return make_problem(*request.param)


def assert_alike(found: object, expected: object, tolerance: float) -> None:
    """Tensors by their norms, dataclasses field by field."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert error(found, expected) < tolerance
    elif expected is None:
        assert found is None
    else:
        for name in expected.__slots__:  # type: ignore[attr-defined]
            assert_alike(getattr(found, name), getattr(expected, name), tolerance)


def test_summaries(problem: Problem) -> None:
    p = problem
    arguments = (p.query_clusters.centroids, p.keys, p.values, p.key_clusters, p.scale, p.group)
    assert_alike(kernels().summarise_keys(*arguments), EAGER.summarise_keys(*arguments), p.tolerance)


def test_moments_and_their_mixture(problem: Problem) -> None:
    p = problem
    assert_alike(kernels().covary_members(p.keys, p.values, p.key_clusters), p.moments, p.tolerance)
    arguments = (p.summaries.logits, p.moments.covariances, p.group, p.keys.shape[2])
    assert_alike(kernels().mix_dipoles(*arguments), p.dipoles, p.tolerance)
    grad = p.dipoles.flip(1).contiguous()
    logits, covariances, *rest = arguments
    found, expected = (
        backend.mix_dipoles_backward(logits, covariances, grad, *rest) for backend in (kernels(), EAGER)
    )
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, p.tolerance)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("dipole", [False, True])
def test_queries(problem: Problem, merge: bool, dipole: bool) -> None:
    p = problem
    results = []
    for backend in (kernels(), EAGER):
        out, lse = p.grad.clone(), p.lse.clone()
        backend.attend_summaries(
            p.queries,
            p.query_clusters,
            p.summaries,
            p.dipoles if dipole else None,
            p.scale,
            out,
            lse,
            merge,
        )
        results.append((out, lse))
    for one, other in zip(*results, strict=True):
        assert_alike(one, other, p.tolerance)


@pytest.mark.parametrize("dipole", [False, True])
def test_gradients_of_queries_and_summaries(problem: Problem, dipole: bool) -> None:
    p = problem
    dipoles = p.dipoles if dipole else None
    arguments = (p.queries, p.query_clusters, p.summaries, dipoles, p.scale, p.out, p.lse, p.grad)
    found, expected = (backend.attend_summaries_backward(*arguments) for backend in (kernels(), EAGER))
    assert_alike(found, expected, 2 * p.tolerance)


@pytest.mark.parametrize("dipole", [False, True])
def test_gradients_of_keys_and_values(problem: Problem, dipole: bool) -> None:
    p = problem
    grads: QueryGrads = EAGER.attend_summaries_backward(
        p.queries, p.query_clusters, p.summaries, p.dipoles, p.scale, p.out, p.lse, p.grad
    )
    rest = (p.moments, p.moments.covariances.flip(1).contiguous()) if dipole else (None, None)
    means = p.query_clusters.centroids
    found, expected = (
        backend.summarise_keys_backward(
            means, p.keys, p.values, p.key_clusters, p.summaries.logits, grads, p.scale, p.group, *rest
        )
        for backend in (kernels(), EAGER)
    )
    for one, other in zip(found, expected, strict=True):
        assert_alike(one, other, 2 * p.tolerance)
    finished = []
    for backend in (kernels(), EAGER):
        finished.append(grads.queries.clone())
        backend.finish_queries(finished[-1], p.query_clusters, expected[2], grads.sums)
    assert_alike(*finished, p.tolerance)


@pytest.mark.parametrize(
    ("count", "clusters", "cap"),
    [(100, 7, 1.0), (65, 20, 1.5), (20, 20, 1.0), pytest.param(2 * STRETCH + 5, 64, 1.3, marks=ON_GPU)],
)
def test_clusters(count: int, clusters: int, cap: float) -> None:
    # Few centres, so that many points find their cluster full and choose again.
    points = make_points(1, 2, count, 16, spread=0.3, centres=3).to(DEVICE).unsqueeze(2)
    seeds = draw_seeds(points, clusters, 0)
    reference = seeds_reference(points, clusters, 0)  # in any order
    assert torch.equal(seeds.sort(1).values, reference.sort(1).values)
    moved = move_centroids(points, seeds)
    assert_alike(moved, move_reference(points, seeds), 1e-5)
    members, counts = place_points(points, moved, cap)
    expected, expected_counts = place_reference(points, moved, cap)
    assert torch.equal(counts, expected_counts)
    filled = torch.arange(members.shape[2], device=DEVICE) < counts[..., None]
    assert torch.equal(members[filled], expected[filled])
    found, eager = (backend.find_clusters(points, clusters, cap, 2, 3) for backend in (kernels(), EAGER))
    assert torch.equal(found.counts, eager.counts)
    assert_alike(found.centroids, eager.centroids, 1e-5)


def test_stretches_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefill_worker.muse.kernels.clusters.STRETCH", 40)
    points = make_points(1, 1, 131, 16, spread=0.3, centres=3).to(DEVICE).unsqueeze(2)
    seeds = draw_seeds(points, 6, 0)
    members, counts = place_points(points, seeds, 1.1)
    expected, expected_counts = place_reference(points, seeds, 1.1)
    assert members.shape[2] == 3 * 9
    assert torch.equal(counts, expected_counts)
    filled = torch.arange(members.shape[2], device=DEVICE) < counts[..., None]
    assert torch.equal(members[filled], expected[filled])


@pytest.mark.parametrize("causal", [False, True])
def test_whole_attention(causal: bool) -> None:
    inputs = [make_points(1, heads, 41, 16, seed=seed).to(DEVICE) for seed, heads in enumerate((2, 1, 1))]
    results = []
    for backend in (kernels(), EAGER):
        leaves = [x.clone().requires_grad_() for x in inputs]
        settings = MuseSettings(clusters=4, block=14)
        out = muse_attention(*leaves, causal, enable_gqa=True, settings=settings, backend=backend)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert_alike(one, other, 1e-4)
