"""Remainders: what is counted, what is exact, and which approximation is closer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.attention.attention_state import AttentionState
from index_store.selection.budgets import COARSE, REMAINDERS
from index_store.selection.ranking import ClusteredKeys, ScoredClusters
from index_store.selection.remainder_states import ExactKeys, remainder_state

H, T, G, D = 2, 3, 2, 8


def clusters_of(kv_HN2D: Tensor, assignment_HN: Tensor, count: int, first_id: int = 0) -> ClusteredKeys:
    """Moments by definition, cluster by cluster."""
    keys, values = kv_HN2D[:, :, 0], kv_HN2D[:, :, 1]
    heads, _, dim = keys.shape
    counts, means = torch.zeros(heads, count), torch.zeros(heads, count, dim)
    sums, variances = torch.zeros(heads, count, dim), torch.zeros(heads, count, dim)
    covariances = torch.zeros(heads, count, dim, dim)
    for head in range(heads):
        for cluster in range(count):
            k, v = (part[head, assignment_HN[head] == cluster] for part in (keys, values))
            counts[head, cluster] = len(k)
            if len(k):
                means[head, cluster], sums[head, cluster] = k.mean(0), v.sum(0)
                variances[head, cluster] = k.var(0, unbiased=False)
                covariances[head, cluster] = (v - v.mean(0)).T @ (k - k.mean(0))
    return ClusteredKeys(counts, means, sums, assignment_HN.to(torch.int32), first_id, variances, covariances)


def piece_of(q: Tensor, clusters: ClusteredKeys) -> ScoredClusters:
    logits = torch.einsum("htgd,hcd->htgc", q, clusters.means_HCD)
    return ScoredClusters(
        clusters, logits.masked_fill((clusters.counts_HC == 0)[:, None, None], -torch.inf), q
    )


def exact_keys(q: Tensor, kv: Tensor, kept_HTN: Tensor) -> ExactKeys:
    """The keys marked in kept_HTN, padded with the key 0."""
    width = int(kept_HTN.sum(-1).max())
    order = kept_HTN.int().sort(dim=-1, descending=True, stable=True)
    ids = torch.where(order.values.bool(), order.indices, 0)[..., :width]
    valid = order.values.bool()[..., :width]
    rows = kv[torch.arange(len(kv))[:, None, None], ids]
    logits = torch.einsum("htgd,htkd->htgk", q, rows[:, :, :, 0])
    return ExactKeys(ids.to(torch.int32), valid, logits, rows[:, :, :, 1])


def attention(q: Tensor, kv: Tensor, seen_HTN: Tensor) -> AttentionState:
    logits = torch.einsum("htgd,hnd->htgn", q.double(), kv[:, :, 0].double())
    logits = logits.masked_fill(~seen_HTN[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - torch.where(torch.isneginf(lse), 0, lse).unsqueeze(-1)).exp()
    out = torch.einsum("htgn,hnd->htgd", weights, kv[:, :, 1].double())
    return AttentionState(out.float(), lse.float())


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(["monopole", "centred", "dipole"]),
    seed=st.integers(0, 10_000),
    keys=st.integers(1, 40),
    count=st.integers(1, 8),
    share=st.floats(0, 1),
)
def test_members_that_are_alike_make_every_remainder_exact(
    name: str, seed: int, keys: int, count: int, share: float
) -> None:
    """Then selected keys and remainder are full attention: nothing counts twice, nothing is lost."""
    generator = torch.Generator().manual_seed(seed)
    assignment = torch.randint(0, count, (H, keys), generator=generator)
    centres = torch.randn(H, count, D, generator=generator)
    kv = torch.stack(
        [
            centres.gather(1, assignment[..., None].expand(-1, -1, D)),
            torch.randn(H, keys, D, generator=generator),
        ],
        dim=2,
    )
    q = torch.randn(H, T, G, D, generator=generator)
    kept = torch.rand(H, T, keys, generator=generator) < share
    pieces = [piece_of(q, clusters_of(kv, assignment, count))]
    left = remainder_state(REMAINDERS[name], pieces, [exact_keys(q, kv, kept)])
    expected = attention(q, kv, ~kept)
    torch.testing.assert_close(left.lse, expected.lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(left.out, expected.out, rtol=1e-3, atol=2e-3)
    whole = left.merge(attention(q, kv, kept))
    full = attention(q, kv, torch.ones_like(kept))
    torch.testing.assert_close(whole.out, full.out, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", ["monopole", "centred", "dipole"])
def test_nothing_left_is_an_empty_state(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(H, 12, 2, D, generator=generator)
    q = torch.randn(H, T, G, D, generator=generator)
    assignment = torch.arange(12).expand(H, -1) % 3
    everything = exact_keys(q, kv, torch.ones(H, T, 12, dtype=torch.bool))
    left = remainder_state(REMAINDERS[name], [piece_of(q, clusters_of(kv, assignment, 4))], [everything])
    assert torch.isneginf(left.lse).all()
    assert (left.out == 0).all()


def test_a_cluster_of_one_key_left_is_exact_when_centred() -> None:
    generator = torch.Generator().manual_seed(1)
    kv = torch.randn(H, 2, 2, D, generator=generator)
    kv[:, 1, 0] = kv[:, 0, 0] + 0.01
    q = torch.randn(H, T, G, D, generator=generator)
    kept = torch.tensor([True, False]).expand(H, T, -1)
    clusters = clusters_of(kv, torch.zeros(H, 2, dtype=torch.long), 1)
    left = remainder_state(REMAINDERS["centred"], [piece_of(q, clusters)], [exact_keys(q, kv, kept)])
    expected = attention(q, kv, ~kept)
    torch.testing.assert_close(left.out, expected.out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left.lse, expected.lse, rtol=0, atol=1e-3)


def test_pieces_and_exact_keys_in_several_parts_add_up() -> None:
    """Two partitions of halves of the keys, and exact keys given in two sets, one of them for all positions."""
    generator = torch.Generator().manual_seed(2)
    kv = torch.randn(H, 40, 2, D, generator=generator)
    q = torch.randn(H, T, G, D, generator=generator)
    assignment = torch.randint(0, 5, (H, 40), generator=generator)
    halves = [
        piece_of(q, clusters_of(kv[:, :20], assignment[:, :20], 5)),
        piece_of(q, clusters_of(kv[:, 20:], assignment[:, 20:], 5, first_id=20)),
    ]
    apart = torch.where(torch.arange(40) < 20, assignment, assignment + 5)
    whole = piece_of(q, clusters_of(kv, apart, 10))
    kept = torch.rand(H, T, 40, generator=generator) < 0.2
    kept[..., 30:] = False
    last = exact_keys(q, kv, (torch.arange(40) >= 35).expand(H, T, -1))
    shared = ExactKeys(last.ids_HTK[:, :1], last.valid_HTK[:, :1], last.logits_HTGK, last.values_HTKD[:, :1])
    both = kept | (torch.arange(40) >= 35)
    for name in ("monopole", "centred", "dipole"):
        one = remainder_state(REMAINDERS[name], halves, [exact_keys(q, kv, kept), shared])
        two = remainder_state(REMAINDERS[name], [whole], [exact_keys(q, kv, both)])
        torch.testing.assert_close(one.out, two.out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.lse, two.lse, rtol=1e-4, atol=1e-5)


def test_closer_approximations_have_smaller_errors() -> None:
    """On clusters with values that follow their keys: dipole < centred < monopole < dropped."""
    generator = torch.Generator().manual_seed(3)
    keys, count = 600, 30
    assignment = torch.arange(keys).expand(H, -1) % count
    centres = torch.randn(H, count, D, generator=generator)
    k = centres[:, assignment[0]] + 0.5 * torch.randn(H, keys, D, generator=generator)
    mix = torch.randn(D, D, generator=generator)
    v = k @ mix + 0.3 * torch.randn(H, keys, D, generator=generator)
    kv = torch.stack([k, v], dim=2)
    q = torch.randn(H, T, G, D, generator=generator)
    weights = torch.einsum("htgd,hnd->htgn", q, k).softmax(-1).sum(2)
    kept = torch.zeros(H, T, keys, dtype=torch.bool).scatter(-1, weights.topk(30).indices, True)
    full = attention(q, kv, torch.ones_like(kept)).out
    selected = attention(q, kv, kept)
    pieces = [piece_of(q, clusters_of(kv, assignment, count))]
    errors = {}
    for name, remainder in REMAINDERS.items():
        if remainder is COARSE:
            continue
        left = remainder_state(remainder, pieces, [exact_keys(q, kv, kept)])
        out = (selected if left is None else selected.merge(left)).out
        errors[name] = float((out - full).norm() / full.norm())
    assert errors["dipole"] < errors["centred"] < errors["monopole"] < errors["dropped"]
