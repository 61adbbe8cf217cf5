"""Budgets of a fixed size: a share of the keys or a number of them, by each group rule."""

from __future__ import annotations

import math

import pytest
import torch

from index_store.errors import InvalidArgumentError
from index_store.selection.budgets import Budget, Ratio, TokenCount
from index_store.selection.cutting import cut
from index_store.selection.ranking import Items, Members, Ranking
from index_store.selection.selected import Selection
from tests.support.rankings import Problem, make_problem, selected
from tests.support.search import step


def rows(selection: Selection) -> list[list[list[int]]]:
    heads, positions = selection.counts_HT.shape
    return [[selected(selection, head, t) for t in range(positions)] for head in range(heads)]


def best(ranking: Ranking, problem: Problem, keep: int, group: str) -> list[list[list[int]]]:
    """By the definition: items in the order of S, whole until the budget ends inside of one."""
    weights = ranking.log_weights_HTGM().double().exp()
    heads, positions, heads_of_group, _ = weights.shape
    found = []
    for head in range(heads):
        of_head = []
        for position in range(positions):
            scored = weights[head, position]
            if group == "union":
                orders, share = list(scored), math.ceil(keep / heads_of_group)
            else:
                orders, share = [scored.mean(0) if group == "average" else scored.amax(0)], keep
            row: set[int] = set()
            for order in orders:
                keys: list[int] = []
                for item in order.sort(descending=True, stable=True).indices.tolist():
                    keys += [
                        key for key in listed(ranking.items, head, item) if problem.first <= key < problem.end
                    ]
                row |= set(keys[:share])
            of_head.append(sorted(row))
        found.append(of_head)
    return found


def listed(items: Items, head: int, item: int) -> list[int]:
    if not items.groups:
        return [items.first_key + item]
    (group,) = items.groups
    begin, end = group.offsets_HM[head, item : item + 2].tolist()
    keys: list[int] = group.keys_HX[head, begin:end].tolist()
    return keys


@pytest.mark.parametrize("group", ["average", "max", "union"])
@pytest.mark.parametrize("items", ["single", "clusters"])
@pytest.mark.parametrize("keep", [1, 7, 50, 1000])
def test_the_best_keys_are_kept(group: str, items: str, keep: int) -> None:
    problem = make_problem(300, positions=3, group=3, sharpness=3.0)
    ranking = problem.single_keys() if items == "single" else problem.clusters(6)
    expected = best(ranking, problem, keep, group)
    assert rows(cut(TokenCount(keep, group), ranking, step(300))) == expected
    if keep <= 300:
        assert rows(cut(Ratio(keep / 300, group), ranking, step(300))) == expected


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


def test_heads_that_agree_leave_a_union_smaller_than_the_budget() -> None:
    problem = make_problem(200, group=2)
    one = problem.single_keys().logits_HTGM[:, :, :1]
    ranking = Ranking(one.expand(-1, -1, 2, -1), Items(problem.first, problem.end))
    assert cut(TokenCount(20, "union"), ranking, step(200)).counts_HT.tolist() == [[10], [10]]
    assert cut(TokenCount(20, "average"), ranking, step(200)).counts_HT.tolist() == [[20], [20]]


@pytest.mark.parametrize("group", ["average", "max", "union"])
def test_items_that_were_not_retrieved_are_never_kept(group: str) -> None:
    problem = make_problem(100)
    logits = problem.single_keys().logits_HTGM.clone()
    logits[..., 5:] = -torch.inf
    selection = cut(TokenCount(40, group), Ranking(logits, Items(problem.first, problem.end)), step(100))
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
        (lambda: Ratio(0.1, "sum"), "group rule is 'sum'"),
        (lambda: TokenCount(0), "token budget is 0"),
        (lambda: TokenCount(5, "sum"), "group rule is 'sum'"),
    ],
)
def test_other_parameters_are_refused(make: type[Budget], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_labels() -> None:
    assert (Ratio(0.05).label, TokenCount(128).label) == ("5.00%", "128 keys")
