"""Kernels over lists of keys and clusters equal their eager references and the CPU's remainders.

Without a CUDA device they run in Triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels.cluster_attention import attend_clusters
from decode_engine.kernels.cluster_lookup import score_clusters, score_clusters_reference
from decode_engine.kernels.cluster_remainder import attend_with_centred, remainder_reference
from decode_engine.kernels.cluster_selection import select_clusters, select_clusters_reference
from decode_engine.kernels.cluster_tables import Scores
from decode_engine.kernels.key_values import KeyValues
from decode_engine.kernels.partials import Partials, merge_partials, merge_partials_reference
from decode_engine.kernels.sparse_attention import attend_listed, attend_listed_reference
from index_store.attention_state import AttentionState
from index_store.clusters import Clusters, Piece
from index_store.errors import InvalidArgumentError
from index_store.remainders import REMAINDERS, ExactKeys
from tests.decode_engine.cluster_problems import (
    Problem,
    make_problem,
    random_lists,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device"),
]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=ON_GPU),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "group", "head_dim", "width"),
    [([70, 5], 2, 1, 64, 71), ([131], 1, 4, 128, 131), ([200, 64], 1, 5, 64, 130), ([9], 2, 8, 128, 1)],
)
def test_listed_keys(
    dtype: torch.dtype, lengths: list[int], heads: int, group: int, head_dim: int, width: int
) -> None:
    problem = make_problem(lengths, heads=heads, group=group, head_dim=head_dim, dtype=dtype, device=DEVICE)
    ids, counts = random_lists(problem, width)
    given = (problem.q_RGD, problem.kv, ids, counts, problem.scale)
    out, lse = attend_listed(*given, piece=64)
    expected_out, expected_lse = attend_listed_reference(*given)
    # The first row lists nothing.
    assert torch.isneginf(lse[0]).all()
    assert (out[0] == 0).all()
    assert relative_error(out[1:], expected_out[1:]) < TOLERANCE[dtype] or len(out) == 1
    torch.testing.assert_close(lse, expected_lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    problem = make_problem([90, 33, 150], group=3, device=DEVICE)
    ids, counts = random_lists(problem, 100)
    out, lse = attend_listed(problem.q_RGD, problem.kv, ids, counts, problem.scale, piece=64)
    for number, tensor in enumerate(problem.kv.tensors):
        part = slice(2 * number, 2 * number + 2)
        alone = attend_listed(
            problem.q_RGD[part], KeyValues.of([tensor]), ids[part], counts[part], problem.scale, piece=64
        )
        assert torch.equal(alone[0], out[part])
        assert torch.equal(alone[1], lse[part])


def test_partials_merge_as_the_reference_merges_them() -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.randn(3, 70, 2, 64, generator=generator)
    peaks = 20 * torch.randn(3, 70, 2, generator=generator)
    totals = torch.rand(3, 70, 2, generator=generator)
    # Slots of programs that found nothing hold no sums; others take away.
    peaks[:, ::3] = -torch.inf
    sums[:, ::3] = torch.nan
    totals[:, 1::3] = 0.0
    peaks[0] = -torch.inf
    partials = Partials(sums.to(DEVICE), peaks.to(DEVICE), totals.to(DEVICE))
    for found, expected in zip(merge_partials(partials), merge_partials_reference(partials), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.isneginf(merge_partials(partials)[1][0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "group", "head_dim"), [([460, 31], 4, 64), ([7], 1, 128), ([300], 8, 64)]
)
def test_lookup(dtype: torch.dtype, lengths: list[int], group: int, head_dim: int) -> None:
    problem = make_problem(lengths, group=group, head_dim=head_dim, dtype=dtype, device=DEVICE)
    found = score_clusters(problem.q_RGD, problem.tables, problem.scale)
    expected = score_clusters_reference(problem.q_RGD, problem.tables, problem.scale)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.logits_RGC, expected.logits_RGC, rtol=tolerance, atol=tolerance)
    assert found.spreads_RGC is not None
    present = expected.left_RC[:, None].expand_as(found.spreads_RGC) > 0
    torch.testing.assert_close(
        found.spreads_RGC[present],
        expected.spreads_RGC[present],  # type: ignore[index]
        rtol=tolerance,
        atol=tolerance,
    )
    assert torch.equal(found.left_RC, expected.left_RC)
    assert torch.equal(found.counts_R, expected.counts_R)
    assert torch.equal(found.bins_RC < 0, expected.bins_RC < 0)
    assert int((found.bins_RC.int() - expected.bins_RC.int()).abs().max()) <= (
        1 if dtype == torch.float32 else 40
    )
    for row, histogram in enumerate(found.histogram_RB):
        weights = found.left_RC[row].clamp(min=0)
        bins = found.bins_RC[row].long().clamp(min=0)
        counted = torch.zeros_like(histogram).scatter_add_(0, bins, weights)
        assert torch.equal(histogram, counted)


@pytest.mark.parametrize("budget", [0, 5, 60, 10_000])
def test_selection(budget: int) -> None:
    problem = make_problem([460, 31], group=3, budget=budget, device=DEVICE)
    scores = score_clusters(problem.q_RGD, problem.tables, problem.scale)
    copy = _copy(scores)
    capacity = min(budget, 460) + 8
    ids, counts = select_clusters(scores, problem.tables, problem.budgets_R, capacity)
    expected, expected_counts = select_clusters_reference(copy, problem.tables, problem.budgets_R, capacity)
    assert torch.equal(counts, expected_counts)
    assert torch.equal(scores.left_RC, copy.left_RC)
    always = 8
    for row in range(len(ids)):
        count = int(counts[row])
        assert count - always <= budget
        assert ids[row, :count].sort().values.tolist() == expected[row, :count].sort().values.tolist()
        # Listed keys and those left in clusters are all keys, each once.
        listed = ids[row, :count]
        context, _ = problem.tables.of_row(row)
        assert len(listed.unique()) == len(listed)
        left = int(scores.left_RC[row].clamp(min=0).sum())
        assert left + len(listed) == context.assignment_HN.shape[1]
    if budget == 60:
        assert int(counts.max()) > 40


def test_heavier_clusters_are_selected_first() -> None:
    problem = make_problem([700], group=4, budget=150, sharpness=4.0, device=DEVICE)
    scores = score_clusters(problem.q_RGD, problem.tables, problem.scale)
    ids, counts = select_clusters(scores, problem.tables, problem.budgets_R, 200)
    for row in range(len(ids)):
        context, head = problem.tables.of_row(row)
        sizes = context.sizes_HC[head]
        logits = scores.logits_RGC[row].double()
        weights = (logits + sizes.double().log()).softmax(-1) / sizes
        order = weights.nan_to_num().mean(0).argsort(descending=True)
        kept = order[(sizes[order].cumsum(0) <= 150)]
        wanted = torch.isin(context.assignment_HN[head], kept.int()).nonzero()[:, 0]
        listed = ids[row, : int(counts[row])].cpu()
        shared = torch.isin(wanted.cpu(), listed.long()).float().mean()
        assert float(shared) > 0.93


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group", "per_cluster", "budget"), [(4, 7, 0), (4, 7, 100), (1, 7, 1000), (5, 130, 260), (8, 3, 60)]
)
def test_clusters_are_exchanged_for_their_keys(
    dtype: torch.dtype, group: int, per_cluster: int, budget: int
) -> None:
    problem = make_problem(
        [400, 41], group=group, per_cluster=per_cluster, budget=budget, dtype=dtype, device=DEVICE
    )
    scores = score_clusters(problem.q_RGD, problem.tables, problem.scale)
    ids, counts = select_clusters(scores, problem.tables, problem.budgets_R, min(budget, 400) + 8)
    out, lse, used = attend_clusters(
        problem.q_RGD,
        problem.q_RGD,
        problem.kv,
        problem.tables,
        problem.budgets_R,
        min(budget, 400) + 8,
        problem.scale,
    )
    assert torch.equal(used, counts)
    _check_against_cpu(problem, (out, lse), ids, counts, "monopole", dtype)
    _check_against_reference(problem, (out, lse), ids, counts, scores, "monopole", dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 130, 300])
def test_centred_equals_the_cpu(dtype: torch.dtype, width: int) -> None:
    problem = make_problem([300, 41], group=3, dtype=dtype, device=DEVICE)
    scores = score_clusters(problem.q_RGD, problem.tables, problem.scale, rank=False)
    ids, counts = random_lists(problem, width)
    partials = attend_with_centred(
        problem.q_RGD, problem.kv, ids, counts, scores, problem.tables, problem.scale
    )
    _check_against_cpu(problem, merge_partials(partials), ids, counts, "centred", dtype)
    _check_against_reference(problem, merge_partials(partials), ids, counts, scores, "centred", dtype)


def test_unfit_arguments_are_refused() -> None:
    problem = make_problem([70], device=DEVICE)
    ids, counts = random_lists(problem, 70)
    bad = [
        (problem.q_RGD.half(), ids, counts),
        (problem.q_RGD[:1], ids, counts),
        (problem.q_RGD, ids.long(), counts),
        (problem.q_RGD, ids, counts[:1]),
    ]
    for queries, some_ids, some_counts in bad:
        with pytest.raises(InvalidArgumentError):
            attend_listed(queries, problem.kv, some_ids, some_counts, problem.scale)
    with pytest.raises(InvalidArgumentError, match="head dimension"):
        KeyValues.of([torch.zeros(2, 5, 2, 80)])
    flat = make_problem([70], spread=False, device=DEVICE)
    scores = score_clusters(flat.q_RGD, flat.tables, flat.scale, rank=False)
    with pytest.raises(InvalidArgumentError, match="variances"):
        attend_with_centred(flat.q_RGD, flat.kv, ids, counts, scores, flat.tables, flat.scale)


def _copy(scores: Scores) -> Scores:
    return replace(scores, left_RC=scores.left_RC.clone(), counts_R=scores.counts_R.clone())


def _check_against_cpu(
    problem: Problem,
    found: tuple[Tensor, Tensor],
    ids: Tensor,
    counts: Tensor,
    kind: str,
    dtype: torch.dtype,
) -> None:
    """The remainder as `index_store.remainders` computes it, merged with attention to the listed keys."""
    outs, lses = [], []
    heads = problem.kv.heads
    for row in range(len(ids)):
        arrays = problem.arrays[row // heads]
        head = slice(row % heads, row % heads + 1)
        queries = problem.q_RGD[row].float().cpu()[None, None] * problem.scale
        listed = ids[row, : int(counts[row])].cpu()
        listed = listed[listed >= 0]
        rows = problem.kv.tensors[row // heads][row % heads].float().cpu()[listed.long()]
        logits = queries @ rows[:, 0].t()
        exact = ExactKeys(
            listed[None, None],
            torch.ones(1, 1, len(listed), dtype=torch.bool),
            logits,
            rows[None, None, :, 1],
        )
        clusters = Clusters(
            arrays["counts"][head],
            arrays["means"][head],
            arrays["value_sums"][head],
            arrays["assignment"][head],
            variances_HCD=arrays["variances"][head],
        )
        own = torch.einsum("htgd,hcd->htgc", queries, clusters.means_HCD)
        own.masked_fill_((clusters.counts_HC == 0)[:, None, None], -torch.inf)
        state = REMAINDERS[kind].state([Piece(clusters, own, queries)], [exact])
        assert state is not None
        attended = AttentionState.empty((1, 1, queries.shape[2]), queries.shape[3])
        if len(listed):
            attended = AttentionState(torch.softmax(logits, -1) @ rows[:, 1], logits.logsumexp(-1))
        merged = attended.merge(state)
        outs.append(merged.out[0, 0])
        lses.append(merged.lse[0, 0])
    assert relative_error(found[0].cpu(), torch.stack(outs)) < 2 * TOLERANCE[dtype]
    torch.testing.assert_close(
        found[1].cpu(), torch.stack(lses), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def _check_against_reference(
    problem: Problem,
    found: tuple[Tensor, Tensor],
    ids: Tensor,
    counts: Tensor,
    scores: Scores,
    kind: str,
    dtype: torch.dtype,
) -> None:
    attended = attend_listed_reference(problem.q_RGD, problem.kv, ids, counts, problem.scale)
    remainder = remainder_reference(problem.kv, ids, counts, scores, problem.tables, kind)
    merged = AttentionState(*attended).merge(AttentionState(*remainder))
    assert relative_error(found[0], merged.out) < 2 * TOLERANCE[dtype]
    torch.testing.assert_close(found[1], merged.lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
