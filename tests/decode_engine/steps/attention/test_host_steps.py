"""Captured steps over contexts that are searched on the host choose the tokens of the general path.

Without a CUDA device the kernels run in Triton's interpreter, and no graph is captured; the threads are the same.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.host_search.mailbox import SearchThreads
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.host_steps import HostPlan, HostSteps, HostTableSelection
from decode_engine.steps.attention.listed_steps import HybridSteps
from decode_engine.steps.batch_kinds import step_attention_for
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.errors import InvalidArgumentError, SparseKVError
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.decode_engine.host_search.searches import FakeDevice
from tests.support.models import write_model_folder
from tests.support.serving.service import wait_until

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
pytestmark.append(pytest.mark.usefixtures("few_programs"))
PROMPTS, LENGTHS, STEPS = [[5, 9, 2], [7, 3], [1, 2, 3, 4]], [230, 130, 200], 2


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192)
    return ModelRunner(resolve_model(str(folder)), DEVICE)


@pytest.fixture
def threads() -> Iterator[SearchThreads]:
    made = SearchThreads(2)
    yield made
    made.close()


def make_stepper(runner: ModelRunner, searching: SearchThreads) -> Stepper:
    model = step_model(runner.model)
    weights = next(runner.model.parameters())
    return Stepper(model, runner.identity, weights.dtype, weights.device, searching=searching)


def host_plan(runner: ModelRunner, method: Method, size: int, threads: SearchThreads) -> HostPlan:
    cpu = torch.device("cpu")
    return HostPlan(runner.identity, method, size, 256, torch.float32, cpu, searching=threads)


def small(expression: str) -> Method:
    """Its tables are as wide as the model's heads, and it keeps few keys."""
    method = get_method(expression, keep=0.05)
    return replace(method, recent=16, append_block=16)


def start(runner: ModelRunner, method: Method, placement: Placement) -> list[Session]:
    dtype = "float32" if DEVICE == "cpu" else runner.kv_dtype
    sessions = []
    for seed, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        context = made_up_context(
            runner.identity, dtype, method, length, device=DEVICE, seed=seed, placement=placement
        )
        sessions.append(Session(context, method.on(context.manifest)))
        runner.forward(sessions[-1:], [prompt])
    return sessions


def decode(stepper: Stepper, sessions: list[Session], steps: int = STEPS) -> list[list[int]]:
    samplers = [Sampler(SamplingParameters()) for _ in sessions]
    tokens = [3] * len(sessions)
    history = []
    for _ in range(steps):
        results = stepper.step(sessions, tokens, samplers)
        tokens = [result for result in results if isinstance(result, int)]
        assert len(tokens) == len(sessions), results
        history.append(tokens)
    return history


def by_forward(runner: ModelRunner, sessions: list[Session]) -> list[list[int]]:
    """What the general path decodes, session by session."""
    tokens = [3] * len(sessions)
    history = []
    for _ in range(STEPS):
        logits = [
            runner.forward([session], [[token]])[0][-1]
            for session, token in zip(sessions, tokens, strict=True)
        ]
        tokens = [int(row.argmax()) for row in logits]
        history.append(tokens)
    return history


@pytest.mark.slow
def test_tokens_are_those_of_the_general_path(runner: ModelRunner, threads: SearchThreads) -> None:
    """Two sessions are of one context, a third one of another."""
    method = small("csattention+dropped@group=pooled")

    def started() -> list[Session]:
        session, other = start(runner, method, Placement.HOST)[1:]
        same = Session(session.context, method.on(session.context.manifest))
        runner.forward([same], [PROMPTS[0]])
        return [session, same, other]

    sessions = started()
    assert step_attention_for(method, sessions[0].context.manifest, Placement.HOST) is HostSteps
    expected = by_forward(runner, sessions)
    sessions = started()
    assert decode(make_stepper(runner, threads), sessions) == expected
    for session in sessions:
        assert session.figures.searches >= STEPS * runner.identity.layers
        assert DEVICE == "cpu" or session.figures.device_wait_for_host_ns > 0


def test_a_context_that_is_released_stays_until_its_step_has_ended(
    runner: ModelRunner, threads: SearchThreads
) -> None:
    method = small("csattention+dropped@group=pooled")
    (session, *_), layers = start(runner, method, Placement.HOST), range(runner.identity.layers)
    context = session.context
    plan = host_plan(runner, method, 1, threads)
    selection = HostTableSelection(plan)
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
    method = small("csattention+dropped@group=pooled")
    session = start(runner, method, Placement.HOST)[0]
    plan = host_plan(runner, method, 1, threads)
    selection = HostTableSelection(plan)
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
    method = small("csattention+dropped@group=pooled")
    session = start(runner, method, Placement.HOST)[0]
    plan = host_plan(runner, method, 1, threads)
    selection = HostTableSelection(plan)
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
    searched = start(runner, small("csattention+dropped"), Placement.HOST)[:1]
    other = start(runner, get_method("full"), Placement.DEVICE)[:1]
    results = stepper.step([*searched, *other], [3, 3], [Sampler(SamplingParameters())] * 2)
    assert isinstance(results[0], SparseKVError)
    assert isinstance(results[1], int)
    assert searched[0].position == LENGTHS[0] + len(PROMPTS[0])
    threads.close()


def test_nothing_is_changed_that_threads_of_a_failed_step_may_use(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def die(*addresses: int) -> None:
        begun.wait(60)
        raise MemoryError("no more")

    monkeypatch.setattr("decode_engine.host_search.mailbox.take_part", die)
    threads, method = SearchThreads(1), small("csattention+dropped@group=pooled")
    session = start(runner, method, Placement.HOST)[0]
    plan = host_plan(runner, method, 1, threads)
    selection = HostTableSelection(plan)
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
    method = small("csattention+dropped")
    context = start(runner, method, Placement.HOST)[0].context
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
