"""A page's score bounds its keys' products from above, in the context and among appended keys."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.indexes.exact_index import ExactIndex
from index_store.indexes.interface.layer_index import LayerSource
from index_store.indexes.key_pages import Pages
from index_store.selection.budgets import Ratio
from index_store.selection.cutting import cut
from index_store.store.stored_context import QuerySample
from tests.support.search import rows, step

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
