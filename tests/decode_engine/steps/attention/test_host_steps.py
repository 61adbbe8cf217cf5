"""Captured steps over contexts that are searched on the host: what they leave, and in which waves lists come.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured; the threads are the same.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_engine.engine.sampler import Sampler
from decode_engine.host_search.mailbox import Mailbox, MailboxSizes, SearchThreads
from decode_engine.host_search.mailbox_triton import await_lists
from decode_engine.host_search.shared_search_numba import COUNT_BITS
from decode_engine.kernels import records
from decode_engine.kernels.attention.sparse_attention import KeyLists
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.host_steps import HostPlan, HostSteps, HostTableSelection
from decode_engine.steps.attention.listed_steps import HybridSteps
from decode_engine.steps.attention.selections import TableSelection
from decode_engine.steps.attention.step_attention import StepPlan
from decode_engine.steps.batch_kinds import step_attention_for
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import get_method
from tests.decode_engine.host_search.searches import HEADS, FakeDevice, Layer, make_plan, searched
from tests.decode_engine.steps.sessions import (
    GREEDY,
    Case,
    begin,
    make_contexts,
    make_stepper,
    method_of,
    step_logits,
)
from tests.support.devices import DEVICE
from tests.support.serving.service import wait_until

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
pytestmark.append(pytest.mark.usefixtures("few_programs"))
POOLED = "csattention+dropped@group=pooled"


@pytest.fixture
def threads() -> Iterator[SearchThreads]:
    made = SearchThreads(2)
    yield made
    made.close()


def start(
    runner: ModelRunner, expression: str = POOLED, placement: Placement = Placement.HOST
) -> list[Session]:
    """Two sessions on one context and one on another."""
    case = Case(method=expression, keep=0.05, placement=placement)
    return begin(runner, make_contexts(runner, case), method_of(expression, 0.05))


def selection_of(runner: ModelRunner, threads: SearchThreads) -> HostTableSelection:
    """Of a batch of one row."""
    cpu = torch.device("cpu")
    return HostTableSelection(
        HostPlan(runner.identity, method_of(POOLED, 0.05), 1, 4096, torch.float32, cpu, searching=threads)
    )


def test_a_context_that_is_released_stays_until_its_step_has_ended(
    runner: ModelRunner, threads: SearchThreads
) -> None:
    session, layers = start(runner)[2], range(runner.identity.layers)
    context = session.context
    selection = selection_of(runner, threads)
    q_LBX = torch.randn(len(layers), 1, runner.identity.query_heads * runner.identity.head_dim)
    lists = []
    for released in (False, True):
        assert selection.begin({0: session}) > 0
        if released:
            context.release()
            gc.collect()
        device = FakeDevice(selection.mailbox, q_LBX)
        device.join()
        selection.end()
        lists.append(device.lists)
    assert all(
        torch.equal(one, other)
        for layer in layers
        for one, other in zip(lists[0][layer], lists[1][layer], strict=True)
    )


def test_tables_of_a_session_that_has_ended_do_not_stay_in_memory(
    runner: ModelRunner, threads: SearchThreads
) -> None:
    """Rows of a batch remember a session until another one takes its row."""
    session, selection = start(runner)[2], selection_of(runner, threads)
    selection.begin({0: session})
    with pytest.raises(SparseKVError, match="cancelled"):
        selection.end()
    tables = weakref.ref(session.context.index("query_tables", 0))
    session.close()
    session.context.release()
    gc.collect()
    assert tables() is None
    with pytest.raises(InvalidArgumentError, match="has been released"):
        selection.begin({0: session})


def test_a_step_that_the_device_gave_up_is_an_error(runner: ModelRunner, threads: SearchThreads) -> None:
    session, selection = start(runner)[2], selection_of(runner, threads)
    selection.begin({0: session})
    selection.mailbox.shared.trouble_X[0] = 1
    with pytest.raises(SparseKVError, match="gave up"):
        selection.end()
    selection.begin({0: session})
    with pytest.raises(SparseKVError, match="cancelled"):
        selection.end()


def test_sessions_whose_search_dies_fail_alone(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*addresses: int) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr("decode_engine.host_search.mailbox.take_part", die)
    threads = SearchThreads(1)
    stepper = make_stepper(runner, threads)
    session, other = start(runner, "csattention+dropped")[0], start(runner, "full", Placement.DEVICE)[0]
    before = session.position
    results = stepper.step([session, other], [3, 3], [Sampler(GREEDY)] * 2)
    assert isinstance(results[0], SparseKVError)
    assert isinstance(results[1], int)
    assert session.position == before
    threads.close()


def test_nothing_is_changed_that_threads_of_a_failed_step_may_use(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def die(*addresses: int) -> None:
        begun.wait(60)
        raise MemoryError("no more")

    monkeypatch.setattr("decode_engine.host_search.mailbox.take_part", die)
    threads = SearchThreads(1)
    session, selection = start(runner)[2], selection_of(runner, threads)
    selection.begin({0: session})
    tables = weakref.ref(session.context.index("query_tables", 0))
    begun.set()
    wait_until(lambda: threads.workers.alive == 0)
    with pytest.raises(SparseKVError, match="no more; restart the server"):
        selection.end()
    mailbox = selection.mailbox
    with pytest.raises(SparseKVError, match="no more"):
        selection.begin({0: session})
    assert (mailbox.steps, mailbox.stopped) == (1, True)
    session.close()
    session.context.release()
    gc.collect()
    assert tables() is not None
    threads.close()


def test_methods_that_threads_cannot_search_are_named(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = made_up_context(
        runner.identity, "float32", get_method("refined"), 64, also=[get_method("csattention")]
    )
    for expression, reason in (
        ("csattention-paper", "its query tables are lists"),
        ("csattention@weights=uniform", "weighted uniform"),
    ):
        found = step_attention_for(get_method(expression), context.manifest, Placement.HOST)
        assert isinstance(found, str)
        assert reason in found
    # Coarse rows are on the device, where they are searched.
    assert step_attention_for(get_method("refined"), context.manifest, Placement.HOST) is HybridSteps
    monkeypatch.setattr("decode_engine.host_search.mailbox._LEAST_WIDTH", 4)
    for kept, fits in (
        (get_method("csattention", keep=0.2), False),
        (get_method("csattention", keep=0.126), False),  # 8.06 of 64 keys, of which budgets keep 9
        (get_method("csattention", keep=0.1), True),
    ):
        found = step_attention_for(kept, context.manifest, Placement.HOST)
        assert (found is HostSteps) == fits
        assert fits or "lists of the host have room for 8 keys" in str(found)


def test_tables_that_threads_cannot_read_are_refused_where_a_session_is_placed(runner: ModelRunner) -> None:
    method = method_of("csattention+dropped", 0.05)
    context = start(runner, method.name)[0].context
    layers = range(runner.identity.layers)
    assert HostTableSelection.fields(context, method, 0) == {}
    arrays = {("query_tables", layer): context.index("query_tables", layer).arrays() for layer in layers}
    arrays["query_tables", 1]["scores"] = torch.nn.functional.pad(
        arrays["query_tables", 1]["scores"], (0, 8)
    )[..., :-8]
    padded = ResidentContext(
        context.manifest,
        context.tokens(),
        {layer: context.kv(layer) for layer in layers},
        arrays,
        placement=Placement.HOST,
        device=context.device,
    )
    with pytest.raises(InvalidArgumentError, match="in one piece"):
        HostTableSelection.fields(padded, method, 1)


def test_heads_are_split_evenly_into_as_many_waves_as_pay() -> None:
    plan = replace(make_plan(2), heads=6)
    assert plan.wave_heads == [range(1), range(1, 3), range(3, 4), range(4, 6)]
    assert replace(plan, rows=1).wave_heads == [range(3), range(3, 6)]
    assert replace(plan, heads=2).wave_heads == [range(1), range(1, 2)]


def test_only_lists_of_the_wave_are_waited_for_and_copied() -> None:
    """The other head's lists are not there, and what the device has of them is left alone."""
    mailbox = Mailbox(make_plan(2), page_locked=DEVICE == "cuda")
    layers, layer = [Layer(100, seed) for seed in range(3)], 1
    step = mailbox.begin([searched(row, layers, 8, 90, 20) for row in range(2)], range(3))
    records_BF = torch.zeros(2, records.RECORD_FIELDS, dtype=torch.int64)
    records_BF[:, records.STEP] = step
    records_BF = records_BF.to(DEVICE)
    lists = KeyLists.allocate(2 * HEADS, 1, mailbox.sizes.width, DEVICE)
    lists.ids_RPW.fill_(7)
    lists.counts_RP.fill_(1)
    gave_up_1 = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for wave, heads in enumerate(mailbox.sizes.wave_heads):
        for row in range(2):
            for h in heads:
                mailbox.shared.ids_RW[row * HEADS + h, :2] = torch.tensor([20 + row, 40 + h])
                mailbox.shared.answers_RX[row * HEADS + h, 0] = (mailbox.number_of(layer) << COUNT_BITS) | 2
        await_lists(records_BF, mailbox.shared, lists, gave_up_1, layer, 2_000_000, heads)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        for row in range(2):
            for h in range(HEADS):
                expected = [20 + row, 40 + h] if h <= wave else [7]
                assert lists.of_row(row * HEADS + h).tolist() == expected
    assert not mailbox.gave_up
    mailbox.shared.waits_LR2.zero_()
    mailbox.shared.waits_LR2[layer] = torch.tensor([[100, 103], [110, 120], [101, 105], [111, 131]])
    waits_LW2 = mailbox.waits().reshape(len(mailbox.order), 2, 2)
    assert waits_LW2[mailbox.order.index(layer)].tolist() == [[100, 105], [110, 131]]
    assert mailbox.waited_ns() == 5 + 21


