"""Query tables: what they score, how they are built, also by kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.query_tables.build_triton import (
    score_tables,
    score_tables_reference,
)
from index_store.indexes.query_tables.index import QueryTables
from index_store.indexes.query_tables.search_numba import (
    Lists,
    TableReads,
    insert_keys,
    insert_keys_reference,
    score_lists,
    score_lists_reference,
    softmax_sum_rows,
    softmax_sum_rows_reference,
    sum_rows,
    sum_rows_reference,
)
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.devices import DEVICE, DTYPES, crossed, make_kv
from tests.support.search import source

HEADS, SUBSPACES, CENTROIDS, KEYS = 2, 2, 3, 6
UNIFORM: dict[str, Scalar] = {"group": "pooled", "weights": "uniform"}
BACKOFF: dict[str, Scalar] = {**UNIFORM, "backoff_cosine": 0.5, "backoff_centroids": 2}
PROJECTED: dict[str, Scalar] = {"group": "pooled", "weights": "projection"}
BY_HEAD: dict[str, Scalar] = {"group": "per_head", "weights": "projection"}

DEGREES = (0.0, 80.0, 180.0)  # of the centroids
SCALES = torch.tensor([[0.5, 2.0], [0.25, 4.0]])  # [head, subspace]
TABLES = torch.tensor(  # [subspace, centroid, key]
    [
        [[10, 20, 30, -40, 7, 1], [60, -50, 40, -30, 20, -10], [-100, 90, 3, 5, -70, 11]],
        [[1, 2, -3, 4, 5, 6], [-7, 13, 17, -19, 23, 29], [31, 37, -41, 43, 47, -53]],
    ]
)

Layout = pytest.mark.parametrize("layout", ["dense", "lists"])


def direction(degrees: float) -> Tensor:
    return torch.tensor([math.cos(math.radians(degrees)), math.sin(math.radians(degrees))])


def parameters(layout: str) -> dict[str, Scalar]:
    return {
        "layout": layout,
        "subspaces": SUBSPACES,
        "centroids": CENTROIDS,
        "split": "contiguous",
        "scores": "dot",
        "alpha": 1.0,
        "iterations": 1,
    }


def tables(layout: str, first_subspace: tuple[float, ...] = DEGREES) -> QueryTables:
    """Two heads with the same integers and different scales. Lists hold every key."""
    centroids_MCB = torch.stack(
        [torch.stack([direction(angle) for angle in angles]) for angles in (first_subspace, DEGREES)]
    )
    arrays = {"centroids": centroids_MCB.repeat(HEADS, 1, 1, 1), "scales": SCALES}
    scores = TABLES.expand(HEADS, *TABLES.shape)
    if layout == "dense":
        arrays["scores"] = scores.to(torch.int8).contiguous()
    else:
        falling = scores.sort(dim=-1, descending=True)
        arrays["scores"] = falling.values.to(torch.int16)
        arrays["ids"] = falling.indices.to(torch.int32)
    return QueryTables.from_arrays(parameters(layout), arrays, torch.zeros(HEADS, KEYS, 2, 2 * SUBSPACES))


def expand(*group: Tensor) -> Tensor:
    """Queries [H, 1, G, D] of one position, the same in both heads."""
    return torch.stack(group).expand(HEADS, 1, len(group), 2 * SUBSPACES).contiguous()


def rank(layout: str, search: dict[str, Scalar], *group: Tensor) -> Tensor:
    """Scores [H, KEYS] for one position and its group of queries."""
    return tables(layout).rank(expand(*group), 0, KEYS, None, search).scores()[:, 0]


def query(first: float, second: float, lengths: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """The query with these angles, in degrees, and lengths in the two subspaces."""
    return torch.cat([direction(first) * lengths[0], direction(second) * lengths[1]])


def weighted(weights: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    """Scores [H, KEYS] when the rows of subspace b count with weights[b], one weight per centroid."""
    weights_MC = torch.tensor(weights, dtype=torch.float32)
    rows_MN = (weights_MC[..., None] * TABLES).sum(1)
    return torch.einsum("hm,mn->hn", SCALES, rows_MN)


@Layout
def test_the_nearest_row_of_every_subspace_counts_with_its_own_scale(layout: str) -> None:
    scores = rank(layout, UNIFORM, query(70, 190))
    torch.testing.assert_close(scores, weighted(((0, 1, 0), (0, 0, 1))))


@Layout
@pytest.mark.parametrize("length", [0.01, 1.0, 70.0])
def test_uniform_weights_are_one_whatever_the_length_of_the_query(layout: str, length: float) -> None:
    scores = rank(layout, UNIFORM, query(10, 85, (length, 3 * length)))
    torch.testing.assert_close(scores, weighted(((1, 0, 0), (0, 1, 0))))


@Layout
def test_projection_weighs_a_row_by_the_query_along_its_centroid(layout: str) -> None:
    scores = rank(layout, PROJECTED, query(20, 80, (3.0, 0.5)))
    expected = weighted(((3 * math.cos(math.radians(20)), 0, 0), (0, 0.5, 0)))
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-4)


@Layout
def test_a_projection_never_weighs_less_than_nothing(layout: str) -> None:
    one_sided = tables(layout, (50.0, 60.0, 70.0))
    away = expand(query(220, 0, (5.0, 2.0)))
    scores = one_sided.rank(away, 0, KEYS, None, PROJECTED).logits_HTGM[:, 0, 0]
    torch.testing.assert_close(scores, weighted(((0, 0, 0), (2, 0, 0))), rtol=1e-5, atol=1e-4)


@Layout
@pytest.mark.parametrize("length", [0.01, 1.0, 70.0])
@pytest.mark.parametrize(
    ("degrees", "weights"),
    [
        (-50.0, (1.0, 0.0, 0.0)),
        (-59.0, (1.0, 0.0, 0.0)),  # cosine 0.515
        (-61.0, (0.5, 0.0, 0.5)),  # cosine 0.485; the next centroid is the one at 180 degrees
        (-110.0, (0.5, 0.0, 0.5)),  # cosine 0.342 to 180 degrees; the next one is at 0
        (-125.0, (0.0, 0.0, 1.0)),
    ],
)
def test_backoff_shares_the_weight_below_the_cosine_and_not_above(
    layout: str, degrees: float, weights: tuple[float, float, float], length: float
) -> None:
    scores = rank(layout, BACKOFF, query(degrees, 82, (length, length)))
    torch.testing.assert_close(scores, weighted((weights, (0.0, 1.0, 0.0))), rtol=1e-5, atol=1e-4)


@Layout
def test_each_subspace_backs_off_for_itself(layout: str) -> None:
    scores = rank(layout, BACKOFF, query(3, -70))
    torch.testing.assert_close(scores, weighted(((1.0, 0.0, 0.0), (0.5, 0.0, 0.5))), rtol=1e-5, atol=1e-4)


@Layout
def test_the_pooled_query_is_the_mean_of_the_group(layout: str) -> None:
    # The mean points at 80 degrees in subspace 0, where none of the queries points, and is as long as calculated.
    group = [query(0, 0, (4.0, 1.0)), query(110, 0, (6.0, 2.0)), query(110, 0, (2.0, 6.0))]
    mean = torch.stack(group).mean(0)
    centroid = direction(DEGREES[1])
    expected = weighted(((0, float(mean[:2] @ centroid), 0), (3.0, 0, 0)))
    assert [int(q[:2] @ centroid > q[:2] @ direction(0)) for q in group] == [0, 1, 1]
    torch.testing.assert_close(rank(layout, PROJECTED, *group), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(rank(layout, UNIFORM, *group), rank(layout, UNIFORM, mean))


@Layout
def test_each_head_of_the_group_votes_with_its_softmax(layout: str) -> None:
    group = [query(0, 180, (0.05, 0.01)), query(80, 0, (0.1, 0.02))]
    first = weighted(((0.05, 0, 0), (0, 0, 0.01)))
    second = weighted(((0, 0.1, 0), (0.02, 0, 0)))
    expected = (first.softmax(-1) + second.softmax(-1)) / 2
    scores = rank(layout, BY_HEAD, *group)
    scores = scores / scores.sum(-1, keepdim=True)  # their scale means nothing
    torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-6)


def build(layout: str, split: str, scores: str, alpha: float) -> tuple[QueryTables, Tensor]:
    """An index over random keys, and the exact scores [H, m, C, N] of its own centroids."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 150, 12, generator=generator)
    sample = QuerySample(torch.randn(2, 50, 2, 12, generator=generator), torch.arange(50))
    options = {**parameters(layout), "subspaces": 3, "centroids": 5, "split": split, "iterations": 4}
    index = QueryTables.build({**options, "scores": scores, "alpha": alpha}, source(keys, sample), 0)
    slices = keys.view(2, 150, 4, 3).transpose(2, 3) if split == "strided" else keys.view(2, 150, 3, 4)
    if scores == "cosine":
        slices = slices / slices.norm(dim=-1, keepdim=True)
    exact = torch.einsum("hnmb,hmcb->hmcn", slices.double(), index.arrays()["centroids"].double())
    return index, exact


