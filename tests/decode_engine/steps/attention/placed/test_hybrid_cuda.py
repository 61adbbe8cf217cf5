"""Captured decode steps over contexts in page-locked host memory, and what is left of them afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context, warm_method
from decode_engine.steps.step_graph import step_model
from decode_engine.steps.stepper import Stepper
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import Method
from index_store.methods.presets import METHODS as ALL_METHODS
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.support.models import write_model_folder
from tests.support.serving.served import PROMPT, Served, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

METHODS = (
    "full",
    "csattention+dropped",
    "csattention",
    "multipole",
    "multipole+dropped",
    "refined",
)
LENGTHS = (4000, 1500)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(
        tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192, dtype=torch.bfloat16
    )
    return ModelRunner(resolve_model(str(folder)), "cuda")


def make_stepper(runner: ModelRunner) -> Stepper:
    weights = next(runner.model.parameters())
    model = step_model(runner.model)
    return Stepper(model, runner.identity, weights.dtype, weights.device)


def make_contexts(runner: ModelRunner, method: Method, placement: Placement) -> list[ResidentContext]:
    return [
        made_up_context(
            runner.identity, runner.kv_dtype, method, length, distinct=2, device="cuda", seed=length,
            placement=placement,
        )
        for length in LENGTHS
    ]  # fmt: skip


def begin(runner: ModelRunner, contexts: list[ResidentContext], method: Method) -> list[Session]:
    """Two sessions of one context and one of another, with prompts read."""
    sessions = [
        runner.start(context, method.on(context.manifest))
        for context in (contexts[0], contexts[0], contexts[1])
    ]
    for row, session in enumerate(sessions):
        runner.forward([session], [[5 + row, 9, 2]], exact=True)
    return sessions


def logits_of(stepper: Stepper, sessions: list[Session], tokens: list[int]) -> torch.Tensor:
    samplers = [Sampler(SamplingParameters())] * len(sessions)
    assert all(isinstance(token, int) for token in stepper.step(sessions, tokens, samplers))
    graph = stepper.graph(sessions)
    assert graph.captured
    return graph.logits_BV[: len(sessions)].float().clone()


@pytest.mark.parametrize("dense", [(), (1,)])
@pytest.mark.parametrize("name", METHODS)
def test_captured_steps_over_host_memory_equal_the_general_path(
    runner: ModelRunner, name: str, dense: tuple[int, ...]
) -> None:
    """With a budget of all keys, most of which find no slot."""
    method = replace(get_method(name, None if name == "full" else 1.0), partition_optional=False)
    contexts = make_contexts(runner, method, Placement.HYBRID)
    for context in contexts:
        context.manifest = replace(context.manifest, dense_layers=dense)
    stepper = make_stepper(runner)
    sessions, twins = (begin(runner, contexts, method) for _ in range(2))
    assert all(stepper.takes(session) for session in sessions)
    for step in range(3):
        tokens = [3 + step, 4, 5]
        got = logits_of(stepper, sessions, tokens)
        expected = torch.stack([logits[-1] for logits in runner.forward(twins, [[t] for t in tokens])])
        assert float((got - expected).abs().amax() / expected.std()) < 0.1
    assert all(session.figures.host_bytes_read > 0 for session in sessions)
    assert all((session.figures.rows_reused > 0) == method.sparse for session in sessions)


def no_fields(self: SlotCache, layer: int) -> dict[int, int]:
    return {}


@pytest.mark.parametrize("name", ["csattention+dropped", "multipole", "multipole+dropped", "refined"])
def test_slots_change_no_bit_of_a_whole_step(
    runner: ModelRunner, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions share slots within a batch, and with batches of other sizes, methods and budgets."""
    method = replace(get_method(name, 0.05), partition_optional=False)
    wider = replace(get_method(name, 0.2), partition_optional=False)
    contexts = make_contexts(runner, method, Placement.HYBRID)

    def run() -> tuple[list[torch.Tensor], list[Session]]:
        stepper = make_stepper(runner)
        sessions, others = begin(runner, contexts, method), begin(runner, contexts, wider)
        found = []
        for step in range(4):
            found.append(logits_of(stepper, sessions, [3 + step, 4, 5]))
            found.append(logits_of(stepper, others[:1], [7 + step]))
            found.append(logits_of(stepper, [*sessions, *others[1:]], [6, 7, 8, 9 + step, 10]))
        return found, sessions

    cached, sessions = run()
    with monkeypatch.context() as patched:
        patched.setattr(SlotCache, "fields", no_fields)
        direct, without = run()
    assert all(torch.equal(one, other) for one, other in zip(cached, direct, strict=True))
    for session, other in zip(sessions, without, strict=True):
        assert session.figures.rows_reused > 0
        assert other.figures.rows_reused == 0
        assert session.figures.host_bytes_read < other.figures.host_bytes_read
        assert session.figures.kept == other.figures.kept


def test_pageable_memory_goes_the_general_path(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    method = get_method("full")
    made = make_contexts(runner, method, Placement.HYBRID)[1]
    kv = {layer: made.kv(layer).clone() for layer in range(runner.identity.layers)}
    pageable = ResidentContext(
        made.manifest, made.tokens(), kv, {}, placement=Placement.HYBRID, device=torch.device("cuda")
    )
    session = runner.start(pageable, method.on(pageable.manifest))
    with caplog.at_level("INFO"):
        assert not runner.has_graph(session)
    assert "not page-locked" in caplog.text
    (logits,) = runner.forward([session], [[3, 4]])
    assert bool(logits.isfinite().all())


def test_steps_are_warmed_up_and_prepared(runner: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    assert all(warm_method(runner, each, Placement.HYBRID) for each in ALL_METHODS.values())
    method = get_method("refined+dropped", 0.1)
    contexts = make_contexts(runner, method, Placement.HYBRID)
    beside = threading.Thread(  # as where a server prepares a method beside requests
        target=runner.prepare,
        args=(method.on(contexts[0].manifest), 2, Placement.HYBRID),
        kwargs={"beside": True},
    )
    beside.start()
    beside.join()
    session = begin(runner, contexts, method)[0]
    with caplog.at_level("INFO"):
        assert isinstance(runner.decode([session], [3], [Sampler(SamplingParameters())])[0], int)
    assert "are ready" not in caplog.text


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("served"), "llama", head_dim=64, dtype=torch.bfloat16)


def test_no_locked_memory_is_left_after_1000_sessions(served: Served) -> None:
    """Every tenth lease is the only one, so that the context is dropped and loaded anew."""
    runner = ModelRunner(resolve_model(str(served.folder)), "cuda")
    arena = Arena(MemoryBytes(2**30, 2**30), device=torch.device("cuda"), placement=Placement.HYBRID)
    id_ = served.context.manifest.id
    prompt, method = runner.tokenizer.encode(PROMPT)[:4], get_method("csattention+dropped", 0.2)
    sampler, used = Sampler(SamplingParameters()), []
    for turn in range(1000):
        with arena.acquire(served.store, id_) as context:
            session = runner.start(context, method.on(context.manifest))
            runner.read([session], [prompt])
            assert runner.has_graph(session)
            assert isinstance(runner.decode([session], [3], [sampler])[0], int)
            assert session.figures.host_bytes_read > 0
            session.close()
            assert arena.stats().page_locked_bytes >= context.manifest.kv_bytes
        if turn % 10 == 9:
            assert arena.drop(id_)
            del context, session
            gc.collect()
            assert arena.stats().page_locked_bytes == 0
            assert arena.stats().used == MemoryBytes()
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert max(used[1:]) <= used[1] + 2**20
