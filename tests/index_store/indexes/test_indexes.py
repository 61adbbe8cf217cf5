"""What every index promises, whatever its kind and layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.coarse_rows.index import CoarseRows
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface import layer_index as many_queries
from index_store.indexes.interface.layer_index import (
    AppendedKeys,
    GrowingRows,
    LayerIndex,
    LayerSource,
    all_finite,
    are_many,
)
from index_store.indexes.key_clusters.index import ClusterTree, KeyClusters
from index_store.indexes.key_pages import Pages
from index_store.indexes.query_tables.index import QueryTables, sum_rows_by_products
from index_store.indexes.query_tables.search_numba import TableReads, sum_rows_reference
from index_store.indexes.registry import INDEX_KINDS
from index_store.memory.arena import Arena
from index_store.methods.method import INDEX_SPECS
from index_store.methods.presets import get_method
from index_store.selection.budgets import Ratio
from index_store.selection.cutting import cut
from index_store.selection.ranking import Ranking
from index_store.store.catalog import Store
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.search import rows, source, step
from tests.support.store import indexed_context

HEADS, KEYS, DIM, GROUP = 2, 700, 32, 3
PLANTED = KEYS + 30
"""Where among the appended keys one is that a query looks for."""
POSITION = PLANTED + 64
"""Of queries: as far behind that key as indexes with windowed RoPE take every key to be."""
FREQUENCIES = 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))


def small(name: str, **changes: Scalar) -> dict[str, Scalar]:
    """Parameters of a listed index, of sizes for a few hundred keys."""
    return {**INDEX_SPECS[name].parameters, **changes}


DENSE = small("query_tables", subspaces=8, iterations=5, centroids=16)
PROJECTED: dict[str, Scalar] = {"group": "per_head", "weights": "projection"}
UNIFORM: dict[str, Scalar] = {"group": "pooled", "weights": "uniform"}
BACKOFF: dict[str, Scalar] = {**UNIFORM, "backoff_cosine": 0.5, "backoff_centroids": 2}
CLUSTERS = small(
    "key_clusters",
    keys_per_cluster=4,
    metric="euclidean",
    block=300,
    iterations=5,
    moments="diagonal",
    sinks=0,
)
WINDOWED: dict[str, Scalar] = {**CLUSTERS, "window": 64}
TREE: dict[str, Scalar] = {"keys_per_coarse": 50}
COARSE = small("coarse_rows", iterations=3)


@dataclass(frozen=True)
class Case:
    name: str
    kind: type[LayerIndex]
    parameters: Mapping[str, Scalar]
    search: Mapping[str, Scalar]
    recall: float  # of the true top 5 %, on clustered queries


CASES = [
    Case("exact", ExactIndex, {}, {}, 1.0),
    Case("dense", QueryTables, DENSE, PROJECTED, 0.6),
    Case("dense contiguous", QueryTables, {**DENSE, "split": "contiguous"}, PROJECTED, 0.6),
    Case("dense pooled", QueryTables, DENSE, {**PROJECTED, "group": "pooled"}, 0.3),
    Case("lists", QueryTables, {**DENSE, "layout": "lists"}, PROJECTED, 0.4),
    Case(
        "paper",
        QueryTables,
        {**DENSE, "layout": "lists", "split": "contiguous", "scores": "cosine"},
        BACKOFF,
        0.12,
    ),
    Case("clusters", KeyClusters, CLUSTERS, {}, 0.2),
    Case("tree", ClusterTree, {**CLUSTERS, **TREE}, {"coarse_keep": 0.5}, 0.2),
    Case("windowed clusters", KeyClusters, WINDOWED, {}, 0.0),  # which see these keys from elsewhere
    Case("windowed tree", ClusterTree, {**WINDOWED, **TREE}, {"coarse_keep": 0.5}, 0.0),
    Case("pages", Pages, {"size": 4}, {}, 0.1),  # no locality in this data; chance is 0.05
    Case("coarse", CoarseRows, COARSE, {}, 0.85),
    Case("coarse 3 and 2 bits", CoarseRows, {**COARSE, "key_bits": 3, "value_bits": 2}, {}, 0.7),
]


def data(seed: int = 0) -> tuple[torch.Tensor, QuerySample, torch.Tensor]:
    """Keys, a query sample, and fresh queries [H, 5, G, D] scaled by 1/sqrt(D), around shared directions."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(HEADS, KEYS, DIM, generator=generator) * 2
    topics = torch.randn(HEADS, 12, DIM, generator=generator) * 2

    def near(count: int) -> torch.Tensor:
        chosen = topics[:, torch.randint(0, 12, (count * GROUP,), generator=generator)]
        noise = torch.randn(HEADS, count, GROUP, DIM, generator=generator)
        return chosen.view(HEADS, count, GROUP, DIM) + 0.5 * noise

    return keys, QuerySample(near(200), torch.arange(200)), near(5) / DIM**0.5