@pytest.mark.slow
def test_waves_change_no_bit_of_a_step(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def stepped() -> tuple[Tensor, list[tuple[int, int]]]:
        """Logits, and how many rows each session read from host memory and found in slots."""
        threads, sessions = SearchThreads(2), start(runner)
        graph, _, logits = step_logits(make_stepper(runner, threads), sessions, [3, 4, 5])
        steps = [each for each in graph.batch.attentions if isinstance(each, HostSteps)]
        threads.close()
        found = [each.rows.found_B2()[: len(sessions)].tolist() for each in steps]
        return logits, [(read, reused) for pairs in found for read, reused in pairs]

    apart, fetched_apart = stepped()
    monkeypatch.setattr(MailboxSizes, "waves", 1)
    together, fetched_together = stepped()
    assert torch.equal(together, apart)
    # Of two sessions that want one row, either one may be the first to read it.
    assert [sum(pair) for pair in fetched_together] == [sum(pair) for pair in fetched_apart]
    assert sum(read for read, _ in fetched_apart) > 0


@pytest.mark.slow
@pytest.mark.parametrize("expression", (POOLED, "csattention")[: 2 if DEVICE == "cuda" else 1])
def test_host_equals_hybrid_for_the_same_lists(
    runner: ModelRunner, expression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, layer by layer: the device is given what the threads have listed instead of searching itself."""
    listed: dict[int, KeyLists] = {}
    await_heads = HostTableSelection.await_heads

    def remember(self: HostTableSelection, layer: int, records_BF: Tensor, heads: range) -> None:
        await_heads(self, layer, records_BF, heads)
        lists = self.lists
        if layer not in listed:
            listed[layer] = KeyLists(lists.ids_RPW.clone(), lists.counts_RP.clone())
        listed[layer].ids_RPW.copy_(lists.ids_RPW)
        listed[layer].counts_RP.copy_(lists.counts_RP)

    def recall(self: TableSelection, layer: int, q_BHGD: Tensor, records_BF: Tensor) -> KeyLists:
        # Before a graph is captured it runs with all rows idle, of which a search lists nothing.
        idle_R = (records_BF[:, records.KEYS] == 0).repeat_interleave(runner.identity.kv_heads)
        lists = listed[layer]
        return KeyLists(lists.ids_RPW, lists.counts_RP.masked_fill(idle_R[:, None], 0))

    made = TableSelection.__init__

    def make_for_the_same_lists(self: TableSelection, plan: StepPlan) -> None:
        made(self, plan)
        self.lists = next(
            iter(listed.values())
        )  # which says how attention is split, and so how it is rounded

    monkeypatch.setattr(TableSelection, "__init__", make_for_the_same_lists)
    monkeypatch.setattr(HostTableSelection, "await_heads", remember)
    monkeypatch.setattr(TableSelection, "select", recall)
    method = method_of(expression, 0.05)
    monkeypatch.setattr(MailboxSizes, "waves", 1)  # all lists of a layer come at once
    threads = SearchThreads(2)
    try:
        stepper = make_stepper(runner, threads)
        on_host, given = (start(runner, expression, each) for each in (Placement.HOST, Placement.HYBRID))
        for sessions, steps in ((on_host, HostSteps), (given, HybridSteps)):
            context = sessions[0].context
            assert step_attention_for(method, context.manifest, context.placement) is steps
        for step in range(3 if DEVICE == "cuda" else 1):
            tokens = [3 + step, 4, 5]
            expected = step_logits(stepper, on_host, tokens)[2]
            assert all(int(lists.counts_RP.sum()) > 0 for lists in listed.values())
            assert torch.equal(step_logits(stepper, given, tokens)[2], expected)
        assert len(listed) == runner.identity.layers
    finally:
        threads.close()
