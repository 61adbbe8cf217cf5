"""Kernels over key clusters give what their references give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.kernels.attention.online_softmax import LOG2E, Partials, merge_partials
from decode_engine.kernels.attention.sparse_attention import (
    MONOPOLE,
    SUMS,
    ClusterScores,
    KeyLists,
    TakeOut,
    attend_lists,
    attend_lists_reference,
    list_programs,
)
from decode_engine.kernels.clusters.lookup import correct_clusters, look_up, lookup_slots, most_clusters
from decode_engine.kernels.clusters.reference import (
    cluster_logits,
    remainder_reference,
    select_clusters_reference,
)
from decode_engine.kernels.clusters.selection import SelectionBuffers, select_clusters
from decode_engine.kernels.records import records_of
from index_store.attention.attention_state import AttentionState
from index_store.errors import InvalidArgumentError
from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.key_clusters.parameters import ClusterParameters
from index_store.methods.method import INDEX_SPECS
from index_store.selection.budgets import REMAINDERS
from index_store.selection.cutting import best_keys
from index_store.selection.ranking import ClusteredKeys, ScoredClusters
from index_store.selection.remainder_states import ExactKeys, remainder_state
from tests.decode_engine.kernels.problems.cluster_problems import (
    SINKS,
    Problem,
    make_problem,
    random_lists,
    relative_error,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.gpu
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=ON_GPU),
]


def attend(
    problem: Problem, lists: KeyLists, kind: str, kept_RX: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Listed keys, keys always attended, tail and remainder, as the device path combines the launches."""
    group, head_dim = problem.q_RGD.shape[1:]
    programs = list_programs(problem.rows, lists)
    splits = 0 if kind == "dropped" else lookup_slots(problem.rows, problem.width)
    slots = splits + programs * (2 if kind == "centred" else 1)
    partials = Partials.allocate(problem.rows, slots, group, head_dim, problem.q_RGD.device)
    given = (problem.q_RGD, problem.records_BF)
    take_out = None
    longest = max((s.kv_HN2D.shape[1] for s in problem.sequences if s is not None), default=1)
    joined_RN = torch.full((problem.rows, longest), 2**30, dtype=torch.int32, device=DEVICE)
    scores = ClusterScores.allocate(problem.rows, problem.width, group, kind == "centred", DEVICE)
    if kind != "dropped":
        assert look_up(*given, scores, partials, problem.scale) == splits
        take_out = TakeOut(scores, SUMS if kind == "centred" else MONOPOLE)
    attend_lists(
        *given,
        lists,
        joined_RN,
        partials,
        problem.scale,
        first_slot=splits,
        kept_RX=kept_RX,
        take_out=take_out,
    )
    if kind == "centred":
        correct_clusters(*given, lists, joined_RN, scores, partials, splits + programs)
    return merge_partials(partials)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "tails", "heads", "group", "head_dim", "segments"),
    [
        ([70, 0, 5], (1, 0, 130), 2, 1, 64, 3),
        ([131], (0,), 1, 4, 128, 1),
        ([200, 64], (1000, 3), 1, 5, 64, 3),
        ([9, 1], (0, 0), 2, 8, 128, 1),
        ([131, 0], (70, 0), 1, 16, 128, 3),
        ([70, 5], (1, 33), 2, 9, 256, 2),
        ([60], (0,), 1, 16, 256, 1),
        ([900, 0, 70], (3, 0, 0), 2, 4, 64, 200),
        ([700], (1,), 1, 4, 64, 128),
    ],
)
def test_listed_keys(
    dtype: torch.dtype,
    lengths: list[int],
    tails: tuple[int, ...],
    heads: int,
    group: int,
    head_dim: int,
    segments: int,
) -> None:
    problem = make_problem(
        lengths, heads=heads, group=group, head_dim=head_dim, tails=tails, dtype=dtype, device=DEVICE
    )
    lists = random_lists(problem, 0.6, segments)
    kept_RX = torch.full(
        (problem.rows, list_programs(problem.rows, lists)), -1, dtype=torch.int32, device=DEVICE
    )
    out, lse = attend(problem, lists, "dropped", kept_RX)
    expected = attend_lists_reference(problem.q_RGD, problem.sequences, lists, problem.scale)
    assert relative_error(out, expected.out) < TOLERANCE[dtype]
    torch.testing.assert_close(lse, expected.lse, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for row in range(problem.rows):
        assert int(kept_RX[row].sum()) == len(lists.of_row(row))
        if problem.sequences[row // heads] is None:
            assert (out[row] == 0).all()
            assert torch.isneginf(lse[row]).all()


def test_sums_over_clusters_do_not_depend_on_the_order_of_keys() -> None:
    """Programs add to them at once, in an order that is another one every time."""
    problem = make_problem([460], group=4, heads=1, device=DEVICE)
    lists = random_lists(problem, 0.9, 1)
    count = int(lists.counts_RP[0, 0])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    mixed = lists.ids_RPW.clone()
    mixed[0, 0, :count] = lists.ids_RPW[0, 0, order]

    def sums(ids_RPW: Tensor) -> ClusterScores:
        scores = ClusterScores.allocate(problem.rows, problem.width, 4, True, DEVICE)
        scratch = Partials.allocate(problem.rows, 200, 4, problem.q_RGD.shape[2], problem.q_RGD.device)
        given = (problem.q_RGD, problem.records_BF)
        look_up(*given, scores, scratch, problem.scale)
        listed = KeyLists(ids_RPW, lists.counts_RP)
        attend_lists(*given, listed, ids_RPW[:, 0], scratch, problem.scale, take_out=TakeOut(scores, SUMS))
        return scores

    one, other = sums(lists.ids_RPW), sums(mixed)
    assert one.taken_RC is not None
    assert one.taken_logits_RCG is not None
    assert other.taken_logits_RCG is not None
    sequence = problem.sequences[0]
    clusters = sequence.clusters.sizes_HC.shape[1]
    assert int(one.taken_RC[0, :clusters].max()) > 2  # sums of two are the same in any order
    assert torch.equal(one.taken_logits_RCG[0, :clusters], other.taken_logits_RCG[0, :clusters])


def test_a_batch_equals_its_sequences_one_by_one() -> None:
    problem = make_problem([90, 33, 150], group=3, tails=(5, 70, 0), heads=1, device=DEVICE)
    lists = random_lists(problem, 0.5, 2)
    for kind in ("dropped", "monopole", "centred"):
        out, lse = attend(problem, lists, kind)
        for number, sequence in enumerate(problem.sequences):
            part = slice(number, number + 1)
            alone = Problem(
                problem.q_RGD[part],
                (sequence,),
                problem.records_BF[number : number + 1],
                problem.arrays[number : number + 1],
                problem.heads,
                problem.width,
            )
            found = attend(alone, KeyLists(lists.ids_RPW[part], lists.counts_RP[part]), kind)
            torch.testing.assert_close(found[0], out[part], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found[1], lse[part], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "group", "head_dim"), [([460, 0, 31], 4, 64), ([7], 1, 128), ([300], 8, 64)]
)
def test_lookup(dtype: torch.dtype, lengths: list[int], group: int, head_dim: int) -> None:
    problem = make_problem(lengths, group=group, head_dim=head_dim, dtype=dtype, device=DEVICE)
    slots = lookup_slots(problem.rows, problem.width)
    partials = Partials.allocate(problem.rows, slots, group, head_dim, problem.q_RGD.device)
    scores = ClusterScores.allocate(problem.rows, problem.width, group, True, DEVICE)
    look_up(problem.q_RGD, problem.records_BF, scores, partials, problem.scale)
    out, lse = merge_partials(partials)
    tolerance = TOLERANCE[dtype]

    # Squares of queries are stored in two bytes.
    def check(found: Tensor, expected: Tensor, least: float = 2e-4) -> None:
        tolerated = max(least, tolerance)
        torch.testing.assert_close(found, expected, rtol=tolerated, atol=tolerated)

    for row in range(problem.rows):
        sequence = problem.sequences[row // problem.heads]
        if sequence is None or sequence.clusters is None:
            assert torch.isneginf(lse[row]).all()
            continue
        head = row % problem.heads
        logits, spreads = cluster_logits(problem.q_RGD[row], sequence.clusters, head, problem.scale)
        count = logits.shape[1]
        assert scores.spreads_RCG is not None
        assert scores.taken_RC is not None
        assert scores.taken_logits_RCG is not None
        check(scores.logits_RCG[row, :count].t() / LOG2E, logits, 0.0)
        check(scores.spreads_RCG[row, :count].t().log(), spreads)
        assert not scores.taken_RC[row, :count].any()
        assert not scores.taken_logits_RCG[row, :count].any()
        sized = logits + spreads + sequence.clusters.sizes_HC[head].log()
        check(lse[row], sized.logsumexp(-1))
        expected = sized.softmax(-1) @ sequence.clusters.value_means_HCD[head].float()
        assert relative_error(out[row], expected) < max(2e-4, tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["monopole", "centred"])
@pytest.mark.parametrize(
    ("group", "head_dim", "per_cluster", "share", "segments"),
    [(4, 64, 7, 0.0, 1), (3, 64, 7, 0.3, 2), (1, 128, 130, 0.7, 1), (8, 64, 3, 1.0, 2)],
)
def test_remainders_equal_the_cpu(
    dtype: torch.dtype, kind: str, group: int, head_dim: int, per_cluster: int, share: float, segments: int
) -> None:
    problem = make_problem(
        [150, 0, 31],
        group=group,
        head_dim=head_dim,
        per_cluster=per_cluster,
        tails=(2, 0, 70),
        dtype=dtype,
        device=DEVICE,
    )
    lists = random_lists(problem, share, segments)
    found = attend(problem, lists, kind)
    attended = attend_lists_reference(problem.q_RGD, problem.sequences, lists, problem.scale)
    left = remainder_reference(problem.q_RGD, problem.sequences, lists, problem.scale, kind)
    merged = attended.merge(left)
    tolerance = max(TOLERANCE[dtype], 1e-4 if kind == "centred" else 0.0)
    assert relative_error(found[0], merged.out) < 2 * tolerance
    torch.testing.assert_close(found[1], merged.lse, rtol=tolerance, atol=tolerance)
    # Variances are stored in bytes.
    tolerance = max(TOLERANCE[dtype], 1e-3 if kind == "centred" else 0.0)
    for row in range(problem.rows):
        if problem.sequences[row // problem.heads] is not None:
            state = _on_cpu(problem, row, lists, kind)
            expected = AttentionState(attended.out[row].cpu(), attended.lse[row].cpu()).merge(state)
            assert relative_error(found[0][row].cpu(), expected.out) < 2 * tolerance
            torch.testing.assert_close(found[1][row].cpu(), expected.lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["monopole", "centred"])
def test_everything_listed_is_dense_attention(kind: str) -> None:
    problem = make_problem([300, 41], group=4, tails=(9, 0), sharpness=3.0, device=DEVICE)
    lists = random_lists(problem, 1.0, 2)
    expected = attend_lists_reference(problem.q_RGD, problem.sequences, lists, problem.scale)
    out, lse = attend(problem, lists, kind)
    assert relative_error(out, expected.out) < 1e-4
    torch.testing.assert_close(lse, expected.lse, rtol=1e-4, atol=1e-4)


def test_unfit_arguments_are_refused() -> None:
    problem = make_problem([70], device=DEVICE)
    lists = random_lists(problem, 0.5, 1)
    partials = Partials.allocate(
        problem.rows, list_programs(problem.rows, lists), 4, 64, problem.q_RGD.device
    )
    for queries in (
        problem.q_RGD.double(),
        problem.q_RGD[:, :, :40],
        problem.q_RGD.repeat(1, 5, 1),
        problem.q_RGD[:, :, ::2],
    ):
        with pytest.raises(InvalidArgumentError):
            attend_lists(queries, problem.records_BF, lists, lists.ids_RPW[:, 0], partials, problem.scale)
    with pytest.raises(InvalidArgumentError, match="expected"):
        attend_lists(
            problem.q_RGD,
            problem.records_BF,
            KeyLists.allocate(problem.rows + 1, 2, 70, DEVICE),
            lists.ids_RPW[:, 0],
            partials,
            problem.scale,
        )
    scores = ClusterScores.allocate(problem.rows, problem.width, 9, False, DEVICE)
    for queries in (problem.q_RGD.repeat(1, 4, 1), problem.q_RGD.repeat(1, 1, 4)):
        with pytest.raises(InvalidArgumentError, match="the kernels over key clusters take groups of 1 to 8"):
            look_up(queries, problem.records_BF, scores, partials, problem.scale)
    with pytest.raises(InvalidArgumentError, match="int32"):
        KeyLists(lists.ids_RPW.long(), lists.counts_RP)
    with pytest.raises(InvalidArgumentError, match="segments"):
        KeyLists(lists.ids_RPW, lists.counts_RP[:1])


def _on_cpu(problem: Problem, row: int, lists: KeyLists, kind: str) -> AttentionState:
    """The remainder as `index_store.selection.budgets` computes it, [G, d]."""
    sequence = problem.sequences[row // problem.heads]
    assert sequence is not None
    arrays = problem.arrays[row // problem.heads]
    head = slice(row % problem.heads, row % problem.heads + 1)
    queries = problem.q_RGD[row].float().cpu()[None, None] * problem.scale
    ids = torch.cat([sequence.always(), lists.of_row(row).cpu()])
    rows = sequence.kv_HN2D[row % problem.heads].float().cpu()[ids]
    exact = ExactKeys(
        ids[None, None].int(),
        torch.ones(1, 1, len(ids), dtype=torch.bool),
        queries @ rows[:, 0].t(),
        rows[None, None, :, 1],
    )
    clusters = ClusteredKeys(
        arrays["counts"][head],
        arrays["means"][head],
        arrays["value_sums"][head],
        arrays["assignment"][head],
        variances_HCD=arrays["variances"][head],
    )
    own = torch.einsum("htgd,hcd->htgc", queries, clusters.means_HCD)
    own.masked_fill_((clusters.counts_HC == 0)[:, None, None], -torch.inf)
    state = remainder_state(REMAINDERS[kind], [ScoredClusters(clusters, own, queries)], [exact])
    return AttentionState(state.out[0, 0], state.lse[0, 0])


def select(problem: Problem) -> KeyLists:
    slots = lookup_slots(problem.rows, problem.width)
    group = problem.q_RGD.shape[1]
    normaliser = Partials.allocate(problem.rows, slots, group, 0, problem.q_RGD.device)
    scores = ClusterScores.allocate(problem.rows, problem.width, group, False, DEVICE)
    buffers = SelectionBuffers.allocate(problem.rows, problem.width, DEVICE)
    longest = max(s.kv_HN2D.shape[1] for s in problem.sequences if s is not None)
    lists = KeyLists.allocate(problem.rows, 1, longest, DEVICE)
    lists.ids_RPW.fill_(2**30)
    lists.counts_RP.fill_(2**30)
    given = (problem.records_BF, scores, normaliser)
    splits = look_up(problem.q_RGD, *given, problem.scale, attend=False)
    select_clusters(*given, splits, buffers, lists)
    return lists


@pytest.mark.parametrize("per_cluster", [7, 90])
@pytest.mark.parametrize("budget", [0, 5, 100, 10_000])
def test_selection(budget: int, per_cluster: int) -> None:
    problem = make_problem(
        [230, 0, 31, 1], group=3, per_cluster=per_cluster, budget=budget, sharpness=3.0, device=DEVICE
    )
    lists = select(problem)
    listed = 0
    for row in range(problem.rows):
        sequence = problem.sequences[row // problem.heads]
        if sequence is None or sequence.clusters is None:
            assert int(lists.counts_RP[row]) == 0
            continue
        head = row % problem.heads
        chosen = select_clusters_reference(problem.q_RGD[row], sequence, head, problem.scale)
        assignment = sequence.clusters.assignment_HN[head]
        members = torch.isin(assignment, chosen.int()).nonzero()[:, 0].cpu()
        assert int(lists.counts_RP[row]) == len(members)
        searched = members[(members >= sequence.first) & (members < sequence.end)]
        assert len(searched) <= budget
        assert lists.of_row(row).cpu().sort().values.tolist() == searched.tolist()
        listed += len(searched)
    if budget > 100 or (budget == 100 and per_cluster == 7):
        assert listed > 150


@pytest.mark.parametrize(("recent", "first"), [(100, SINKS), (0, 90), (40, 40), (0, SINKS)])
@pytest.mark.parametrize("budget", [40, 77, 1000])
def test_only_searched_keys_use_up_the_budget(
    budget: int, recent: int, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selected clusters are those of the general path, which cuts one more where the budget ends."""
    problem = make_problem([230, 160], group=3, recent=recent, budget=budget, sharpness=3.0, device=DEVICE)
    sequences = [replace(sequence, first=first) for sequence in problem.sequences if sequence is not None]
    problem = replace(problem, sequences=tuple(sequences), records_BF=records_of(sequences, DEVICE))
    lists = select(problem)
    monkeypatch.setattr("decode_engine.kernels.clusters.selection._AT_ONCE", 16)
    in_parts = select(problem)
    parameters = ClusterParameters.parse(INDEX_SPECS["key_clusters"].parameters)
    for row in range(problem.rows):
        sequence, head = sequences[row // problem.heads], row % problem.heads
        arrays = {
            name: array[head : head + 1] for name, array in problem.arrays[row // problem.heads].items()
        }
        queries = problem.q_RGD[row].float().cpu()[None, None] * problem.scale
        ranking = KeyClusters(parameters, arrays).rank(queries, first, sequence.end, None, {})
        selection = best_keys(ranking, budget)
        wanted = set(selection.ids_HTK[0, 0, : int(selection.counts_HT[0, 0])].tolist())
        found = set(lists.of_row(row).tolist())
        assert found <= wanted
        left = [int(arrays["assignment"][0, key]) for key in wanted - found]
        assert len(set(left)) <= 1
        for cluster in set(left):
            members = (arrays["assignment"][0] == cluster).nonzero()[:, 0]
            searched = int(((members >= first) & (members < sequence.end)).sum())
            assert len(found) + searched > budget
        assert sorted(found) == in_parts.of_row(row).sort().values.tolist()
        assert len(found) > min(budget, 60) - 20


@pytest.mark.parametrize("kind", ["equal", "few", "sink"])
def test_clusters_of_equal_weight_use_up_the_budget(kind: str) -> None:
    """Of equal ones some are selected; likewise of those that one outweighs so far that none of them counts."""
    problem = make_problem([460, 300], budget=100, device=DEVICE)
    sequences = []
    for sequence in problem.sequences:
        means = sequence.clusters.means_HCD
        if kind == "sink":
            means[:, 3] = 40.0 * problem.q_RGD[:2].mean(1)
        else:
            means[:] = means[:, torch.arange(means.shape[1], device=DEVICE) % (1 if kind == "equal" else 3)]
        sequences.append(sequence)
    lists = select(problem)
    for row in range(problem.rows):
        sequence, head = sequences[row // problem.heads], row % problem.heads
        found = lists.of_row(row)
        assert 80 <= len(found) <= 100
        chosen = select_clusters_reference(problem.q_RGD[row], sequence, head, problem.scale)
        assignment = sequence.clusters.assignment_HN[head]
        members = torch.isin(assignment, chosen.int()).nonzero()[:, 0].cpu()
        searched = members[(members >= sequence.first) & (members < sequence.end)]
        assert found.cpu().sort().values.tolist() == searched.tolist()


def test_a_selection_among_more_clusters_than_a_program_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_engine.kernels.clusters.selection._AT_ONCE", 16)
    problem = make_problem([460, 120], group=3, budget=100, device=DEVICE)
    lists = select(problem)
    monkeypatch.undo()
    expected = select(problem)
    for row in range(problem.rows):
        assert lists.of_row(row).sort().values.tolist() == expected.of_row(row).sort().values.tolist()
        assert len(lists.of_row(row)) > 50


@pytest.mark.parametrize(("keys", "block", "each"), [(130, 32, 16), (127, 30, 16), (1, 8, 4), (500, 0, 16)])
def test_buffers_hold_all_clusters(keys: int, block: int, each: int) -> None:
    for count in range(1, keys + 1):
        assert divide_keys(count, each, block, 0)[-1].end_cluster <= most_clusters(keys, each, block)