BY_KEY = [case for case in CASES if not issubclass(case.kind, KeyClusters)]
"""Those whose items do not follow the batches that keys came in."""


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


def build(case: Case, keys: torch.Tensor, sample: QuerySample) -> LayerIndex:
    return case.kind.build(case.parameters, source(keys, sample, frequencies=FREQUENCIES), seed=0)


def rank(
    case: Case,
    index: LayerIndex,
    queries: torch.Tensor,
    first: int,
    end: int,
    own: AppendedKeys | None = None,
) -> Ranking:
    return index.rank(queries, first, end, own, case.search, POSITION)


def test_every_kind_has_a_class_and_a_case() -> None:
    assert set(INDEX_CLASSES) == set(INDEX_KINDS), "INDEX_CLASSES of classes.py has a class for every kind"
    assert {case.kind for case in CASES} == {*INDEX_CLASSES.values()}, "CASES has a Case for every class"


def test_ids_are_valid_unique_and_inside_the_range(case: Case) -> None:
    keys, sample, queries = data()
    ranking = rank(case, build(case, keys, sample), queries, 8, 650)
    selection = cut(Ratio(0.1), ranking, step(KEYS))
    for head in range(HEADS):
        for position in range(5):
            ids = selection.ids_HTK[head, position, : selection.counts_HT[head, position]]
            assert len(ids) == len(set(ids.tolist())) > 0
            assert int(ids.min()) >= 8
            assert int(ids.max()) < 650


def test_finds_most_of_the_true_top_keys(case: Case) -> None:
    keys, sample, queries = data()
    keep = Ratio(0.05)
    true = cut(keep, ExactIndex(keys).rank(queries, 0, KEYS, None, {}), step(KEYS)).ids_HTK
    ranking = rank(case, build(case, keys, sample), queries, 0, KEYS)
    found = cut(keep, ranking, step(KEYS)).ids_HTK
    hits = [
        len(set(true[h, t].tolist()) & set(found[h, t].tolist())) / true.shape[-1]
        for h in range(HEADS)
        for t in range(5)
    ]
    recall = sum(hits) / len(hits)
    assert recall >= case.recall, (
        f"recall is {recall:.2f}; chance, .05, is no index: is a floor below that one?"
    )


def test_arrays_restore_the_same_index(case: Case) -> None:
    keys, sample, queries = data()
    index = build(case, keys, sample)
    stored = {name: array.clone() for name, array in index.arrays().items()}
    restored = case.kind.from_arrays(case.parameters, stored, rows(keys))
    assert restored.nbytes == index.nbytes
    expected = rank(case, index, queries, 3, KEYS).logits_HTGM
    assert torch.equal(rank(case, restored, queries, 3, KEYS).logits_HTGM, expected)


def test_the_store_gives_back_the_same_index_without_copies(case: Case, tmp_path: Path) -> None:
    samples = [data(layer) for layer in range(3)]
    kv = torch.stack([torch.stack([keys, -keys], dim=2) for keys, _, _ in samples]).bfloat16()
    built = [
        case.kind.build(case.parameters, LayerSource(kv[layer], samples[layer][1], FREQUENCIES), seed=0)
        for layer in (1, 2)
    ]
    store = Store(tmp_path / "store", create=True)
    id_ = indexed_context("contract", case.parameters, built, kv, GROUP).write(store)
    assert store.verify(id_) == []
    with Arena(1 << 24).acquire(store, id_) as resident:
        block = resident.kv(0).untyped_storage().data_ptr()
        for layer, index in zip((1, 2), built, strict=True):
            restored = resident.index("contract", layer)
            assert type(restored) is case.kind
            expected = index.arrays()
            assert restored.arrays().keys() == expected.keys()
            for name, array in restored.arrays().items():
                assert array.untyped_storage().data_ptr() == block
                assert torch.equal(array, expected[name])
            both = [(index, index.start_appending()), (restored, restored.start_appending())]
            scores = []
            for one, appended in both:
                appended.append(torch.ones(HEADS, 20, 2, DIM))
                ranking = rank(case, one, samples[layer][2], 5, KEYS + 20, appended)
                scores.append(ranking.logits_HTGM)
            assert torch.equal(*scores)


