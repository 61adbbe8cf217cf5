"""Rows that are brought while a search announces them are found by the fetch as if they had been there before.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.kernels.attention.announcements import TURNS, Announcements
from decode_engine.kernels.slots.early_rows import bring_early
from decode_engine.kernels.slots.slot_cache import CROWDED, DONE, RowCounts
from index_store.errors import InvalidArgumentError
from tests.decode_engine.kernels.problems.slot_problems import (
    CachedSequence,
    Steps,
    add,
    cached_sequence,
    check_shared,
    next_wanted,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
ROOT = Path(__file__).resolve().parents[4]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("queues", [1, 2, 5])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_announced_is_in_slots_when_the_fetch_begins(queues: int, head_dim: int) -> None:
    """Next to nothing is missing then; counts say what was in slots before the step."""
    session = cached_sequence(307, 300, head_dim=head_dim, device=DEVICE)
    steps = Steps(1, device=DEVICE, queues=queues)
    wanted = None
    for turn in range(3):
        wanted = next_wanted(session, 2, 52, 0.8, generator(turn), wanted)
        steps.buffers.counts_4[:2] = 0
        counts = steps.check([session], [wanted])[0]
        # A key that wants the same slot as another one at once is left to the fetch.
        assert int(steps.buffers.counts_4[:2].sum()) <= 6
        assert counts.reused >= (2 * (42 + 12) if turn else 0)
        assert counts.bypassed == 0
        announcements = steps.announcements
        assert announcements is not None
        assert not announcements.brought_R.any()
        assert announcements.counts_X.tolist() == [0] * (queues + 1) + [turn + 1]
    assert counts.fetched < 2 * 30


@pytest.mark.parametrize("slots", [16, 64, 77])
def test_caches_that_are_too_small(slots: int) -> None:
    """Whatever finds no slot is read in place, and rows are those of their keys."""
    session = cached_sequence(307, slots, device=DEVICE)
    steps = Steps(1, device=DEVICE, queues=2)
    assert session.cache is not None
    wanted, sums = None, RowCounts(0, 0, 0)
    for turn in range(3):
        wanted = next_wanted(session, 2, 52, 0.5, generator(turn), wanted)
        located = steps.fetch([session], [wanted])[0]
        in_slots = 0
        for head, places in enumerate(located):
            held = [place for place in places.values() if place >= 0]
            assert len(set(held)) == len(held)
            in_slots += len(held)
            for key, place in places.items():
                if place >= 0:
                    row = session.cache.rows_LHS2D[1, head, place].cpu()
                    assert torch.equal(row, session.sequence.kv_HN2D[head, key])
        not_found, found = steps.found_RX2.sum((0, 1)).tolist()
        sums = add(sums, RowCounts(2 * 64, found, 2 * 64 - in_slots))
        assert not_found + found == 2 * 64
        assert 0 <= found <= in_slots
        assert session.cache.counts() == sums
    if slots == 16:
        tallies_HC = session.cache.tallies_LHC[1]
        assert torch.equal(tallies_HC[:, CROWDED], tallies_HC[:, DONE])


def test_sessions_of_one_context_bring_a_row_once() -> None:
    choose = random.Random(5)
    context = cached_sequence(230, 300, heads=2, device=DEVICE)
    steps = Steps(3, keys=256, device=DEVICE, queues=3)
    keys = list(range(40, 80))
    first = check_shared(steps, [context] * 3, [[keys, keys]] * 3)
    assert first == RowCounts(3 * 2 * 52, 2 * 2 * 52, 0)
    searched = range(context.sequence.first, context.sequence.end)
    for _ in range(3):
        wanted = [[sorted(choose.sample(searched, 30)) for _ in range(2)] for _ in range(3)]
        seated = [context, None, context]
        check_shared(
            steps, seated, [each if at else [[], []] for each, at in zip(wanted, seated, strict=True)]
        )


def test_hints_that_are_wrong_do_no_harm() -> None:
    """Of rows that are not there, of keys behind a context's end, of sessions without a cache; and too many hints."""
    session, bare = cached_sequence(120, 200, device=DEVICE), cached_sequence(90, 0, device=DEVICE, seed=1)
    placed: list[CachedSequence | None] = [session, None, bare]
    steps = Steps(3, device=DEVICE, queues=2)
    announcements = steps.announcements
    assert announcements is not None
    steps.announce([[[119, 120, 511], [0, 400]], [[5], [7]], [[20], [30]], [[1], [2]]])
    wanted = [
        next_wanted(session, 2, 30, 0.0, generator(0)),
        [[], []],
        next_wanted(bare, 2, 30, 0.0, generator(1)),
    ]
    located = steps.fetch(placed, wanted)
    assert all(place == -1 for of_head in located[2] for place in of_head.values())
    for head, places in enumerate(located[0]):
        assert session.cache is not None
        for key, place in places.items():
            row = session.cache.rows_LHS2D[1, head, place].cpu()
            assert torch.equal(row, session.sequence.kv_HN2D[head, key])
    # More than a ring holds: the oldest are forgotten, and brought by the fetch. What is left there is of this step.
    few = [next_wanted(session, 2, 100, 0.0, generator(2)), [[], []], [[], []]]
    steps.announcements = replace(announcements, cells_QC=announcements.cells_QC[:, :128].clone())
    for _ in range(2):
        steps.announce([[3 * few[0][0], []], [[], []], [[], []]])
        steps.check([session, None, None], few)


@pytest.mark.parametrize("ended", [0, TURNS - 1])
def test_what_was_announced_in_another_step_is_not_read(ended: int) -> None:
    """Rings keep it, also where steps begin to count anew."""
    session = cached_sequence(307, 300, device=DEVICE)
    steps = Steps(1, device=DEVICE, queues=2)
    announcements = steps.announcements
    assert announcements is not None
    announcements.counts_X[-1] = ended
    left = [sorted(range(40, 90)), sorted(range(90, 140))]
    steps.announce([left])
    announcements.counts_X[:-2] = 0
    announcements.counts_X[-1] = (ended + 1) % TURNS
    wanted = [sorted(range(200, 230)), sorted(range(230, 260))]
    counts = steps.check([session], [wanted])[0]
    assert counts == RowCounts(2 * 42, 0, 0)


def test_readers_look_at_a_cell_once_a_round() -> None:
    """For compute capability 9.0, next to no spills: a tile's keys, rows and tags are of one moment."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.decode_engine.kernels.problems.compile_early"]
    found = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True
    ).stdout
    for name, figures in json.loads(found).items():
        assert figures["looks"] == 1, name
        assert figures["local"] <= 32, name
        assert figures["programs"], name


def test_queues_of_too_few_cells_are_refused() -> None:
    few = replace(
        Announcements.allocate(2, 9, 8, DEVICE), cells_QC=torch.zeros(2, 32, dtype=torch.int64, device=DEVICE)
    )
    with pytest.raises(InvalidArgumentError, match="8 readers take 32 cells each of 2 queues of 32"):
        bring_early(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), few, 64, 1)


def test_a_search_that_never_ends_is_not_waited_for() -> None:
    """Of the launch's programs none hangs, and the steps behind it are as ever."""
    session = cached_sequence(120, 200, device=DEVICE)
    steps = Steps(1, device=DEVICE, queues=2)
    announcements = steps.announcements
    assert announcements is not None
    bring_early(steps.records([session]), announcements, 2 * 64 * 2, 7, limit_ns=20_000)
    steps.fetch([session], [[[50, 70], [60]]])
    steps.check([session], [[[51, 70], [60]]])
    assert announcements.counts_X.tolist() == [0, 0, 0, 2]
