"""Parameters and search options out of range, by kind: each is named in a sentence. Sizes that do not divide heads."""

from __future__ import annotations

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.classes import INDEX_CLASSES
from index_store.indexes.registry import INDEX_KINDS
from index_store.methods.index_specs import INDEX_SPECS
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.search import source

SEARCHES: dict[str, dict[str, Scalar]] = {"query_tables": {"group": "pooled", "weights": "projection"}}
WRONG: list[tuple[str, str, Scalar, str]] = [
    ("query_tables", "subspaces", 0, "at least 1"),
    ("query_tables", "layout", "sparse", "dense, lists"),
    ("query_tables", "split", "random", "strided, contiguous"),
    ("query_tables", "scores", "sine", "dot, cosine"),
    ("query_tables", "alpha", 0.0, "alpha"),
    ("query_tables", "alpha", "much", "type float"),
    ("product_codes", "subspaces", 0, "at least 1"),
    ("product_codes", "iterations", 0, "at least 1"),
    ("product_codes", "bits", 9, "1 to 8"),
    ("product_codes", "bits", 0, "1 to 8"),
    ("product_codes", "split", "random", "strided, contiguous"),
    ("pages", "size", 0, "at least 1"),
    ("pages", "size", "big", "type int"),
    ("key_clusters", "keys_per_cluster", 0, "at least 1"),
    ("key_clusters", "metric", "manhattan", "cosine, euclidean"),
    ("key_clusters", "moments", "some", "none, diagonal, full"),
    ("key_clusters", "block", 5, "0 .all keys at once. or at least keys_per_cluster"),
    ("key_clusters", "iterations", 0, "at least 1"),
    ("key_clusters", "window", -1, "at least 0"),
    ("key_clusters", "sinks", -1, "at least 0"),
    ("key_clusters", "sinks", 2.5, "type int"),
    ("cluster_tree", "moments", "full", "none, diagonal"),
    ("cluster_tree", "keys_per_coarse", 7, "at least keys_per_cluster"),
    ("coarse_rows", "coding", "wavelet", "scalar, product"),
    ("coarse_rows", "key_bits", 5, "key_bits is 5, expected one of 2, 3, 4"),
    ("coarse_codes", "value_bits", 3, "value_bits is 3, expected one of 2, 4"),
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


@pytest.mark.parametrize(("name", "search", "message"), WRONG_SEARCHES)
def test_a_search_option_out_of_range_is_refused(name: str, search: dict[str, Scalar], message: str) -> None:
    spec = INDEX_SPECS[name]
    with pytest.raises(InvalidArgumentError, match=message):
        INDEX_KINDS[spec.kind].check_options(spec.parameters, search)


@pytest.mark.parametrize(
    ("name", "changes", "head_dim", "message"),
    [
        ("query_tables", {"subspaces": 5}, 16, "divisor of 16"),
        ("product_codes", {"subspaces": 5}, 16, "divisor of 16"),
        ("coarse_rows_3", {}, 12, "multiple of 8"),
        ("coarse_codes", {}, 10, "slices of 4"),
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
    names = ("coarse_rows", "coarse_rows_3", "coarse_codes")
    kind = INDEX_KINDS["coarse_rows"]
    assert [kind.bytes_per_token(INDEX_SPECS[name].parameters, 128) for name in names] == [136, 104, 64]


def test_which_rankings_estimate_logits() -> None:
    estimating = {
        name
        for name, spec in INDEX_SPECS.items()
        if INDEX_KINDS[spec.kind].estimates_logits(spec.parameters, SEARCHES.get(spec.kind, {}))
    }
    assert set(INDEX_SPECS) - estimating == {"pages", "paper_tables"}