def test_build_is_deterministic(case: Case) -> None:
    keys, sample, _ = data()
    first, second = build(case, keys, sample).arrays(), build(case, keys, sample).arrays()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    if "iterations" in case.parameters and not isinstance(case.parameters.get("coding"), str):  # k-means
        other = case.kind.build(
            case.parameters, source(keys, sample, frequencies=FREQUENCIES), seed=99
        ).arrays()
        assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("sizes", [[1] * 9, [127, 1, 1], [84, 128, 60]])
@pytest.mark.parametrize("case", BY_KEY, ids=lambda case: case.name)
def test_keys_appended_in_pieces_are_those_appended_at_once(case: Case, sizes: list[int]) -> None:
    keys, sample, queries = data()
    index, count = build(case, keys, sample), sum(sizes)
    new = rows(torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(7)))
    pieces, whole = index.start_appending(), index.start_appending()
    whole.append(new)
    for piece in (new[:, :0], *new.split(sizes, dim=1), new[:, :0]):
        pieces.append(piece)
    assert pieces.count == count
    found, expected = (
        rank(case, index, queries, 3, KEYS + count, own).logits_HTGM for own in (pieces, whole)
    )
    assert torch.equal(found, expected)


def test_an_appended_key_is_found_and_shared_arrays_stay_untouched(case: Case) -> None:
    keys, sample, queries = data()
    index = build(case, keys, sample)
    before = {name: array.clone() for name, array in index.arrays().items()}
    appended = index.start_appending()
    generator = torch.Generator().manual_seed(5)
    appended.append(rows(torch.randn(HEADS, 30, DIM, generator=generator)))
    # A key along the pooled query is the best key of every head of the group.
    target = queries[:, :1].mean(2) * DIM
    appended.append(rows(target))
    appended.append(rows(torch.randn(HEADS, 9, DIM, generator=generator).bfloat16()))
    assert appended.count == 40
    assert appended.nbytes > 0
    ranking = rank(case, index, queries[:, :1], 0, KEYS + 40, appended)
    selection = cut(Ratio(0.02), ranking, step(KEYS + 40))
    for head in range(HEADS):
        assert PLANTED in selection.ids_HTK[head, 0, : selection.counts_HT[head, 0]].tolist()
    assert all(torch.equal(before[name], array) for name, array in index.arrays().items())


def test_two_sessions_append_apart(case: Case) -> None:
    keys, sample, queries = data()
    index = build(case, keys, sample)
    one, two = index.start_appending(), index.start_appending()
    block = rows(torch.randn(HEADS, 20, DIM, generator=torch.Generator().manual_seed(6)))
    one.append(block)
    two.append(-block)
    two.append(block)
    alone = index.start_appending()
    alone.append(block)
    scores = rank(case, index, queries, 0, KEYS + 20, one).logits_HTGM
    assert torch.equal(scores, rank(case, index, queries, 0, KEYS + 20, alone).logits_HTGM)
    assert not torch.equal(scores, rank(case, index, queries, 0, KEYS + 20, two).logits_HTGM)


def test_a_fork_goes_on_apart(case: Case) -> None:
    keys, sample, queries = data()
    index = build(case, keys, sample)
    first, then, other = (
        rows(torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(count)))
        for count in (20, 9, 10)
    )
    one, alone = index.start_appending(), index.start_appending()
    for appended in (one, alone):
        appended.append(first)
        rank(case, index, queries, 0, KEYS + 20, appended)
    fork = one.fork()
    one.append(other)
    fork.append(then)
    alone.append(then)
    assert (one.count, fork.count) == (30, 29)
    assert fork.nbytes == alone.nbytes
    scores = rank(case, index, queries, 0, KEYS + 29, fork).logits_HTGM
    assert torch.equal(scores, rank(case, index, queries, 0, KEYS + 29, alone).logits_HTGM)