Splits = pytest.mark.parametrize("split", ["strided", "contiguous"])
Scores = pytest.mark.parametrize("scores", ["dot", "cosine"])


@Splits
@Scores
@pytest.mark.parametrize(("alpha", "length"), [(0.2, 30), (0.201, 31), (0.001, 1), (1.0, 150)])
def test_lists_hold_the_best_keys_of_every_centroid(
    split: str, scores: str, alpha: float, length: int
) -> None:
    index, exact = build("lists", split, scores, alpha)
    arrays = index.arrays()
    ids = arrays["ids"].long()
    assert ids.shape == arrays["scores"].shape == (*exact.shape[:3], length)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    expected = exact.topk(length, dim=-1).values
    torch.testing.assert_close(exact.gather(-1, ids), expected, rtol=0, atol=1e-5)
    scales = exact.abs().amax((2, 3)) / 32767
    torch.testing.assert_close(arrays["scales"].double(), scales, rtol=1e-5, atol=0)
    stored = arrays["scores"].double() * scales[..., None, None]
    torch.testing.assert_close(stored, expected, rtol=0, atol=float(scales.max()))


@Splits
@Scores
def test_dense_tables_hold_every_score_at_one_scale_per_subspace(split: str, scores: str) -> None:
    index, exact = build("dense", split, scores, 0.2)
    scales = exact.abs().amax((2, 3)) / 127
    torch.testing.assert_close(index.arrays()["scales"].double(), scales, rtol=1e-5, atol=0)
    stored = index.arrays()["scores"].double() * scales[..., None, None]
    assert ((stored - exact).abs() <= 0.5001 * scales[..., None, None]).all()


