"""Captured decode steps over contexts in page-locked host memory, and what is left of them afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels.slots.slot_cache import SlotCache
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import warm_method
from index_store.memory.arena import Arena
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import METHODS as ALL_METHODS
from index_store.methods.presets import get_method
from index_store.models.resolve import resolve_model
from tests.decode_engine.steps.sessions import (
    Case,
    begin,
    make_contexts,
    make_stepper,
    method_of,
    step_logits,
)
from tests.support.serving.served import PROMPT, Served, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def no_fields(self: SlotCache, layer: int) -> dict[int, int]:
    return {}


@pytest.mark.parametrize("name", ["csattention+dropped", "multipole", "multipole+dropped", "refined"])
def test_slots_change_no_bit_of_a_whole_step(
    runner: ModelRunner, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions share slots within a batch, and with batches of other sizes, methods and budgets."""
    method, wider = method_of(name, 0.05), method_of(name, 0.2)
    contexts = make_contexts(runner, Case(method=name, placement=Placement.HYBRID))

    def run() -> tuple[list[torch.Tensor], list[Session]]:
        stepper = make_stepper(runner)
        sessions, others = begin(runner, contexts, method), begin(runner, contexts, wider)
        found = []
        for step in range(4):
            found.append(step_logits(stepper, sessions, [3 + step, 4, 5])[2])
            found.append(step_logits(stepper, others[:1], [7 + step])[2])
            found.append(step_logits(stepper, [*sessions, *others[1:]], [6, 7, 8, 9 + step, 10])[2])
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
    made = make_contexts(runner, Case(placement=Placement.HYBRID))[2]
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
    contexts = make_contexts(runner, Case(method=method.name, placement=Placement.HYBRID))
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
