"""Undoing the rotary embedding gives back what it was applied to, and moved queries see one relative distance."""

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError
from index_store.indexes.key_clusters.windowed_rope import check_frequencies, move_queries, undo_rotary

DIM = 16
FREQUENCIES = 10_000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))


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
