"""Budgets by ratio, by number and by threshold."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.selection.budgets import Budget, Mass, Ratio, Threshold, TokenCount
from index_store.selection.cutting import cut
from index_store.selection.ranking import Items, Members, Ranking, Selection
from tests.support.rankings import Problem, make_problem, selected
from tests.support.search import step


def rows(selection: Selection) -> list[list[list[int]]]:
    heads, positions = selection.counts_HT.shape
    return [[selected(selection, head, t) for t in range(positions)] for head in range(heads)]


def best(ranking: Ranking, problem: Problem, keep: int) -> list[list[list[int]]]:
    """By the definition: items in the order of S, whole until the budget ends inside of one."""
    weights = ranking.log_weights_HTGM().double().exp()
    heads, positions = weights.shape[:2]
    found = []
    for head in range(heads):
        of_head = []
        for position in range(positions):
            keys: list[int] = []
            for item in weights[head, position].mean(0).sort(descending=True, stable=True).indices.tolist():
                keys += [
                    key for key in listed(ranking.items, head, item) if problem.first <= key < problem.end
                ]
            of_head.append(sorted(keys[:keep]))
        found.append(of_head)
    return found


def listed(items: Items, head: int, item: int) -> list[int]:
    if not items.groups:
        return [items.first_key + item]
    (group,) = items.groups
    begin, end = group.offsets_HM[head, item : item + 2].tolist()
    keys: list[int] = group.keys_HX[head, begin:end].tolist()
    return keys


@pytest.mark.parametrize("items", ["single", "clusters"])
@pytest.mark.parametrize("keep", [1, 7, 50, 1000])
def test_the_best_keys_are_kept(items: str, keep: int) -> None:
    problem = make_problem(300, positions=3, group=3, sharpness=3.0)
    ranking = problem.single_keys() if items == "single" else problem.clusters(6)
    expected = best(ranking, problem, keep)
    assert rows(cut(TokenCount(keep), ranking, step(300))) == expected
    if keep <= 300:
        assert rows(cut(Ratio(keep / 300), ranking, step(300))) == expected


def test_the_last_item_is_cut_where_the_budget_ends() -> None:
    members = Members(
        torch.tensor([[0, 4, 6, 10]]).int(), torch.tensor([[9, 3, 5, 1, 0, 2, 8, 7, 6, 4]]).int()
    )
    ranking = Ranking(torch.tensor([[[[1.0, 3.0, 2.0]]]]), Items(1, 10, (members,)))
    kept = {keep: rows(cut(TokenCount(keep), ranking, step(10)))[0][0] for keep in (1, 2, 4, 5, 8, 20)}
    assert kept == {
        1: [2],  # 0 lies before the searched range and costs nothing
        2: [2, 8],
        4: [2, 6, 7, 8],
        5: [2, 4, 6, 7, 8],
        8: [2, 3, 4, 5, 6, 7, 8, 9],
        20: [1, 2, 3, 4, 5, 6, 7, 8, 9],
    }


def test_items_that_were_not_retrieved_are_never_kept() -> None:
    problem = make_problem(100)
    logits = problem.single_keys().logits_HTGM.clone()
    logits[..., 5:] = -torch.inf
    selection = cut(TokenCount(40), Ranking(logits, Items(problem.first, problem.end)), step(100))
    assert rows(selection) == [[[4, 5, 6, 7, 8]]] * 2


def test_a_ratio_is_of_all_tokens_and_rounds_up() -> None:
    problem = make_problem(200)
    counts = {
        keep: int(cut(Ratio(keep), problem.single_keys(), step(1000)).counts_HT[0, 0])
        for keep in (0.001, 0.0101)
    }
    assert counts == {0.001: 1, 0.0101: 11}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ratio(0.0), "keep ratio is 0.0"),
        (lambda: Ratio(1.01), "keep ratio is 1.01"),
        (lambda: TokenCount(0), "token budget is 0"),
        (lambda: Threshold(None, None), "keep ratio is None and threshold is None, expected one of the two"),
        (lambda: Threshold(0.1, 0.1), "expected one of the two"),
        (lambda: Threshold(0.0, None), "keep ratio is 0.0"),
        (lambda: Threshold(1.1, None), "keep ratio is 1.1"),
        (lambda: Threshold(None, 0.0), "threshold is 0.0"),
        (lambda: Mass(0.0), "attention mass is 0.0"),
        (lambda: Mass(1.5), "attention mass is 1.5"),
        (lambda: Mass(0.9, head=0.0), "measured head of the curve is 0.0"),
        (lambda: Mass(0.9, window=0), "window is 0 keys, expected 1 to 64"),
        (lambda: Mass(0.9, window=65), "window is 65 keys"),
    ],
)
def test_other_parameters_are_refused(make: type[Budget], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("budget", "label"),
    [
        (Ratio(0.05), "5.00%"),
        (TokenCount(128), "128 keys"),
        (Threshold(keep=0.02), "2.00% by threshold"),
        (Threshold(threshold=0.00125), "S > 0.00125"),
        (Mass(0.95), "0.95 of the mass"),
    ],
)
def test_labels(budget: Budget, label: str) -> None:
    assert budget.label == label


def item_weights(ranking: Ranking, problem: Problem, single: bool) -> tuple[Tensor, list[list[list[int]]]]:
    """S of every item [H, T, G, M] by its definition, and every head's items as lists of searched keys."""
    logits = ranking.logits_HTGM.double()
    heads, _, _, columns = logits.shape
    members: list[list[list[int]]] = []
    sizes = torch.ones(heads, columns, dtype=torch.float64)
    for head in range(heads):
        lists: list[list[int]] = [[problem.first + column] for column in range(columns)] if single else []
        for group in ranking.items.groups:
            bounds = group.offsets_HM[head].tolist()
            lists += [group.keys_HX[head, a:b].tolist() for a, b in itertools.pairwise(bounds)]
        sizes[head] = torch.tensor([len(keys) for keys in lists])
        members.append([[key for key in keys if problem.first <= key < problem.end] for keys in lists])
    exponentials = logits.exp()
    return exponentials / (sizes[:, None, None] * exponentials).sum(-1, keepdim=True), members