@pytest.mark.parametrize("layout", ["dense", "lists"])
def test_channels_that_only_pad_do_no_harm(layout: str) -> None:
    """A model whose keys are narrower than its values has some: queries and keys are zero there."""
    generator = torch.Generator().manual_seed(1)
    keys, queries = (
        torch.randn(2, 150, 12, generator=generator),
        torch.randn(2, 50, 2, 12, generator=generator),
    )
    keys[..., 8:], queries[..., 8:] = 0.0, 0.0
    options = {**parameters(layout), "subspaces": 3, "centroids": 5, "split": "contiguous"}
    index = QueryTables.build(options, source(keys, QuerySample(queries, torch.arange(50))), 0)
    assert not index.arrays()["scores"][:, 2].any()
    with pytest.raises(InvalidArgumentError, match="all are zero"):
        QueryTables.build(options, source(keys, QuerySample(0.0 * queries, torch.arange(50))), 0)


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


def some_lists(seed: int, capacity: int = 30, keys: int = 100) -> Lists:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-500, 500, (2, 6, keys), dtype=torch.int16, generator=generator)
    top = values.float().topk(capacity, dim=-1, sorted=True)
    return Lists(
        top.indices.to(torch.int32),
        top.values.to(torch.int16),
        torch.full((2, 6), capacity, dtype=torch.int32),
        torch.zeros(2, 6, 200, dtype=torch.int32),
        torch.zeros(2, 6, 200, dtype=torch.int16),
        torch.zeros(2, 6, dtype=torch.int32),
    )


