"""Threads on the host list what the general path selects, in the order of the layers, whatever else happens.

A thread plays the device: it posts queries and waits for lists, as the kernels of `kernels.mailbox` do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from decode_engine.host_search import mailbox as workers_module
from decode_engine.host_search.mailbox import Mailbox, SearchedRow, SearchWorkers
from decode_engine.host_search.shared_search_numba import INSIDE, write_word
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.indexes.query_tables.search_numba import TILE
from tests.decode_engine.host_search.searches import (
    DIM,
    GROUP,
    HEADS,
    SECONDS,
    FakeDevice,
    Layer,
    make_plan,
    searched,
)

LONG = 2 * TILE + 77
VALUES = HEADS * GROUP * DIM


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [Layer(LONG, seed) for seed in range(3)]


@pytest.fixture
def workers() -> Iterator[SearchWorkers]:
    made = SearchWorkers(2, 2)
    yield made
    made.close()


def test_the_search_is_compiled_before_a_device_can_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a machine's first server it takes longer than a device waits."""
    begun: list[set[threading.Thread]] = []
    monkeypatch.setattr(workers_module, "compile_search", lambda: begun.append(set(threading.enumerate())))
    before = set(threading.enumerate())
    made = SearchWorkers(2, 1)
    assert [[thread for thread in seen - before if thread.name.startswith("search-")] for seen in begun] == [
        []
    ]
    assert made.alive == 2
    made.close()