def test_keys_that_are_not_held_and_strangers_are_refused(case: Case) -> None:
    keys, sample, queries = data()
    index = build(case, keys, sample)
    with pytest.raises(InvalidArgumentError, match="holds 700"):
        rank(case, index, queries, 0, KEYS + 1)
    own = index.start_appending()
    own.append(rows(keys[:, :3]))
    with pytest.raises(InvalidArgumentError, match="holds 703"):
        rank(case, index, queries, 0, KEYS + 4, own)
    for odd in (rows(keys[:1, :3]), rows(keys[:, :3, :8]), keys):
        with pytest.raises(InvalidArgumentError, match=r"appended keys .* expected \[2, T, 2, 32\]"):
            own.append(odd)
    assert own.count == 3
    other = next(one for one in CASES if one.kind is (Pages if case.kind is ExactIndex else ExactIndex))
    stranger = build(other, keys, sample).start_appending()
    for count in (0, 3):
        stranger.append(rows(keys[:, :count]))
        with pytest.raises(InvalidArgumentError, match=type(stranger).__name__):
            rank(case, index, queries, 0, KEYS + count, stranger)


def test_unknown_and_missing_options_are_refused(case: Case) -> None:
    case.kind.check_options(case.parameters, case.search)
    unknown = {**case.parameters, "colour": 3}
    for parameters, search in ((unknown, case.search), (case.parameters, {**case.search, "colour": 3})):
        with pytest.raises(InvalidArgumentError, match=r"colour|no search options"):
            case.kind.check_options(parameters, search)
    for name in case.parameters:
        with pytest.raises(InvalidArgumentError, match="is missing"):
            case.kind.check_options(
                {key: each for key, each in case.parameters.items() if key != name}, case.search
            )


def test_raw_projected_scores_approximate_true_products() -> None:
    keys, sample, queries = data()
    index = build(CASES[1], keys, sample)
    single = queries[:, :, :1]
    scores = index.rank(single, 0, KEYS, None, {**PROJECTED, "group": "pooled"}).logits_HTGM[:, :, 0]
    true = torch.einsum("htgd,hnd->htn", single, keys)
    correlation = torch.corrcoef(torch.stack([scores.flatten(), true.flatten()]))[0, 1]
    assert correlation > 0.85
    assert 0.6 < float(scores.std() / true.std()) <= 1.05


def test_lists_with_full_capacity_rank_like_dense_tables() -> None:
    keys, sample, queries = data()
    dense = QueryTables.build(DENSE, source(keys, sample), 0)
    lists = QueryTables.build({**DENSE, "layout": "lists", "alpha": 1.0}, source(keys, sample), 0)
    search = {**PROJECTED, "group": "pooled"}
    one = dense.rank(queries, 0, KEYS, None, search).logits_HTGM
    two = lists.rank(queries, 0, KEYS, None, search).logits_HTGM
    assert float((one - two).abs().max()) < 0.02 * float(one.abs().max())


