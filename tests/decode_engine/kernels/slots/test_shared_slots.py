"""Sessions of one context bring a row that several of them miss once, and all of them read it, whoever else is there.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from decode_engine.kernels.slots.slot_cache import RowCounts
from tests.decode_engine.kernels.problems.slot_problems import Steps, cached_sequence, check_shared

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


@pytest.mark.parametrize("slots", [16, 64, 300])
def test_random_groups_that_join_and_leave(slots: int) -> None:
    """Sessions that want some of the same keys, too many for the slots or not; some come, go, and change rows."""
    choose = random.Random(slots)
    context = cached_sequence(230, slots, heads=1, device=DEVICE)
    steps = Steps(4, heads=1, keys=256, segments=2, device=DEVICE)
    searched = range(context.sequence.first, context.sequence.end)
    for _ in range(4):
        seated = [choose.choice([context, context, None]) for _ in range(3)] + [context]
        choose.shuffle(seated)
        common = choose.sample(searched, 30)
        wanted = [
            [[] if each is None else sorted({*choose.sample(common, 20), *choose.sample(searched, 12)})]
            for each in seated
        ]
        check_shared(steps, seated, wanted)


def test_a_row_that_all_miss_is_brought_once() -> None:
    context = cached_sequence(230, 300, heads=2, device=DEVICE)
    steps = Steps(3, keys=256, device=DEVICE)
    keys = list(range(40, 80))
    first = check_shared(steps, [context] * 3, [[keys, keys]] * 3)
    assert first == RowCounts(3 * 2 * 52, 2 * 2 * 52, 0)  # 40 listed and 12 other ones
    # What one has brought another one finds, also in a step of its own.
    assert check_shared(steps, [None, context, None], [[[], []], [keys, keys], [[], []]]).fetched == 0


def test_groups_on_contexts_of_their_own_do_not_mix() -> None:
    """Equal keys of two contexts are different rows."""
    contexts = [cached_sequence(200, 300, heads=1, seed=seed, device=DEVICE) for seed in (0, 1)]
    steps = Steps(4, heads=1, keys=256, segments=1, device=DEVICE)
    keys = [list(range(50, 90))]
    one, other = contexts
    located = steps.fetch([one, other, one, other], [keys] * 4)
    for each, places in zip((one, other, one, other), located, strict=True):
        assert each.cache is not None
        for key, place in places[0].items():
            assert torch.equal(each.cache.rows_LHS2D[1, 0, place].cpu(), each.sequence.kv_HN2D[0, key])
    assert [each.cache.counts().fetched for each in contexts if each.cache] == [52, 52]


def test_more_misses_than_there_is_room_for() -> None:
    """Nobody brings the others: every session reads them in place, and the next step may bring them."""
    context = cached_sequence(300, 320, heads=1, device=DEVICE)
    steps = Steps(2, heads=1, keys=512, device=DEVICE)
    room = steps.buffers
    few = ("sources_C", "targets_C", "ids_C", "entries_C")
    steps.buffers = replace(room, **{name: getattr(room, name)[:30] for name in few})
    wanted = [[list(range(50, 100))], [list(range(60, 120))]]
    first = check_shared(steps, [context] * 2, wanted)
    assert (first.fetched, first.bypassed > 0) == (30, True)
    steps.buffers = replace(room, counts_4=steps.buffers.counts_4)
    assert check_shared(steps, [context] * 2, wanted).fetched == 70 + 12 - 30
