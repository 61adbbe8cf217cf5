"""A model over contexts that are loaded behind it, with keys and values in host memory, and the CPU for a device."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from decode_engine.engine.stepping import forward_each
from decode_engine.kernels import records
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.steps.attention.listed_steps import slot_cache
from index_store.memory.arena import Arena
from index_store.memory.host_memory import is_readable
from index_store.memory.placement import MemoryBytes, Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.presets import get_method
from index_store.models.loading import resolve_model
from index_store.store.stored_context import Context
from tests.support.serving.served import PROMPT, Served, serve
from tests.support.store import RecordingLocker

CPU = torch.device("cpu")
ROOM = MemoryBytes(2**30, 2**30)
SOON = 60.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("hybrid"), "llama")


def hybrid(locker: RecordingLocker | None = None) -> Arena:
    return Arena(ROOM, locker or RecordingLocker(), device=CPU, placement=Placement.HYBRID)


def pass_through(door: threading.Semaphore) -> None:
    """Waits until a layer is let through; layers are locked one after another."""
    assert door.acquire(timeout=SOON)


def answer(runner: ModelRunner, context: ResidentContext, method: str) -> tuple[list[int], list[float]]:
    """Greedy tokens after a prompt in two pieces, and their logits."""
    session = runner.start(context, get_method(method).on(context.manifest))
    prompt = runner.tokenizer.encode(PROMPT)
    runner.forward([session], [prompt[:5]])
    (logits,) = runner.forward([session], [prompt[5:]])
    tokens, highest = [], []
    for _ in range(6):
        tokens.append(int(logits.argmax()))
        highest.append(float(logits.max()))
        (logits,) = runner.forward([session], [[tokens[-1]]])
    session.close()
    return tokens, highest


@pytest.mark.parametrize(
    "method", ["full", "oracle", "csattention+dropped", "csattention-paper", "multipole-tree"]
)
def test_answers_do_not_depend_on_the_placement(served: Served, method: str) -> None:
    expected = answer(served.runner, served.context, method)
    with hybrid().acquire(served.store, served.context.manifest.id, early=True) as context:
        assert context.kv(0).device == CPU
        found = answer(served.runner, context, method)
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], rel=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "method", ["full", "oracle", "csattention+dropped", "csattention-paper", "multipole-tree"]
)
def test_answers_on_a_gpu_do_not_depend_on_the_placement(served: Served, method: str) -> None:
    device = torch.device("cuda")
    runner = ModelRunner(resolve_model(str(served.folder)), device)
    found = []
    for placement in Placement:
        arena = Arena(ROOM, device=device, placement=placement)
        with arena.acquire(served.store, served.context.manifest.id, early=True) as context:
            expected = "cuda" if placement is Placement.DEVICE else "cpu"
            assert context.kv(2).device.type == expected
            session = runner.start(context, get_method(method).on(context.manifest))
            assert not runner.has_graph(session)  # no kernels for its head dimension
            session.close()
            found.append(answer(runner, context, method))
            if placement is Placement.HYBRID:
                assert is_readable(context.kv(0))
                assert arena.stats().page_locked_bytes > 0
    assert found[0][0] == found[1][0]
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)


def test_a_prompt_runs_behind_the_loading(served: Served) -> None:
    door = threading.Semaphore(0)
    asked: list[int] = []
    locker = RecordingLocker()
    locker.before = lambda: pass_through(door)
    arena = hybrid(locker)
    expected = answer(served.runner, served.context, "csattention+dropped")
    with (
        ThreadPoolExecutor(1) as pool,
        arena.acquire(served.store, served.context.manifest.id, early=True) as context,
    ):
        model: Any = served.runner.model
        hooks = [
            layer.register_forward_pre_hook(lambda *_, number=number: asked.append(number))
            for number, layer in enumerate(model.model.layers)
        ]
        running = pool.submit(answer, served.runner, context, "csattention+dropped")
        door.release()
        while len(asked) < 2:
            assert not running.done()
            time.sleep(0.001)
        assert asked == [0, 1]
        assert arena.ids() == []
        door.release(2)
        assert running.result(SOON)[0] == expected[0]
        for hook in hooks:
            hook.remove()


def test_a_context_that_breaks_harms_no_other_session(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Context.read_head

    def die(self: Context, path: str, layer: int, head: int, out: torch.Tensor) -> None:
        if layer == 2:
            raise OSError("the disk is gone")
        read(self, path, layer, head, out)

    monkeypatch.setattr(Context, "read_head", die)
    arena = hybrid()
    runner, method = served.runner, get_method("csattention+dropped")
    whole = runner.start(served.context, method.on(served.context.manifest))
    (expected,) = runner.forward([runner.start(served.context, method.on(served.context.manifest))], [[7]])
    with arena.acquire(served.store, served.context.manifest.id, early=True) as context:
        broken = runner.start(context, method.on(context.manifest))
        sessions: list[Session] = [whole, broken]
        results = forward_each(runner.forward, sessions, [[7], [7]])
        assert isinstance(results[0], torch.Tensor)
        torch.testing.assert_close(results[0], expected, rtol=1e-4, atol=1e-4)
        assert isinstance(results[1], OSError)
        assert (whole.position, broken.position) == (
            context.manifest.token_count + 1,
            context.manifest.token_count,
        )
        broken.close()
    assert arena.stats().used == MemoryBytes()


def test_loading_stops_when_told_to(served: Served) -> None:
    door = threading.Semaphore(0)
    locker = RecordingLocker()
    locker.before = lambda: pass_through(door)
    arena = hybrid(locker)
    with (
        ThreadPoolExecutor(1) as pool,
        arena.acquire(served.store, served.context.manifest.id, early=True) as context,
    ):
        running = pool.submit(answer, served.runner, context, "full")
        arena.stop_loading()
        door.release()
        assert "released while it was being loaded" in str(running.exception(SOON))
    assert arena.stats().used == MemoryBytes()
    assert locker.locked == []


def test_many_sessions_leave_no_locked_memory_and_no_slots(served: Served) -> None:
    """Every tenth lease is the last one, after which the context is dropped and loaded anew."""
    locker = RecordingLocker()
    arena, id_ = hybrid(locker), served.context.manifest.id
    method = get_method("csattention+dropped")
    slots: list[weakref.ref[torch.Tensor]] = []
    for turn in range(100):
        with arena.acquire(served.store, id_) as context:
            session = served.runner.start(context, method.on(context.manifest))
            for layer in range(1, 3):
                assert slot_cache(context, layer).fields(layer)[records.SLOTS]
            if turn % 10 == 0:
                served.runner.forward([session], [[7]])
                slots.append(weakref.ref(slot_cache(context, 1).rows_LHS2D))
            session.close()
            assert len(locker.locked) == 3
        del context
        assert slots[-1]() is not None
        if turn % 10 == 9:
            assert arena.drop(id_)
            assert locker.locked == []
            assert slots[-1]() is None
    assert len(slots) == 10
    assert arena.stats().used == MemoryBytes()
