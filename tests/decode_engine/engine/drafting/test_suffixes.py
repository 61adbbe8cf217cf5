"""What stood before is found as by looking everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from decode_engine.engine.drafting.suffixes import NOWHERE, REACH, ContextSuffixes, OwnText


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
