"""Clusters that kernels select are those that the eager reference and the general path select."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.attention.online_softmax import Partials
from decode_engine.kernels.attention.sparse_attention import (
    ClusterScores,
    KeyLists,
)
from decode_engine.kernels.clusters.lookup import look_up, lookup_slots, most_clusters
from decode_engine.kernels.clusters.reference import (
    select_clusters_reference,
)
from decode_engine.kernels.clusters.selection import SelectionBuffers, select_clusters
from decode_engine.kernels.records import records_of
from index_store.indexes.key_clusters.build import divide_keys
from index_store.indexes.key_clusters.index import KeyClusters
from index_store.indexes.key_clusters.parameters import ClusterParameters
from index_store.methods.index_specs import INDEX_SPECS
from index_store.selection.cutting import best_keys
from tests.decode_engine.kernels.problems.cluster_problems import (
    SINKS,
    Problem,
    make_problem,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
        assert sequence is not None
        assert sequence.clusters is not None
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
        assert sequence.clusters is not None
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
