"""Product codes: the kernel equals its reference, and scores approximate products of queries and keys."""

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.kmeans.kmeans import euclidean_kmeans
from index_store.indexes.product_codes.index import ProductCodes
from index_store.indexes.product_codes.search_numba import CodeReads, score_codes, score_codes_reference
from index_store.store.description.json_fields import Scalar
from index_store.store.stored_context import QuerySample
from tests.support.search import rows

HEADS, DIM = 2, 16
CODES: dict[str, Scalar] = {"subspaces": 4, "bits": 4, "split": "strided", "iterations": 5}


def build(keys: torch.Tensor, **changes: Scalar) -> ProductCodes:
    queries = QuerySample(torch.empty(HEADS, 0, 1, DIM), torch.empty(0, dtype=torch.int64))
    return ProductCodes.build({**CODES, **changes}, LayerSource(rows(keys), queries), 0)


def topical_keys(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    topics = 2 * torch.randn(HEADS, 25, DIM, generator=torch.Generator().manual_seed(99))
    keys = topics[:, torch.randint(0, 25, (count,), generator=generator)]
    return keys + 0.5 * torch.randn(HEADS, count, DIM, generator=generator)


@pytest.mark.parametrize("keys", [1, 63, 100, 500, 3000])
@pytest.mark.parametrize(("subspaces", "codewords"), [(1, 2), (3, 16), (8, 256)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 2)])
def test_the_kernel_equals_its_reference(
    keys: int, subspaces: int, codewords: int, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(keys + subspaces)
    codes, appended = (
        torch.randint(0, codewords, (2, n, subspaces), dtype=torch.uint8, generator=generator)
        for n in (keys, 1100)
    )
    appended[:, 1050:] = 255  # rows not used yet
    tables = torch.randn(2, *shape, subspaces, codewords, generator=generator)
    tables[..., 0] = tables[..., 1]
    for first, end in ((0, keys), (keys - 1, keys), (keys // 2, keys + 1050), (keys, keys + 7)):
        reads = CodeReads(codes, appended, tables, first, end)
        torch.testing.assert_close(score_codes(reads), score_codes_reference(reads), rtol=1e-5, atol=1e-5)
    assert score_codes(CodeReads(codes, appended, tables, 5, 5)).shape == (2, *shape, 0)


def test_the_kernel_reads_no_appended_keys_where_there_are_none() -> None:
    codes = torch.tensor([[[1, 0], [0, 1]]], dtype=torch.uint8)
    tables = torch.tensor([[[[[1.0, 2.0], [10.0, -torch.inf]]]]])
    reads = CodeReads(codes, codes[:, :0], tables, 0, 2)
    assert score_codes(reads).flatten().tolist() == [12.0, -torch.inf]


@pytest.mark.parametrize("split", ["strided", "contiguous"])
def test_scores_are_products_with_the_quantised_keys(split: str) -> None:
    keys = topical_keys(400)
    index = build(keys, split=split)
    arrays = index.arrays()
    assert arrays["codes"].dtype == torch.uint8
    assert arrays["codes"].shape == (HEADS, 400, 4)
    assert arrays["codebooks"].shape == (HEADS, 4, 16, 4)
    quantised = torch.empty_like(keys)
    for subspace in range(4):
        dims = slice(subspace, None, 4) if split == "strided" else slice(4 * subspace, 4 * subspace + 4)
        for head in range(HEADS):
            codebook = arrays["codebooks"][head, subspace]
            code = arrays["codes"][head, :, subspace].long()
            nearest = torch.cdist(keys[head][:, dims], codebook).argmin(1)
            assert float((nearest == code).float().mean()) > 0.99
            quantised[head][:, dims] = codebook[code]
    queries = torch.randn(HEADS, 2, 3, DIM)
    logits = index.rank(queries, 3, 390, None, {}).logits_HTGM
    expected = torch.einsum("htgd,hnd->htgn", queries, quantised[:, 3:390])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [1, 7, 16, 255])
def test_fewer_keys_than_codewords_are_kept_as_they_are(count: int) -> None:
    keys = topical_keys(count)
    queries = torch.randn(HEADS, 1, 2, DIM)
    index = build(keys, bits=8)
    exact = ExactIndex(keys).rank(queries, 0, count, None, {}).logits_HTGM
    torch.testing.assert_close(
        index.rank(queries, 0, count, None, {}).logits_HTGM, exact, rtol=1e-4, atol=1e-4
    )


def test_euclidean_k_means_finds_planted_centres_and_survives_few_points() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.tensor([[0.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
    points = centres.repeat(100, 1) + 0.1 * torch.randn(300, 2, generator=generator)
    found = min(
        (euclidean_kmeans(points, 3, 10, seed) for seed in range(5)),
        key=lambda centroids: float(torch.cdist(points, centroids).amin(1).sum()),
    )
    assert float(torch.cdist(centres, found).amin(1).max()) < 0.1
    assert torch.equal(euclidean_kmeans(points, 3, 10, 1), euclidean_kmeans(points, 3, 10, 1))
    few = euclidean_kmeans(points[:2], 4, 10, 0)
    assert torch.equal(few, points[[0, 1, 1, 1]])
    with pytest.raises(InvalidArgumentError, match="no points"):
        euclidean_kmeans(points[:0], 2, 5, 0)
    with pytest.raises(InvalidArgumentError, match="NaN"):
        euclidean_kmeans(points * torch.nan, 2, 5, 0)
