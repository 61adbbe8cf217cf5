"""Parameters and search options out of range, by kind: each is named in a sentence. Sizes that do not divide heads."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.key_pages import Pages
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import Ratio
from index_store.selection.cutting import cut
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.search import rows, source, step

SEARCHES: dict[str, dict[str, Scalar]] = {"query_tables": {"group": "pooled", "weights": "projection"}}
WRONG: list[tuple[str, str, Scalar, str]] = [
    ("query_tables", "subspaces", 0, "at least 1"),
    ("query_tables", "layout", "sparse", "dense, lists"),
    ("query_tables", "split", "random", "strided, contiguous"),
    ("query_tables", "scores", "sine", "dot, cosine"),
    ("query_tables", "alpha", 0.0, "alpha"),
    ("query_tables", "alpha", "much", "type float"),
    ("pages", "size", 0, "at least 1"),
    ("pages", "size", "big", "type int"),
    ("key_clusters", "keys_per_cluster", 0, "at least 1"),
    ("key_clusters", "metric", "manhattan", "cosine, euclidean"),
    ("key_clusters", "moments", "some", "none, diagonal"),
    ("key_clusters", "block", 5, "0 .all keys at once. or at least keys_per_cluster"),
    ("key_clusters", "iterations", 0, "at least 1"),
    ("key_clusters", "window", -1, "at least 0"),
    ("key_clusters", "sinks", -1, "at least 0"),
    ("key_clusters", "sinks", 2.5, "type int"),
    ("cluster_tree", "moments", "full", "were retired on 2026-11-28"),
    ("cluster_tree", "keys_per_coarse", 7, "at least keys_per_cluster"),
    ("coarse_rows", "coding", "wavelet", "coding is 'wavelet', expected one of scalar"),
    ("coarse_rows", "key_bits", 5, "key_bits is 5, expected one of 2, 3, 4"),
    ("coarse_rows", "coding", "product", "coarse_codes and the method refined-codes were retired"),
    ("coarse_rows", "value_group", 0, "value_group"),
    ("coarse_rows", "iterations", 0, "iterations"),
]
WRONG_SEARCHES: list[tuple[str, dict[str, Scalar], str]] = [
    ("cluster_tree", {"coarse_keep": 0.0}, "above 0"),
    ("cluster_tree", {"coarse_keep": 1.5}, "at most 1"),
    ("cluster_tree", {"coarse_keep": "most"}, "type float"),
    ("key_clusters", {"coarse_keep": 0.5}, "coarse_keep"),
    ("pages", {"group": "pooled"}, "no search options"),
]


@pytest.mark.parametrize(("name", "parameter", "value", "message"), WRONG)
def test_a_parameter_out_of_range_is_refused(name: str, parameter: str, value: Scalar, message: str) -> None:
    spec = INDEX_SPECS[name]
    with pytest.raises(InvalidArgumentError, match=message):
        INDEX_KINDS[spec.kind].check_options(
            {**spec.parameters, parameter: value}, SEARCHES.get(spec.kind, {})
        )


def test_every_kind_refuses_a_parameter() -> None:
    tried = {INDEX_SPECS[name].kind for name, *_ in WRONG}
    assert tried == {name for name, kind in INDEX_KINDS.items() if fields(kind.parameters_type)}, (
        "WRONG has a parameter out of range for every kind that takes any"
    )


@pytest.mark.parametrize(("name", "search", "message"), WRONG_SEARCHES)
def test_a_search_option_out_of_range_is_refused(name: str, search: dict[str, Scalar], message: str) -> None:
    spec = INDEX_SPECS[name]
    with pytest.raises(InvalidArgumentError, match=message):
        INDEX_KINDS[spec.kind].check_options(spec.parameters, search)


@pytest.mark.parametrize(
    ("name", "changes", "head_dim", "message"),
    [
        ("query_tables", {"subspaces": 5}, 16, "divisor of 16"),
        ("coarse_rows_3", {}, 12, "multiple of 8"),
        ("windowed_clusters", {}, 16, "one rotary embedding"),
        ("pages", {"size": 0}, 16, "at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused(
    name: str, changes: dict[str, Scalar], head_dim: int, message: str
) -> None:
    """Heads that do not divide, a model without frequencies, and parameters that nobody has checked before."""
    spec = INDEX_SPECS[name]
    sample = QuerySample(torch.randn(2, 40, 1, head_dim), torch.arange(40))
    with pytest.raises(InvalidArgumentError, match=message):
        INDEX_CLASSES[spec.kind].build(
            {**spec.parameters, **changes}, source(torch.randn(2, 30, head_dim), sample), 0
        )


def test_bytes_at_128_dimensions() -> None:
    names = ("coarse_rows", "coarse_rows_3")
    assert [INDEX_SPECS[name].built.bytes_per_token(128) for name in names] == [136, 104]


def test_which_rankings_estimate_logits() -> None:
    estimating = {
        name
        for name, spec in INDEX_SPECS.items()
        if spec.built.estimates_logits(INDEX_KINDS[spec.kind].parse_search(SEARCHES.get(spec.kind, {})))
    }
    assert set(INDEX_SPECS) - estimating == {"pages", "paper_tables"}


HEADS, DIM = 2, 16


def no_queries() -> QuerySample:
    return QuerySample(torch.empty(HEADS, 0, 1, DIM), torch.empty(0, dtype=torch.int64))


def build(keys: torch.Tensor, size: int = 16) -> Pages:
    return Pages.build({"size": size}, LayerSource(rows(keys), no_queries()), 0)


def some_keys(count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 90),
    size=st.integers(1, 20),
    batches=st.lists(st.integers(1, 25), max_size=4),
    first=st.integers(0, 60),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    exponent=st.integers(-6, 4),
)
def test_a_page_bounds_each_of_its_keys_and_pages_hold_every_key_once(
    count: int, size: int, batches: list[int], first: int, dtype: torch.dtype, exponent: int
) -> None:
    total = count + sum(batches)
    keys = some_keys(total, seed=count, scale=10.0**exponent).to(dtype)
    index = build(keys[:, :count], size)
    appended = index.start_appending()
    for part in keys[:, count:].split(batches, dim=1) if batches else ():
        appended.append(rows(part))
    first = min(first, total - 1)
    queries = torch.randn(HEADS, 2, 3, DIM, generator=torch.Generator().manual_seed(size))
    ranking = index.rank(queries, first, total, appended, {})
    bounds, column, covered = ranking.logits_HTGM, 0, []
    true = torch.einsum("htgd,hnd->htgn", queries.double(), keys.double())
    for group in ranking.items.groups:
        for begin, end in pairwise(group.offsets_HM[0].tolist()):
            ids = group.keys_HX[0, begin:end].long()
            assert first <= int(ids.max())
            slack = 1e-6 * 10.0**exponent * DIM  # of float32 sums
            assert (bounds[..., column, None].double() >= true[..., ids] - slack).all()
            covered += ids.tolist()
            column += 1
    assert column == bounds.shape[-1]
    assert len(covered) == len(set(covered))
    assert set(range(first, total)) <= set(covered)
    assert ranking.vectors_read == 2 * column


def test_bounds_are_those_of_the_keys_themselves_where_keys_are_bfloat16() -> None:
    keys = some_keys(50).bfloat16()
    arrays = build(keys).arrays()
    assert arrays["minima"].shape == (HEADS, 4, DIM)
    assert torch.equal(arrays["minima"][:, 1], keys[:, 16:32].amin(1))
    assert torch.equal(arrays["maxima"][:, 3], keys[:, 48:].amax(1))


def test_bounds_are_rounded_away_from_the_keys_and_no_further_than_to_the_next_value() -> None:
    keys = some_keys(500)
    arrays = build(keys, 1).arrays()
    minima, maxima = arrays["minima"].float(), arrays["maxima"].float()
    assert (minima <= keys).all()
    assert (maxima >= keys).all()
    assert (maxima - minima <= keys.abs() / 64).all()


def test_pages_of_one_key_rank_like_exact_products() -> None:
    keys = some_keys(300).bfloat16()
    queries = torch.randn(HEADS, 2, 3, DIM)
    bounds = build(keys, 1).rank(queries, 5, 290, None, {}).logits_HTGM
    torch.testing.assert_close(bounds, ExactIndex(keys).rank(queries, 5, 290, None, {}).logits_HTGM)


def test_neighbouring_keys_of_one_topic_are_found() -> None:
    generator = torch.Generator().manual_seed(5)
    topics = 3 * torch.randn(HEADS, 40, 1, DIM, generator=generator)
    keys = (topics + 0.3 * torch.randn(HEADS, 40, 16, DIM, generator=generator)).flatten(1, 2)
    queries = topics[:, :5] / DIM**0.5
    keep = Ratio(0.025)
    true = cut(keep, ExactIndex(keys).rank(queries, 0, 640, None, {}), step(640)).ids_HTK
    found = cut(keep, build(keys).rank(queries, 0, 640, None, {}), step(640)).ids_HTK
    assert float((true[..., None] == found[..., None, :]).any(-1).float().mean()) > 0.9