def test_bytes_per_token_are_those_that_more_keys_take(case: Case) -> None:
    keys, sample, _ = data()
    more = torch.cat([keys, keys, keys], dim=1)
    taken = build(case, more, sample).nbytes - build(case, keys, sample).nbytes
    expected = case.kind.parameters_type.parse(case.parameters).bytes_per_token(DIM)
    assert taken / (2 * HEADS * KEYS) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_what_is_no_number_is_refused(case: Case) -> None:
    """Among keys, and among values where a remainder is computed over the index."""
    keys, sample, _ = data()
    for part in (0,) if case.kind.divides_into is None else (0, 1):
        for bad in (torch.nan, torch.inf):
            kv = rows(keys).clone()
            kv[1, 3, part, 1] = bad
            with pytest.raises(InvalidArgumentError, match=r"NaN|float16"):
                case.kind.build(case.parameters, LayerSource(kv, sample, FREQUENCIES), 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_single_bad_element_is_found(bad: float, dtype: torch.dtype) -> None:
    kv = torch.randn(2, 50, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    kv[0, 0, 0, 0] = torch.finfo(dtype).max
    assert all_finite(kv)
    kv[1, 49, 1, 15] = bad
    assert not all_finite(kv)
    assert all_finite(kv[:, :, 0])
    assert all_finite(kv[:, :0])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POSITIONS, FEW_KEYS, APPENDED = 5, 90, 20
RANGES = [(0, 90), (7, 64), (8, 101), (95, 110), (50, 50)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("first", "end"), RANGES)
def test_rows_of_tables(first: int, end: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_queries, "_TILE_BYTES", 4 * HEADS * 32 * 13)
    generator = torch.Generator().manual_seed(first)

    def table(columns: int) -> Tensor:
        return torch.randint(-127, 128, (HEADS, 32, columns), dtype=torch.int8, generator=generator).to(
            device
        )

    rows = torch.randint(0, 32, (HEADS, POSITIONS, GROUP, 6), dtype=torch.int32, generator=generator)
    weights = torch.rand(rows.shape, generator=generator)
    reads = TableReads(table(FEW_KEYS), table(APPENDED), rows.to(device), weights.to(device), first, end)
    found = sum_rows_by_products(reads)
    assert found.shape == (HEADS, POSITIONS, GROUP, end - first)
    torch.testing.assert_close(found, sum_rows_reference(reads), rtol=1e-4, atol=1e-2)


def test_only_devices_are_asked_so() -> None:
    assert not are_many(torch.empty(1, 500, 4))
    assert are_many(torch.empty(1, 16, 4, device="meta"))
    assert not are_many(torch.empty(1, 15, 4, device="meta"))


@pytest.mark.parametrize("device", DEVICES)
def test_an_index_ranks_many_queries_like_few(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 positions of 2 heads are multiplied, 20 of them looked up; on the CPU, too, which is taken for a device."""
    monkeypatch.setattr(many_queries, "on_host", lambda tensor: False)
    generator = torch.Generator(device).manual_seed(0)
    kv = torch.randn(2, 700, 2, 64, generator=generator, device=device)
    queries = torch.randn(2, 300, 2, 64, generator=generator, device=device)
    assert are_many(queries)
    assert not are_many(queries[:, :20])
    method = get_method("csattention")
    spec = method.index
    source = LayerSource(kv, QuerySample(queries, torch.arange(300)))
    index = INDEX_CLASSES[spec.kind].build(spec.parameters, source, 0)
    asked = queries / 8
    whole = index.rank(asked, 5, 650, None, method.search, 700).logits_HTGM
    few = [
        index.rank(asked[:, at : at + 20], 5, 650, None, method.search, 700).logits_HTGM
        for at in range(0, 300, 20)
    ]
    torch.testing.assert_close(whole, torch.cat(few, dim=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("piece", [1, 7, 100, 300])
def test_rows_stay_and_room_depends_on_their_number_alone(piece: int) -> None:
    wanted = torch.randn(2, 300, 3)
    grown = GrowingRows(2, 3)
    for part in wanted.split(piece, dim=1):
        grown.append(part)
    assert torch.equal(grown.rows, wanted)
    assert (grown.count, grown.capacity, grown.nbytes) == (300, 512, 2 * 512 * 3 * 4)


def test_a_buffer_never_grows_beyond_its_limit() -> None:
    grown = GrowingRows(1, 2, limit=100)
    grown.append(torch.ones(1, 70, 2))
    assert grown.capacity == 100


def test_rows_with_addresses_stay_where_they_are_and_hold_their_room_alone() -> None:
    wanted, grown = torch.randn(2, 300, 3), GrowingRows(2, 3, addressed=256)
    assert grown.nbytes == 0
    places = set()
    for part in wanted.split(50, dim=1):
        grown.append(part)
        places.add(grown.buffer.data_ptr())
        assert grown.nbytes == 2 * grown.capacity * 3 * 4
        assert len(places) == (1 if grown.count <= 256 else 2)
    assert torch.equal(grown.rows, wanted)
    assert torch.equal(grown.fork().rows, wanted)
    assert grown.capacity == 512


def test_rows_are_written_again_from_a_position_on() -> None:
    grown = GrowingRows(1)
    grown.append(torch.arange(5.0)[None])
    grown.put(2, torch.tensor([[9.0]]))
    assert grown.rows.tolist() == [[0.0, 1.0, 9.0]]
    with pytest.raises(InvalidArgumentError, match=r"rows 3\.\.4 were never written"):
        grown.put(5, torch.ones(1, 1))
