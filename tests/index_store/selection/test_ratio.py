"""Budgets by ratio, by number and by threshold."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from index_store.errors import InvalidArgumentError, MethodUnsupportedError
from index_store.selection.budgets import (
    KEEP_GRID,
    Budget,
    Mass,
    Ratio,
    Threshold,
    ThresholdCurve,
    TokenCount,
)
from index_store.selection.calibration import ThresholdCalibrator
from index_store.selection.cutting import cut
from index_store.selection.ranking import Items, Members, Ranking, Selection, Step
from tests.support.devices import crossed
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
                own = members_of(ranking.items, head, item)
                keys += [key for key in own if problem.first <= key < problem.end]
            of_head.append(sorted(keys[:keep]))
        found.append(of_head)
    return found


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
        assert rows(selection) == [[row] * positions for row in expected]
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


def mass_reference(ranking: Ranking, problem: Problem, mass: float) -> list[list[list[int]]]:
    """Selected keys by head and position."""
    weights = problem.weights
    found = []
    for head in range(weights.shape[0]):
        of_head = []
        for position in range(weights.shape[1]):
            kept: set[int] = set()
            for g in range(weights.shape[2]):
                ranked = keys_by_rank(ranking, head, position, g)
                row = weights[head, position, g]
                always = float(row[: problem.first].sum() + row[problem.end :].sum())
                keep = budget_reference(row[ranked].tolist(), always, mass)
                kept |= set(ranked[:keep])
            of_head.append(sorted(kept))
        found.append(of_head)
    return found


@crossed(
    {
        "keys": [13, 100, 525, 700, 2000],
        "mass": [0.3, 0.9, 0.99, 1.0],
        "items": ["single", "clusters", "two groups"],
    }
)
def test_equals_a_slow_reference(keys: int, mass: float, items: str) -> None:
    problem = make_problem(keys, positions=2, sharpness=2.0, seed=keys)
    ranking = {
        "single": problem.single_keys,
        "clusters": lambda: problem.clusters(8),
        "two groups": lambda: problem.clusters(8, groups=2),
    }[items]()
    assert rows(cut(Mass(mass), ranking, problem.step())) == mass_reference(ranking, problem, mass)


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
        assert rows(selection) == [[list(range(budget_reference(weights, 0.0, 0.9)))]]


def test_what_is_always_attended_counts() -> None:
    """With nearly all weight on sinks and recent keys a single key is enough."""
    problem = make_problem(800)
    step = replace(problem.step(), exact_lse_HTG=torch.full((2, 1, 2), 50.0))
    selection = cut(Mass(0.99), problem.single_keys(), step)
    best = problem.logits[:, 0, :, problem.first : problem.end].argmax(-1) + problem.first
    assert rows(selection) == [[sorted(set(row))] for row in best.tolist()]


def test_items_that_were_not_retrieved_are_kept_for_no_mass() -> None:
    problem = make_problem(600)
    full = problem.clusters(10)
    logits = full.logits_HTGM.clone()
    logits[..., ::2] = -torch.inf
    logits[0] = -torch.inf  # nothing at all in one KV head
    ranking = Ranking(logits, full.items)
    for mass in (0.9, 1.0):
        selection = cut(Mass(mass), ranking, problem.step())
        assert rows(selection) == mass_reference(ranking, problem, mass)
        assert int(selection.counts_HT[0, 0]) == 0
        assert int(selection.counts_HT[1, 0]) > 0


def test_a_pooled_ranking_serves_every_head() -> None:
    problem = make_problem(700, group=3)
    full = problem.single_keys().logits_HTGM
    pooled = full.mean(2, keepdim=True)
    items = Items(problem.first, problem.end)
    one = cut(Mass(0.9), Ranking(pooled, items), problem.step())
    three = cut(Mass(0.9), Ranking(pooled.expand_as(full), items), problem.step())
    assert rows(one) == rows(three)


def test_nothing_to_search() -> None:
    problem = replace(make_problem(20), first=4, end=4)
    items = Items(4, 4, (Members(torch.tensor([[0, 20]] * 2).int(), torch.arange(20).int().expand(2, -1)),))
    ranking = Ranking(torch.zeros(2, 1, 2, 1), items)
    assert cut(Mass(0.9), ranking, problem.step()).counts_HT.tolist() == [[0], [0]]


SHARPNESSES = (0.5, 1.0, 2.0, 3.0, 4.0)


def layers(positions: int = 12) -> list[tuple[Problem, Ranking]]:
    problems = [
        make_problem(3000, heads=3, positions=positions, sharpness=sharpness, recent=0, seed=number)
        for number, sharpness in enumerate(SHARPNESSES)
    ]
    return [(problem, problem.clusters(12)) for problem in problems]


def calibrate(rankings: list[Ranking]) -> ThresholdCalibrator:
    calibrator = ThresholdCalibrator()
    for ranking in rankings:
        calibrator.add(ranking)
    return calibrator


def kept_share(problem: Problem, ranking: Ranking, budget: Threshold) -> float:
    """Of the searched keys, averaged over heads and queries, each query by itself."""
    shares = []
    for position in range(problem.queries.shape[1]):
        one = Ranking(ranking.logits_HTGM[:, position : position + 1], ranking.items)
        counts = cut(budget, one, problem.step(ThresholdCurve(calibrated))).counts_HT
        shares.append(float(counts.float().mean()) / (problem.end - problem.first))
    return sum(shares) / len(shares)


calibrated = calibrate([ranking for _, ranking in layers()]).thresholds


@pytest.mark.parametrize("keep", [0.002, 0.01, 0.03, 0.05, 0.1, 0.2, 0.5])
def test_the_wanted_share_is_kept(keep: float) -> None:
    shares = [kept_share(problem, ranking, Threshold(keep=keep)) for problem, ranking in layers()]
    assert sum(shares) / len(shares) == pytest.approx(keep, rel=0.1)
    if keep in (0.05, 0.1):  # far from equal shares: the threshold is global
        assert max(shares) > 1.5 * min(shares)


def test_single_keys_and_several_queries_count_alike() -> None:
    problem = make_problem(1000, positions=6, sharpness=2.0)
    ranking = problem.single_keys()
    whole = calibrate([ranking]).thresholds
    parts = [Ranking(part, ranking.items) for part in ranking.logits_HTGM.split(2, dim=1)]
    assert calibrate(parts).thresholds == pytest.approx(whole, rel=1e-9)
    weights = ranking.weights().flatten().sort(descending=True).values
    for fraction, threshold in zip(KEEP_GRID, whole, strict=True):
        assert float((weights > threshold).float().mean()) == pytest.approx(fraction, rel=0.1, abs=2e-4)


def test_nothing_calibrates_nothing() -> None:
    assert ThresholdCalibrator().thresholds == ()


def test_a_tree_that_prunes_is_kept_whole_beyond_what_it_holds() -> None:
    problem = make_problem(1000)
    full = problem.single_keys()
    logits = full.logits_HTGM.clone()
    logits[..., ::2] = -torch.inf
    logits[..., ::3] = -torch.inf
    thresholds = calibrate([Ranking(logits, full.items)]).thresholds
    retrieved = float((~torch.isneginf(logits)).float().mean())
    everything = [thresholds[place] for place, share in enumerate(KEEP_GRID) if share > retrieved]
    assert everything
    assert max(everything) < 1e-15
    assert (
        cut(
            Threshold(threshold=everything[0]), Ranking(logits, full.items), problem.step()
        ).counts_HT.tolist()
        == [[int((~torch.isneginf(logits[0, 0, 0])).sum())]] * 2
    )


CALIBRATED = tuple(1e-3 / fraction**2 for fraction in KEEP_GRID)


def test_the_curve_interpolates_logarithms() -> None:
    curve = ThresholdCurve(CALIBRATED)
    for keep in (0.001, 0.00123, 0.02, 0.31, 0.5):
        assert curve(keep) == pytest.approx(1e-3 / keep**2, rel=1e-9)
    for fraction, threshold in zip(KEEP_GRID, curve.thresholds, strict=True):
        assert curve(fraction) == pytest.approx(threshold, rel=1e-12)


def test_the_grid() -> None:
    assert len(KEEP_GRID) == 28
    assert (KEEP_GRID[0], KEEP_GRID[-1]) == (0.001, 0.5)
    ratios = [b / a for a, b in itertools.pairwise(KEEP_GRID)]
    assert max(ratios) == pytest.approx(min(ratios), rel=1e-12)


@pytest.mark.parametrize("keep", [0.0, 0.0009, 0.51, 1.0, math.nan])
def test_outside_of_the_grid_is_refused(keep: float) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"expected 0.001 to 0.5: thresholds are calibrated for these"
    ):
        ThresholdCurve(CALIBRATED)(keep)


@pytest.mark.parametrize(
    "thresholds",
    [(), CALIBRATED[:-1], CALIBRATED[::-1], (*CALIBRATED[:-1], 0.0), (math.inf, *CALIBRATED[1:])],
)
def test_other_curves_are_refused(thresholds: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="expected 28 positive numbers, none above the one before"):
        ThresholdCurve(thresholds)
