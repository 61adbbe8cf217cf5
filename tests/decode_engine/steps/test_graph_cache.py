"""Which captured steps are dropped, and when; by bytes that a fake graph says it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.step_batch import StepBatch
from decode_engine.steps.graph_cache import AllocationMeter, GraphCache
from decode_engine.steps.stepper import Stepper
from index_store.indexes.interface.layer_index import Do, do_now
from index_store.methods.presets import METHODS
from index_store.models.resolve import resolve_model
from tests.support.models import write_model_folder

CPU = torch.device("cpu")


@dataclass
class Graph:
    name: str
    nbytes: int


def used(cache: GraphCache[Graph], names: str, nbytes: int = 30) -> str:
    """Steps that use the graphs of these names, one a turn; returns which graphs are kept then."""
    for name in names:
        cache.begin_turn()
        if cache.find(name) is None:
            cache.add(name, Graph(name, nbytes))
    return "".join(graph.name for graph in cache.graphs())


def test_the_graph_used_longest_ago_goes_first() -> None:
    cache: GraphCache[Graph] = GraphCache(100)
    assert used(cache, "abc") == "abc"
    assert used(cache, "ad") == "cad"
    assert cache.nbytes == 90


def test_graphs_in_use_stay_whatever_they_hold() -> None:
    cache: GraphCache[Graph] = GraphCache(50)
    cache.begin_turn()
    for name in "abc":  # of one step
        cache.add(name, Graph(name, 30))
    assert used(cache, "d") == "abcd"  # those of the step before may be wanted in this one
    assert used(cache, "d") == "abcd"
    cache.trim()
    assert used(cache, "") == "d"
    assert used(cache, "e", 1000) == "de"
    assert used(cache, "ef", 10) == "ef"


def test_a_graph_that_grows_makes_room_too() -> None:
    cache: GraphCache[Graph] = GraphCache(100)
    used(cache, "abc")
    cache.begin_turn()
    found = cache.find("c")
    found.nbytes = 70
    cache.trim()
    assert used(cache, "") == "bc"


def test_there_are_no_more_than_so_many() -> None:
    assert used(GraphCache(None, most=3), "abcdefg") == "efg"


def test_who_runs_out_of_memory_gets_that_of_idle_graphs() -> None:
    cache: GraphCache[Graph] = GraphCache()
    used(cache, "abcde")
    cache.begin_turn()
    free = -60

    def make() -> str:
        if free + 30 * (5 - len(cache)) < 0:
            raise torch.OutOfMemoryError("the device is full")
        return "made"

    assert cache.with_room(make) == "made"
    assert used(cache, "") == "cde"
    free = -1000
    with pytest.raises(torch.OutOfMemoryError):
        cache.with_room(make)
    assert used(cache, "") == "e", "what the last step used stays"


def test_what_the_allocator_keeps_is_given_back_before_a_graph_is_dropped() -> None:
    cache: GraphCache[Graph] = GraphCache()
    used(cache, "abcd")
    cache.begin_turn()
    failures = 1

    def make() -> str:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise torch.OutOfMemoryError("the device is full")
        return "made"

    assert cache.with_room(make) == "made"
    failures = 2
    with pytest.raises(torch.OutOfMemoryError):
        cache.with_room(make, drop=False)
    assert used(cache, "") == "abcd"


def test_other_errors_drop_nothing() -> None:
    cache: GraphCache[Graph] = GraphCache()
    used(cache, "abcd")

    def fail() -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        cache.with_room(fail)
    assert len(cache) == 4


@pytest.mark.parametrize("inference", [False, True])
def test_the_meter_counts_what_stays(inference: bool) -> None:
    with torch.inference_mode(inference), AllocationMeter(CPU) as meter:
        kept = torch.zeros(100, dtype=torch.int64)
        view, also = kept[10:], torch.empty(3, 5).add_(1.0)
        del kept
        torch.ones(1000)
    outside = torch.zeros(10**6)
    assert meter.nbytes == 800 + 60
    assert len(outside) > len(view) > also.numel()


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"), head_dim=64, max_positions=8192)
    return ModelRunner(resolve_model(str(folder)))


def successor(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens[:, 0] + 1, 64).float() * 100


Start = Callable[[str], Session]


@pytest.fixture
def start(runner: ModelRunner) -> Start:
    def begin(name: str) -> Session:
        context = made_up_context(runner.identity, runner.kv_dtype, METHODS[name], 100)
        return runner.start(context, METHODS[name].on(context.manifest))

    return begin


def steps(stepper: Stepper, sessions: list[Session], count: int = 3) -> None:
    """Steps that have to succeed."""
    for step in range(count):
        results = stepper.step(
            sessions, [step] * len(sessions), [Sampler(SamplingParameters())] * len(sessions)
        )
        assert results == [step + 1] * len(sessions)


def test_steps_go_on_with_graphs_dropped_by_bytes(runner: ModelRunner, start: Start) -> None:
    """Three kinds of batches, and memory for the graphs of about two; the sessions notice nothing."""
    names = ("full", "multipole", "csattention")
    sessions = {name: start(name) for name in names}
    free = Stepper(successor, runner.identity, torch.float32, CPU)
    for name in names:
        steps(free, [sessions[name]])
    sizes = [graph.nbytes for graph in free._graphs.graphs()]
    assert min(sizes) > 0
    stepper = Stepper(successor, runner.identity, torch.float32, CPU, graph_bytes=sum(sizes) - 1)
    for name in (*names, *names):
        steps(stepper, [sessions[name]])
    assert len(stepper._graphs) == 2
    assert stepper._graphs.nbytes < sum(sizes)
    steps(stepper, list(sessions.values()))  # all in one step: all are in use
    assert len(stepper._graphs) == 3
    assert {session.position for session in sessions.values()} == {100 + 12}


def test_a_batch_that_finds_no_memory_gets_that_of_idle_ones(
    runner: ModelRunner, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, CPU)
    one, two, other = start("full"), start("multipole"), start("csattention")
    steps(stepper, [one])
    steps(stepper, [two])
    make, most = StepBatch.__init__, 2

    def full(self: StepBatch, *arguments: object) -> None:
        if len(stepper._graphs) >= most:
            raise torch.OutOfMemoryError("the device is full")
        make(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(StepBatch, "__init__", full)
    steps(stepper, [other])
    assert len(stepper._graphs) == 2
    steps(stepper, [one])
    most = 0  # now not even that helps, and only the session that needs it hears of it
    results = stepper.step([one, two], [1, 1], [Sampler(SamplingParameters())] * 2)
    assert results[0] == 2
    assert isinstance(results[1], torch.OutOfMemoryError)
    steps(stepper, [one])


def test_a_tail_that_finds_no_memory_gets_that_of_idle_batches(
    runner: ModelRunner, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, CPU)
    one, other = start("full"), start("multipole")
    steps(stepper, [other])
    steps(stepper, [one])

    def full(self: Session, ahead: int = 0, do: Do = do_now) -> None:
        if len(stepper._graphs) > 1:
            raise torch.OutOfMemoryError("the device is full")

    monkeypatch.setattr(Session, "reserve_tail", full)
    steps(stepper, [one])
    assert len(stepper._graphs) == 1