@pytest.mark.parametrize("seed", range(5))
def test_insert_keys_equals_reference_and_never_grows(seed: int) -> None:
    lists, expected = some_lists(seed), some_lists(seed)
    scores = torch.randint(
        -600, 700, (2, 150, 6), dtype=torch.int16, generator=torch.Generator().manual_seed(seed)
    )
    for begin in (0, 1, 70):
        block = scores[:, begin : {0: 1, 1: 70, 70: 150}[begin]].contiguous()
        insert_keys(lists, block, 100 + begin)
        insert_keys_reference(expected, block, 100 + begin)
    assert torch.equal(lists.kept_HS, expected.kept_HS)
    assert torch.equal(lists.inserted_HS, expected.inserted_HS)
    assert (lists.kept_HS + lists.inserted_HS == 30).all()
    filled = torch.arange(200) < lists.inserted_HS[..., None]
    assert torch.equal(lists.inserted_values_HSE[filled], expected.inserted_values_HSE[filled])
    assert torch.equal(lists.inserted_ids_HSE[filled], expected.inserted_ids_HSE[filled])


@pytest.mark.parametrize("floor_missing", [True, False])
@pytest.mark.parametrize(("first", "columns"), [(0, 250), (8, 130)])
def test_score_lists_equals_reference(floor_missing: bool, first: int, columns: int) -> None:
    lists = some_lists(7)
    generator = torch.Generator().manual_seed(3)
    insert_keys(lists, torch.randint(0, 700, (2, 90, 6), dtype=torch.int16, generator=generator), 100)
    rows = torch.randint(0, 6, (2, 4, 3), dtype=torch.int32, generator=generator)
    weights = torch.rand(2, 4, 3, generator=generator)
    weights[0, 1] = 0.0
    out = torch.full((2, 4, columns), torch.nan)
    expected = out.clone()
    score_lists(lists, rows, weights, first, floor_missing, out)
    score_lists_reference(lists, rows, weights, first, floor_missing, expected)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-2)


def some_reads(picks: int, first: int, end: int, group: int = 3, scale: float = 0.02) -> TableReads:
    """Tables of 40,003 context keys and 5,000 appended ones, with slack after each row as growing buffers have."""
    generator = torch.Generator().manual_seed(picks)
    tables, appended = (
        torch.randint(-127, 128, (2, 40, size), dtype=torch.int8, generator=generator)
        for size in (40_010, 5_008)
    )
    rows = torch.randint(0, 40, (2, 2, group, picks), dtype=torch.int32, generator=generator)
    weights = torch.randn(2, 2, group, picks, generator=generator) * scale
    return TableReads(tables[..., :40_003], appended[..., :5_000], rows, weights, first, end)


RANGES = [(0, 1), (3, 4999), (0, 40_003), (2047, 2050), (39_000, 45_003), (40_003, 40_100), (41_000, 44_000)]


@crossed(
    {
        "picks": [1, 4, 7, 16],
        "first, end": RANGES,
    }
)
def test_sum_rows_equals_reference(picks: int, first: int, end: int) -> None:
    reads = some_reads(picks, first, end)
    torch.testing.assert_close(sum_rows(reads), sum_rows_reference(reads), rtol=1e-4, atol=1e-4)


@crossed(
    {
        "group": [1, 2, 5],
        "scale": [0.0, 0.01, 0.3],
        "first, end": RANGES,
    }
)
def test_softmax_sum_rows_equals_reference(group: int, scale: float, first: int, end: int) -> None:
    reads = some_reads(8, first, end, group, scale)
    expected = softmax_sum_rows_reference(reads)
    torch.testing.assert_close(softmax_sum_rows(reads), expected, rtol=1e-3, atol=1e-7)


def test_an_empty_range_gives_empty_scores() -> None:
    reads = some_reads(4, 7, 7)
    assert sum_rows(reads).shape == (2, 2, 3, 0)
    assert softmax_sum_rows(reads).shape == (2, 2, 0)
