"""Searches on the host: lists, mailboxes and threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from decode_engine.host_search import mailbox as workers_module
from decode_engine.host_search.mailbox import Mailbox, SearchedRow, SearchWorkers
from decode_engine.host_search.mailbox_triton import await_lists, post_queries
from decode_engine.host_search.shared_search_numba import COUNT_BITS, INSIDE, write_word
from decode_engine.host_search.table_lists_numba import (
    BINS,
    best_listed,
    count_blocks,
    fold_of,
    list_reaching,
    lower_bound,
)
from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
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
    made = SearchWorkers(2)
    yield made
    made.close()


def test_the_search_is_compiled_before_a_device_can_ask_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a machine's first server it takes longer than a device waits."""
    begun: list[set[threading.Thread]] = []
    monkeypatch.setattr(workers_module, "compile_search", lambda: begun.append(set(threading.enumerate())))
    before = set(threading.enumerate())
    made = SearchWorkers(2)
    assert [[thread for thread in seen - before if thread.name.startswith("search-")] for seen in begun] == [
        []
    ]
    assert made.alive == 2
    made.close()


def queries(layers: int, rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(layers, rows, VALUES, generator=torch.Generator().manual_seed(seed))


def finish(workers: SearchWorkers, device: FakeDevice) -> None:
    device.join()
    workers.end()
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
        workers.begin(mailbox)
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
    workers.begin(mailbox)
    device = FakeDevice(mailbox, queries(1, 1))
    finish(workers, device)
    assert [ids.tolist() for ids in device.lists[0]] == [list(range(8, 28))] * HEADS


def test_steps_follow_each_other(workers: SearchWorkers, layers: list[Layer]) -> None:
    """In two mailboxes, one after the other. Some layers are not searched."""
    mailboxes = [Mailbox(make_plan(1), page_locked=False) for _ in range(2)]
    row = searched(0, [layers[0], layers[2]], 8, LONG, 100)
    q_LBX = queries(3, 1)
    for step in range(1, 4):
        for mailbox in mailboxes:
            assert mailbox.begin([row], [0, 2]) == step
            workers.begin(mailbox)
            with pytest.raises(RuntimeError, match="in flight"):
                workers.begin(mailbox)
            device = FakeDevice(mailbox, q_LBX * step)
            finish(workers, device)
            assert sorted(device.lists) == [0, 2]
            for layer, lists in device.lists.items():
                expected = layers[layer].expected(q_LBX[layer, 0] * step, row, pooled=True)
                assert torch.equal(lists[0], expected[0])


@pytest.mark.parametrize("posted", [0, 1, 3])
def test_a_step_is_cancelled_in_every_phase(workers: SearchWorkers, layers: list[Layer], posted: int) -> None:
    """Before anything was asked for, between two layers, and when all lists are there; the next step runs."""
    mailbox = Mailbox(make_plan(1), page_locked=False)
    row = searched(0, layers, 8, LONG, 100)
    q_LBX = queries(3, 1)
    mailbox.begin([row], range(3))
    workers.begin(mailbox)
    for layer in range(posted):
        mailbox.post(layer, q_LBX[layer])
        while layer < posted - 1 and mailbox.answer(layer, 1) is None:
            time.sleep(0.001)
    mailbox.cancel()
    workers.end()
    assert mailbox.stopped
    with pytest.raises(InterruptedError):
        mailbox.answer(0, 0)
    mailbox.begin([row], range(3))
    workers.begin(mailbox)
    device = FakeDevice(mailbox, q_LBX)
    finish(workers, device)
    assert torch.equal(device.lists[2][1], layers[2].expected(q_LBX[2, 0], row, pooled=True)[1])


def test_a_step_that_ends_early_is_cancelled(workers: SearchWorkers, layers: list[Layer]) -> None:
    """The device never comes to the second layer: threads do not wait for it once the step is ended."""
    mailbox = Mailbox(make_plan(1), page_locked=False)
    mailbox.begin([searched(0, layers, 8, LONG, 100)], range(3))
    workers.begin(mailbox)
    mailbox.post(0, queries(1, 1)[0])
    workers.end()
    assert mailbox.stopped


def test_a_thread_that_dies_ends_the_wait(layers: list[Layer], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def die(step: int, semaphore: int, end: int) -> None:
        asked.wait(SECONDS)
        raise MemoryError("no more")

    monkeypatch.setattr(workers_module, "take_part", die)
    workers = SearchWorkers(1)
    mailbox = Mailbox(make_plan(1), page_locked=False)
    row = searched(0, layers, 8, LONG, 100)
    mailbox.begin([row], range(3))
    workers.begin(mailbox)
    device = FakeDevice(mailbox, queries(3, 1))
    asked.set()
    device.join()
    assert isinstance(device.error, InterruptedError)
    with pytest.raises(SparseKVError, match="no more"):
        workers.end()
    with pytest.raises(SparseKVError, match="no more"):
        workers.begin(mailbox)
    workers.close()
    assert workers.alive == 0


def test_a_thread_that_dies_inside_of_a_step_that_is_ended_is_not_waited_for_long(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers_module, "_END_SECONDS", 2 * SECONDS)  # for threads that live
    inside, ended = threading.Event(), threading.Event()

    def die(step: int, semaphore: int, end: int) -> None:
        write_word(step + 8 * INSIDE, 1)
        inside.set()
        ended.wait(SECONDS)
        time.sleep(0.2)
        raise MemoryError("no more")

    monkeypatch.setattr(workers_module, "take_part", die)
    workers = SearchWorkers(1)
    mailbox = Mailbox(make_plan(1), page_locked=False)
    mailbox.begin([searched(0, layers, 8, LONG, 100)], range(3))
    workers.begin(mailbox)
    assert inside.wait(SECONDS)
    begin = time.monotonic()
    ended.set()
    with pytest.raises(SparseKVError, match="no more"):
        workers.end()
    assert time.monotonic() - begin < SECONDS
    workers.close()


def test_closing_leaves_no_thread_even_in_the_middle_of_a_step(layers: list[Layer]) -> None:
    before = set(threading.enumerate())
    workers = SearchWorkers(3)
    assert workers.alive == 3
    mailbox = Mailbox(make_plan(1), page_locked=False)
    mailbox.begin([searched(0, layers, 8, LONG, 100)], range(3))
    workers.begin(mailbox)
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
        SearchWorkers(0)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
ROWS, LAYER = 3, 2
SHORT_NS = 2_000_000


class Ends:
    """A mailbox of which rows 0 and 2 are in use, and what the device has of it."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(make_plan(ROWS), page_locked=DEVICE == "cuda")
        layers = [Layer(100, seed) for seed in range(3)]
        step = self.mailbox.begin([searched(row, layers, 8, 90, 20) for row in (0, 2)], range(3))
        self.records_BF = torch.zeros(ROWS, records.RECORD_FIELDS, dtype=torch.int64)
        self.records_BF[[0, 2], records.STEP] = step
        self.records_BF = self.records_BF.to(DEVICE)
        self.lists = KeyLists.allocate(ROWS * HEADS, 1, self.mailbox.sizes.width, DEVICE)
        self.lists.counts_RP.fill_(99)
        self.gave_up_1 = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def answer(self, number: int, ids: list[int]) -> None:
        shared = self.mailbox.shared
        shared.ids_RW[number, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        shared.answers_RX[number, 0] = (self.mailbox.number_of(LAYER) << COUNT_BITS) | len(ids)

    def wait(self, limit_ns: int = SHORT_NS) -> list[list[int]]:
        shared = self.mailbox.shared
        await_lists(self.records_BF, shared, self.lists, self.gave_up_1, LAYER, limit_ns)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return [self.lists.of_row(row).tolist() for row in range(ROWS * HEADS)]


def test_queries_are_posted_for_rows_in_use() -> None:
    ends = Ends()
    q_BX = torch.randn(ROWS, HEADS * GROUP * DIM).to(DTYPE)
    post_queries(q_BX.to(DEVICE), ends.records_BF, ends.mailbox.shared, LAYER)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    shared = ends.mailbox.shared
    assert shared.posted_BX[:, 0].tolist() == [
        ends.mailbox.number_of(LAYER),
        0,
        ends.mailbox.number_of(LAYER),
    ]
    assert torch.equal(shared.q_BX[[0, 2]], q_BX[[0, 2]].float())
    assert (shared.q_BX[1] == 0).all()


def test_lists_are_copied_when_they_are_there() -> None:
    ends = Ends()
    ids = [[8, 12, 80], [], [9], list(range(10, 30))]
    for number, listed in zip((0, 1, 4, 5), ids, strict=True):
        ends.answer(number, listed)
    assert ends.wait() == [ids[0], ids[1], [], [], ids[2], ids[3]]
    assert not ends.mailbox.gave_up
    assert int(ends.gave_up_1) == 0


def test_the_device_gives_up_and_waits_no_more_in_that_step() -> None:
    """A list that is late: those that are there are used no less, and nothing else is waited for afterwards."""
    ends = Ends()
    for number in (0, 1, 4):
        ends.answer(number, [20])
    assert ends.wait() == [[20], [20], [], [], [20], []]
    assert ends.mailbox.gave_up
    assert int(ends.gave_up_1) == 1
    waits_R2 = ends.mailbox.shared.waits_LR2[LAYER]
    waited_R = waits_R2[:, 1] - waits_R2[:, 0]
    assert int(waited_R[5]) >= SHORT_NS > int(waited_R[0])
    waits_R2.zero_()
    assert ends.wait(2**30) == [[]] * 6
    assert not waits_R2.any()


def test_a_cancelled_step_is_not_waited_for() -> None:
    ends = Ends()
    ends.mailbox.cancel()
    assert ends.wait(2**30) == [[]] * 6
    assert not ends.mailbox.gave_up


@pytest.mark.parametrize("case", ["spread", "negative", "equal", "weights", "few"])
def test_a_bound_leaves_the_keys_that_are_kept_and_few_others(case: str) -> None:
    rng = np.random.default_rng(3)
    keys, keep = 3 * TILE - 500, 400
    scores = rng.normal(0, 1, keys).astype(np.float32)
    reach = np.float32(8)
    if case == "negative":
        scores -= 3
    elif case == "equal":
        scores[:] = 0.25
    elif case == "weights":
        scores, reach = np.exp(4 * scores - 20).astype(np.float32), np.float32(0)
    elif case == "few":
        keep = keys // 2
    parts = [scores[first : first + TILE] for first in range(0, keys, TILE)]
    histograms = np.empty((len(parts), BINS), np.int32)
    bins = np.empty(2 * TILE, np.int32)
    for part, histogram in zip(parts, histograms, strict=True):
        count_blocks(part, fold_of(keys, keep), reach, bins, histogram)
    bound = lower_bound(histograms, keep, reach)
    reaching = int((scores >= bound).sum())
    assert reaching >= keep
    if case != "equal":
        assert reaching < 1.4 * keep
    ids, listed = np.empty(3 * TILE, np.int32), np.empty(3 * TILE, np.float32)
    words = np.empty(TILE // 32 + 2, np.uint64)
    counts = np.zeros(len(parts), np.int64)
    for number, part in enumerate(parts):
        first = number * TILE
        own = slice(first, first + len(part))
        counts[number] = list_reaching(part, bound, first, words, ids[own], listed[own])
    out = np.empty(keys, np.int32)
    kept = best_listed(ids, listed, counts, keep, out)
    # A stable sort gives ties to lower ids.
    expected = np.sort(np.argsort(-scores, kind="stable")[:keep])
    assert np.array_equal(out[:kept], expected)