def queries(layers: int, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(layers, rows, VALUES, generator=torch.Generator().manual_seed(seed))


def finish(workers: SearchWorkers, device: FakeDevice, lane: int = 0) -> None:
    device.join()
    workers.end(lane)
    if device.error is not None:
        raise device.error


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_lists_are_those_of_the_general_path(workers: SearchWorkers, pooled: bool, strided: bool) -> None:
    """Rows of other lengths, ranges and budgets; a row that keeps all; one with nothing to search; an idle one."""
    contexts = [
        [Layer(keys, 10 * keys + n, strided=strided) for n in range(2)] for keys in (LONG, 5_000, 900, 40)
    ]
    ranges = [(8, LONG - 64, 300), (0, 5_000, 1_000), (8, 800, 2_000), (8, 8, 10)]
    plan = make_plan(5, pooled=pooled, strided=strided, layers=2)
    mailbox = Mailbox(plan, page_locked=False)
    numbers = [0, 1, 3, 4]
    rows = [
        searched(number, each, *span) for number, each, span in zip(numbers, contexts, ranges, strict=True)
    ]
    for seed in range(2):
        mailbox.begin(rows, [0, 1])
        q_LBX = queries(2, 5, seed)
        workers.begin(0, mailbox)
        device = FakeDevice(mailbox, q_LBX)
        finish(workers, device)
        for layer, lists in device.lists.items():
            for number, row in enumerate(rows):
                expected = contexts[number][layer].expected(q_LBX[layer, row.row], row, pooled=pooled)
                for h in range(HEADS):
                    assert torch.equal(lists[number * HEADS + h], expected[h]), (layer, number, h)
    assert mailbox.finished


def test_keys_of_equal_scores_are_kept_by_their_ids(workers: SearchWorkers) -> None:
    layer = Layer(LONG, 3)
    layer.arrays["scores"].fill_(5)
    mailbox = Mailbox(make_plan(1, layers=1), page_locked=False)
    row = searched(0, [layer], 8, LONG, 20)
    mailbox.begin([row], [0])
    workers.begin(0, mailbox)
    device = FakeDevice(mailbox, queries(1, 1))
    finish(workers, device)
    assert [ids.tolist() for ids in device.lists[0]] == [list(range(8, 28))] * HEADS


def test_steps_follow_each_other_and_lanes_run_at_once(workers: SearchWorkers, layers: list[Layer]) -> None:
    """The device of one lane stops between two layers; the other one's steps pass it. Some layers are not searched."""
    plan = make_plan(1)
    slow, fast = (Mailbox(plan, page_locked=False) for _ in range(2))
    row = searched(0, [layers[0], layers[2]], 8, LONG, 100)
    q_LBX = queries(3, 1)
    assert slow.begin([row], [0, 2]) == 1
    workers.begin(0, slow)
    go_on = threading.Event()
    slow_device = FakeDevice(slow, q_LBX, go_on=go_on)
    assert slow_device.between.wait(SECONDS)
    for step in range(1, 4):
        assert fast.begin([row], [0, 2]) == step
        workers.begin(1, fast)
        device = FakeDevice(fast, q_LBX * step)
        finish(workers, device, 1)
        for layer in (0, 2):
            assert torch.equal(
                device.lists[layer][0], layers[layer].expected(q_LBX[layer, 0] * step, row, pooled=True)[0]
            )
    assert slow_device.is_alive()
    go_on.set()
    finish(workers, slow_device)
    assert sorted(slow_device.lists) == [0, 2]


@pytest.mark.parametrize("posted", [0, 1, 3])
def test_a_step_is_cancelled_in_every_phase(workers: SearchWorkers, layers: list[Layer], posted: int) -> None:
    """Before anything was asked for, between two layers, and when all lists are there; the next step runs."""
    mailbox = Mailbox(make_plan(1), page_locked=False)
    row = searched(0, layers, 8, LONG, 100)
    q_LBX = queries(3, 1)
    mailbox.begin([row], range(3))
    workers.begin(0, mailbox)
    for layer in range(posted):
        mailbox.post(layer, q_LBX[layer])
        while layer < posted - 1 and mailbox.answer(layer, 1) is None:
            time.sleep(0.001)
    mailbox.cancel()
    workers.end(0)
    assert mailbox.stopped
    with pytest.raises(InterruptedError):
        mailbox.answer(0, 0)
    mailbox.begin([row], range(3))
    workers.begin(0, mailbox)
    device = FakeDevice(mailbox, q_LBX)
    finish(workers, device)
    assert torch.equal(device.lists[2][1], layers[2].expected(q_LBX[2, 0], row, pooled=True)[1])


def test_a_step_that_ends_early_is_cancelled(workers: SearchWorkers, layers: list[Layer]) -> None:
    """The device never comes to the second layer: threads do not wait for it once the step is ended."""
    mailbox = Mailbox(make_plan(1), page_locked=False)
    mailbox.begin([searched(0, layers, 8, LONG, 100)], range(3))
    workers.begin(0, mailbox)
    mailbox.post(0, queries(1, 1)[0])
    workers.end(0)
    assert mailbox.stopped


def test_a_thread_that_dies_ends_the_wait(layers: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def die(lanes: int, count: int, semaphore: int, end: int) -> None:
        asked.wait(SECONDS)
        raise MemoryError("no more")

    monkeypatch.setattr(workers_module, "take_part", die)
    workers = SearchWorkers(1, 1)
    mailbox = Mailbox(make_plan(1), page_locked=False)
    row = searched(0, layers, 8, LONG, 100)
    mailbox.begin([row], range(3))
    workers.begin(0, mailbox)
    device = FakeDevice(mailbox, queries(3, 1))
    asked.set()
    device.join()
    assert isinstance(device.error, InterruptedError)
    with pytest.raises(SparseKVError, match="no more"):
        workers.end(0)
    with pytest.raises(SparseKVError, match="no more"):
        workers.begin(0, mailbox)
    workers.close()
    assert workers.alive == 0


def test_a_thread_that_dies_inside_of_a_step_that_is_ended_is_not_waited_for_long(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_END_SECONDS", 2 * SECONDS)  # for threads that live
    inside, ended = threading.Event(), threading.Event()

    def die(lanes: int, count: int, semaphore: int, end: int) -> None:
        write_word(lanes + 8 * INSIDE, 1)
        inside.set()
        ended.wait(SECONDS)
        time.sleep(0.2)
        raise MemoryError("no more")

    monkeypatch.setattr(workers_module, "take_part", die)
    workers = SearchWorkers(1, 1)
    mailbox = Mailbox(make_plan(1), page_locked=False)
    mailbox.begin([searched(0, layers, 8, LONG, 100)], range(3))
    workers.begin(0, mailbox)
    assert inside.wait(SECONDS)
    begin = time.monotonic()
    ended.set()
    with pytest.raises(SparseKVError, match="no more"):
        workers.end(0)
    assert time.monotonic() - begin < SECONDS
    workers.close()


def test_closing_leaves_no_thread_even_in_the_middle_of_a_step(layers: list[Layer]) -> None:
    before = set(threading.enumerate())
    workers = SearchWorkers(3, 1)
    assert workers.alive == 3
    mailbox = Mailbox(make_plan(1), page_locked=False)
    mailbox.begin([searched(0, layers, 8, LONG, 100)], range(3))
    workers.begin(0, mailbox)
    go_on = threading.Event()
    device = FakeDevice(mailbox, queries(3, 1), go_on=go_on)
    assert device.between.wait(SECONDS)
    workers.close()
    go_on.set()
    device.join()
    assert workers.alive == 0
    assert isinstance(device.error, InterruptedError)
    # Threads of other tests in this process may end, and begin, meanwhile.
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("search-")]


def test_what_cannot_be_searched_is_refused(layers: list[Layer]) -> None:
    mailbox = Mailbox(make_plan(1), page_locked=False)
    with pytest.raises(InvalidArgumentError, match="room for 5000"):
        mailbox.begin([searched(0, layers, 8, LONG, 5_001)], range(3))
    longer = SearchedRow(0, 0, 50_000, 10, 50_000, searched(0, layers, 0, 1, 1).places)
    with pytest.raises(InvalidArgumentError, match="of 40000"):
        mailbox.begin([longer], range(3))
    with pytest.raises(InvalidArgumentError, match="at least one"):
        SearchWorkers(0, 1)