def reference(ranking: Ranking, problem: Problem, threshold: float, single: bool) -> list[list[int]]:
    """Selected keys by head."""
    weights, members = item_weights(ranking, problem, single)
    kept = weights.mean((1, 2)) > threshold
    return [
        sorted(key for item, keys in enumerate(members[head]) if kept[head, item] for key in keys)
        for head in range(len(members))
    ]


@pytest.mark.parametrize("positions", [1, 5])
@pytest.mark.parametrize("items", ["single", "clusters", "two groups", "pruned"])
def test_keeps_what_exceeds_the_threshold(positions: int, items: str) -> None:
    problem = make_problem(300, positions=positions, group=3, sharpness=3.0)
    single = items == "single"
    ranking = problem.single_keys() if single else problem.clusters(6, groups=1 + (items == "two groups"))
    if items == "pruned":
        ranking.logits_HTGM[..., 1::2] = -torch.inf
    sizes = set()
    for threshold in (1e-30, 1e-5, 1e-3, 3e-3, 0.02, 1.0):
        selection = cut(Threshold(threshold=threshold), ranking, problem.step())
        expected = reference(ranking, problem, threshold, single)
        found = [[selected(selection, head, t) for t in range(positions)] for head in range(2)]
        assert found == [[row] * positions for row in expected]
        sizes.add(sum(map(len, expected)))
    assert len(sizes) >= 4


def test_a_weight_of_just_the_threshold_is_not_above_it() -> None:
    alone = Ranking(torch.zeros(1, 1, 1, 1), Items(5, 6))
    step = make_problem(9).step()
    assert cut(Threshold(threshold=1.0), alone, step).counts_HT.tolist() == [[0]]
    assert cut(Threshold(threshold=0.999), alone, step).counts_HT.tolist() == [[1]]


def test_positions_of_a_prompt_share_memory() -> None:
    problem = make_problem(300, positions=7)
    selection = cut(Threshold(threshold=1e-3), problem.clusters(8), problem.step())
    assert selection.ids_HTK.stride(1) == 0
    assert selection.ids_HTK.shape[1] == selection.counts_HT.shape[1] == 7


def test_a_wanted_share_becomes_a_threshold_through_the_calibration() -> None:
    problem = make_problem(300)
    asked: list[float] = []

    def thresholds(keep: float) -> float:
        asked.append(keep)
        return 2e-3

    ranking = problem.clusters(8)
    wanted = cut(Threshold(keep=0.05), ranking, problem.step(thresholds))
    given = cut(Threshold(threshold=2e-3), ranking, problem.step())
    assert asked == [0.05]
    assert torch.equal(wanted.ids_HTK, given.ids_HTK)
    assert torch.equal(wanted.counts_HT, given.counts_HT)


def test_a_wanted_share_needs_a_calibration() -> None:
    problem = make_problem(100)
    with pytest.raises(MethodUnsupportedError, match="no calibrated thresholds; prefill the document again"):
        cut(Threshold(keep=0.05), problem.clusters(8), problem.step())
