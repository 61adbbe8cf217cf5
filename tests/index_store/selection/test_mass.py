"""The mass budget: its curve against a slow reference, the share of the weight that it reaches, its bound."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from index_store.selection.budgets import Mass
from index_store.selection.cutting import cut
from index_store.selection.ranking import Items, Members, Ranking, Selection, Step
from tests.support.rankings import Problem, make_problem, selected

WINDOW, HEAD, SHORT = 64, 0.02, 512


def keys_by_rank(ranking: Ranking, head: int, position: int, g: int) -> list[int]:
    """Searched keys of one query head, best item first."""
    logits = ranking.logits_HTGM[head, position, g]
    items = ranking.items
    ranked: list[int] = []
    for item in logits.sort(descending=True, stable=True).indices.tolist():
        if math.isinf(logits[item]):
            continue
        ranked += [key for key in members_of(items, head, item) if items.first_key <= key < items.end_key]
    return ranked


def members_of(items: Items, head: int, item: int) -> list[int]:
    if not items.groups:
        return [items.first_key + item]
    for group in items.groups:
        if item < group.offsets_HM.shape[1] - 1:
            begin, end = group.offsets_HM[head, item : item + 2].tolist()
            listed: list[int] = group.keys_HX[head, begin:end].tolist()
            return listed
        item -= group.offsets_HM.shape[1] - 1
    raise IndexError(item)


def budget_reference(weights: list[float], always: float, mass: float) -> int:
    """Tactic's algorithm 1 for one head, with loops: how many of the ranked keys are kept."""
    count = len(weights)
    if mass == 1.0 or count == 0:
        return count
    if count > SHORT:
        averages = []
        for centre in (0.1, 0.6):
            first = int(centre * count) - WINDOW // 2
            inverse = sum(1 / (first + i + 1) for i in range(WINDOW)) / WINDOW
            averages.append((inverse, sum(weights[first : first + WINDOW]) / WINDOW))
        (x1, y1), (x2, y2) = averages
        a = (y1 - y2) / (x1 - x2)
        b = y1 - a * x1
        measured = math.ceil(HEAD * count)
        estimated = [max(0.0, a / x + b) for x in range(measured + 1, count + 1)]
        weights = weights[:measured] + estimated
    wanted, reached = mass * (always + sum(weights)), always
    for rank, weight in enumerate(weights, start=1):
        reached += weight
        if reached >= wanted:
            return rank
    return count


def reference(ranking: Ranking, problem: Problem, mass: float) -> list[list[list[int]]]:
    """Selected keys by head and position."""
    weights = problem.weights
    found = []
    for head in range(weights.shape[0]):
        rows = []
        for position in range(weights.shape[1]):
            kept: set[int] = set()
            for g in range(weights.shape[2]):
                ranked = keys_by_rank(ranking, head, position, g)
                row = weights[head, position, g]
                always = float(row[: problem.first].sum() + row[problem.end :].sum())
                keep = budget_reference(row[ranked].tolist(), always, mass)
                kept |= set(ranked[:keep])
            rows.append(sorted(kept))
        found.append(rows)
    return found


def as_lists(selection: Selection) -> list[list[list[int]]]:
    heads, positions = selection.counts_HT.shape
    return [[selected(selection, h, t) for t in range(positions)] for h in range(heads)]


