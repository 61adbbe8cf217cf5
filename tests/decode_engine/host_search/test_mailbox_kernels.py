"""The device's side of a mailbox: what it writes, what it waits for, and when it stops waiting.

Without a CUDA device the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from decode_engine.host_search.mailbox import Mailbox
from decode_engine.host_search.mailbox_triton import await_lists, post_queries
from decode_engine.host_search.shared_search_numba import COUNT_BITS
from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from tests.decode_engine.host_search.searches import DIM, GROUP, HEADS, Layer, make_plan, searched

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
