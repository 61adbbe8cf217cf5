"""What stood before is found as by looking everywhere; how much is drafted follows what was right and its cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from decode_engine.engine.drafting import (
    MOST,
    NOWHERE,
    REACH,
    Allowance,
    ContextSuffixes,
    Costs,
    Drafter,
    OwnText,
    Plan,
    Source,
)


def alike(text: Sequence[int], end: int, last: Sequence[int]) -> int:
    length = 0
    while length < min(REACH, len(last), end + 1) and text[end - length] == last[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("letters", [1, 2, 3, 40])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 300])
def test_a_context_is_searched_for_the_longest_match(letters: int, count: int) -> None:
    draw = np.random.default_rng(count)
    text = draw.integers(0, letters, count)
    suffixes = ContextSuffixes(text)
    for size in (1, 2, 5, 30):
        for _ in range(10):
            begin = int(draw.integers(0, count))
            last = [
                *text[max(0, begin - size) : begin + 1].tolist(),
                *draw.integers(0, letters, size % 3).tolist(),
            ]
            longest = max(alike(text, end, last) for end in range(count))
            found = suffixes.find(last, 7)
            if longest < 2:
                assert found == NOWHERE
                continue
            assert found.length == longest
            follows = [
                text[end + 1 : end + 8].tolist() for end in range(count) if alike(text, end, last) == longest
            ]
            assert found.following in follows


def test_a_sessions_own_text_is_searched_for_its_last_two_tokens() -> None:
    own = OwnText([1, 2, 3, 1, 2])
    assert own.find(9) == (2, [3, 1, 2])
    assert own.find(1) == (2, [3])
    own.add(3)
    assert own.find(9) == (3, [1, 2, 3])
    own.add(7)
    assert own.find(9) == NOWHERE
    assert OwnText([5]).find(9) == OwnText([]).find(9) == NOWHERE


def test_the_latest_place_counts() -> None:
    assert OwnText([1, 2, 3, 1, 2, 4, 1, 2]).find(1).following == [4]


TEXT = list(range(100, 200))


def drafter(**options: bool) -> Drafter:
    return Drafter(ContextSuffixes(np.array(TEXT)), TEXT[:20], **options)


def seen(row: float = 0.1, step: float | None = None) -> Costs:
    return Costs(1.0, row, step)


def test_what_follows_in_the_context_is_drafted() -> None:
    assert drafter().plan(50, seen(), 0) == Plan(TEXT[20 : 20 + MOST])
    assert drafter().plan(3, seen(), 0) == Plan(TEXT[20:23])
    assert drafter().plan(0, seen(), 0) == Plan()
    assert drafter().plan(50, Costs(), 0) == Plan()  # a step without drafts comes first
    assert drafter(timed=False).plan(50, Costs(), 0) == Plan(TEXT[20 : 20 + MOST])


@pytest.mark.parametrize(("row", "count"), [(0.001, MOST), (0.5, 1), (2.0, 0)])
def test_expensive_rows_are_fewer(row: float, count: int) -> None:
    assert Source(0.75).worth(row, MOST, 0)[0] == count


@pytest.mark.parametrize(("chance", "count"), [(0.05, 0), (0.3, 1), (0.9, 9), (1.0, MOST)])
def test_likely_drafts_are_longer(chance: float, count: int) -> None:
    assert Source(chance).worth(0.1, MOST, 0)[0] == pytest.approx(count, abs=1)


def test_among_other_sessions_a_row_has_to_win_more() -> None:
    source = Source(0.5)
    assert source.worth(0.2, MOST, 15)[0] == 0 < source.worth(0.2, MOST, 0)[0]


def test_drafts_that_lose_end_and_are_tried_ever_more_rarely() -> None:
    draft, steps = drafter(), []
    for step in range(3000):
        tokens = draft.plan(50, seen(), 0).tokens
        draft.note(len(tokens), 0)
        if tokens:
            steps.append((step, len(tokens)))
    late = [(step, size) for step, size in steps if step > 300]
    assert 5 < len(late) < 20
    assert {size for _, size in late} == {1}
    assert sum(size for _, size in steps) * 0.1 / 3000 < 0.01  # of the time


def test_a_source_that_is_right_again_is_used_again() -> None:
    draft = drafter()
    for _ in range(300):
        draft.note(len(draft.plan(50, seen(), 0).tokens), 0)
    for _ in range(600):
        tokens = draft.plan(50, seen(), 0).tokens
        draft.note(len(tokens), len(tokens))
    assert len(draft.plan(50, seen(), 0).tokens or draft.plan(50, seen(), 0).tokens) == MOST


def test_methods_draft_where_a_step_of_theirs_is_short() -> None:
    assert seen(step=1.2).worth_by_method(9, 0, Allowance())[0] == 0
    assert Costs().worth_by_method(9, 0, Allowance())[0] == 0  # a step without drafts comes first
    assert seen().worth_by_method(9, 0, Allowance())[0] == 1  # how long a step takes is seen by trying
    won = Allowance()
    won.note(3.0)
    assert seen(step=0.1).worth_by_method(9, 0, won)[0] > 3
    for timed, plan in ((True, Plan(by_method=2)), (False, Plan())):
        draft = Drafter(None, [1, 2, 3], by_method=True, timed=timed)
        assert draft.plan(9, seen(step=0.1), 0, (2, 1.5)) == plan


def test_the_better_of_a_copy_and_a_method_is_drafted() -> None:
    assert drafter(by_method=True).plan(9, seen(), 0, (2, 99.0)) == Plan(by_method=2)
    assert drafter(by_method=True).plan(9, seen(), 0, (2, 1.01)) == Plan(TEXT[20:29])


def test_an_allowance_is_given_earned_and_owed() -> None:
    allowance = Allowance()
    assert (allowance.pays(0.2), allowance.pays(0.5), allowance.pays(5.0)) == (3, 1, 1)
    allowance.note(-100.0)
    assert allowance.pays(0.01) < 1
    steps = 0
    while not allowance.pays(0.75):
        allowance.note(0.0)
        steps += 1
    assert steps == pytest.approx(375, abs=1)
    for _ in range(1000):
        allowance.note(0.0)
    assert allowance.pays(0.4) == 1  # steps give no more
    for _ in range(20):
        allowance.note(1.0)
    assert allowance.pays(0.5) == 8  # drafts do


def test_now_and_then_a_step_goes_without() -> None:
    draft, sizes = drafter(), []
    for _ in range(200):
        tokens = draft.plan(50, seen(), 0).tokens
        draft.note(len(tokens), len(tokens))
        sizes.append(len(tokens))
    assert sizes.count(0) == 3


def test_costs_are_learnt_from_steps() -> None:
    costs = Costs()
    costs.note_step(9.0, 5)  # nothing to compare with
    assert costs == Costs()
    for _ in range(60):
        costs.note_step(2.0, 0)
        costs.note_step(3.0, 10)
        costs.note_drafting(5.0, 5)
    assert (costs.plain_s, costs.step) == (2.0, 0.5)
    assert costs.row == pytest.approx(0.05, abs=1e-3)