@pytest.mark.parametrize("keys", [13, 100, 525, 700, 2000])
@pytest.mark.parametrize("mass", [0.3, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("items", ["single", "clusters", "two groups"])
def test_equals_a_slow_reference(keys: int, mass: float, items: str) -> None:
    problem = make_problem(keys, positions=2, sharpness=2.0, seed=keys)
    ranking = {
        "single": problem.single_keys,
        "clusters": lambda: problem.clusters(8),
        "two groups": lambda: problem.clusters(8, groups=2),
    }[items]()
    assert as_lists(cut(Mass(mass), ranking, problem.step())) == reference(ranking, problem, mass)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.integers(13, 1500),
    positions=st.integers(1, 3),
    group=st.integers(1, 4),
    mass=st.floats(0.01, 0.999),
    sharpness=st.floats(0.0, 6.0),
    size=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_the_bound_holds_on_every_head_and_step(
    keys: int, positions: int, group: int, mass: float, sharpness: float, size: int, seed: int
) -> None:
    """Tactic appendix A: |o - o~| <= 2 (1 - p) max |v|, with the share p of the weight that is attended."""
    problem = make_problem(keys, positions=positions, group=group, sharpness=sharpness, seed=seed)
    ranking = problem.clusters(size)
    attended = problem.attended(cut(Mass(mass), ranking, problem.step()))[:, :, None]
    weights, values = problem.weights, problem.values.double()
    kept = weights * attended
    reached = kept.sum(-1)
    full = torch.einsum("htgn,hnd->htgd", weights, values)
    sparse = torch.einsum("htgn,hnd->htgd", kept / reached[..., None], values)
    bound = 2 * (1 - reached) * values.norm(dim=-1).amax(1)[:, None, None]
    assert bool(((full - sparse).norm(dim=-1) <= bound + 1e-9).all())
    assert bool((attended.sum(-1) > problem.first + keys - problem.end).all())
    if keys <= SHORT:  # everything is measured, so the target is reached for certain
        assert bool((reached >= mass - 1e-9).all())


@pytest.mark.parametrize("mass", [0.5, 0.75, 0.9, 0.95])
@pytest.mark.parametrize(("sharpness", "size"), [(0.5, 1), (1.0, 1), (2.0, 1), (4.0, 1), (1.0, 16)])
def test_the_target_is_reached_on_average(mass: float, sharpness: float, size: int) -> None:
    problem = make_problem(4000, heads=4, positions=8, group=2, sharpness=sharpness)
    ranking = problem.single_keys() if size == 1 else problem.clusters(size)
    attended = problem.attended(cut(Mass(mass), ranking, problem.step()))
    assert float((problem.weights * attended[:, :, None]).sum(-1).mean()) >= mass


def test_a_head_keeps_the_curve_when_the_windows_rise() -> None:
    """Weights that rise with the rank (a < 0) or end early (b < 0): the curve counts where it is positive."""
    count = 1000
    for logits in (torch.linspace(0.0, 1.0, count), torch.linspace(3.0, -90.0, count)):
        ranking = Ranking(-torch.arange(count).float().view(1, 1, 1, -1), Items(0, count))
        step = Step(count, None, lambda ids, logits=logits: logits[ids], torch.full((1, 1, 1), -torch.inf))
        selection = cut(Mass(0.9), ranking, step)
        weights = (logits - logits[:20].max()).double().exp().tolist()
        assert as_lists(selection) == [[list(range(budget_reference(weights, 0.0, 0.9)))]]


def test_what_is_always_attended_counts() -> None:
    """With nearly all weight on sinks and recent keys a single key is enough."""
    problem = make_problem(800)
    step = replace(problem.step(), exact_lse_HTG=torch.full((2, 1, 2), 50.0))
    selection = cut(Mass(0.99), problem.single_keys(), step)
    best = problem.logits[:, 0, :, problem.first : problem.end].argmax(-1) + problem.first
    assert as_lists(selection) == [[sorted(set(row))] for row in best.tolist()]


def test_items_that_were_not_retrieved_are_never_kept() -> None:
    problem = make_problem(600)
    full = problem.clusters(10)
    logits = full.logits_HTGM.clone()
    logits[..., ::2] = -torch.inf
    logits[0] = -torch.inf  # nothing at all in one KV head
    ranking = Ranking(logits, full.items)
    for mass in (0.9, 1.0):
        selection = cut(Mass(mass), ranking, problem.step())
        assert as_lists(selection) == reference(ranking, problem, mass)
        assert int(selection.counts_HT[0, 0]) == 0
        assert int(selection.counts_HT[1, 0]) > 0


def test_a_pooled_ranking_serves_every_head() -> None:
    problem = make_problem(700, group=3)
    full = problem.single_keys().logits_HTGM
    pooled = full.mean(2, keepdim=True)
    items = Items(problem.first, problem.end)
    one = cut(Mass(0.9), Ranking(pooled, items), problem.step())
    three = cut(Mass(0.9), Ranking(pooled.expand_as(full), items), problem.step())
    assert as_lists(one) == as_lists(three)


def test_nothing_to_search() -> None:
    problem = replace(make_problem(20), first=4, end=4)
    items = Items(4, 4, (Members(torch.tensor([[0, 20]] * 2).int(), torch.arange(20).int().expand(2, -1)),))
    ranking = Ranking(torch.zeros(2, 1, 2, 1), items)
    assert cut(Mass(0.9), ranking, problem.step()).counts_HT.tolist() == [[0], [0]]
