"""Captured decode steps on a GPU: replay equals eager launches and the general path, for every method with kernels."""

from __future__ import annotations

import threading
from threading import Lock

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.engine.stepping import Flight
from decode_engine.kernels import records
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.step_batch import step_counts
from decode_engine.steps.step_graph import Captures, step_model
from decode_engine.steps.stepper import Stepper
from index_store.methods.presets import get_method
from tests.decode_engine.steps.sessions import (
    GREEDY,
    make_stepper,
    method_of,
    step_logits,
)
from tests.support.devices import ON_GPU

pytestmark = ON_GPU

METHODS = (
    "full",
    "csattention+dropped",
    "csattention",
    "csattention+monopole",
    "multipole",
    "multipole+dropped",
    "refined",
    "refined+dropped",
)
LENGTHS = (4000, 1500, 2777)


def start(runner: ModelRunner, name: str, row: int, keep: float = 0.1) -> Session:
    method = method_of(name, keep)
    context = made_up_context(
        runner.identity, runner.kv_dtype, method, LENGTHS[row], distinct=2, device="cuda", seed=row
    )
    session = runner.start(context, method.on(context.manifest))
    runner.forward([session], [[5 + row, 9, 2]])
    return session


@pytest.mark.parametrize("name", [name for name in METHODS if name != "full"])
def test_captured_steps_keep_about_as_many_keys_as_wanted(runner: ModelRunner, name: str) -> None:
    stepper = make_stepper(runner)
    sessions = [start(runner, name, row) for row in range(3)]
    before = [session.figures.kept for session in sessions]
    step_logits(stepper, sessions, [3, 4, 5])
    for session, kept in zip(sessions, before, strict=True):
        counts = step_counts(session)
        places = session.context.manifest.model.kv_heads * len(session.layers)
        wanted = counts[records.KEEP] * places
        assert 0.7 * wanted < session.figures.kept - kept < 1.3 * wanted


@pytest.mark.parametrize("name", METHODS)
def test_steps_in_flight_choose_the_same_tokens(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where one session leaves and tails grow; sampled with seeds, so that all batches are of one size."""

    def said(flies: bool) -> list[list[int]]:
        monkeypatch.setattr(Stepper, "flies", flies)
        stepper, sessions = make_stepper(runner), [start(runner, name, row) for row in range(3)]
        samplers = [Sampler(SamplingParameters(0.9, seed=row)) for row in range(3)]
        for session in sessions:
            runner.forward([session], [[7] * 110])
        flight: Flight[Session] = Flight(stepper)
        histories, flown = [[3], [4], [5]], 0
        for turn in range(30):
            here = range(3) if turn < 10 else range(1, 3)
            if turn == 10:
                flight.leave(sessions[0])
                sessions[0].close()
            found = flight.step(
                [sessions[row] for row in here],
                [histories[row][-1] for row in here],
                [samplers[row] for row in here],
                follow=True,
            )
            for row, token in zip(here, found, strict=True):
                assert isinstance(token, int), token
                histories[row].append(token)
            flown += flight.flies
        for session in sessions[1:]:
            flight.leave(session)
        assert flown == (29 if flies else 0), "not behind who leaves"
        return histories

    assert said(True) == said(False)


@pytest.mark.parametrize("name", METHODS)
def test_replay_equals_eager_and_a_batch_equals_one_by_one(runner: ModelRunner, name: str) -> None:
    stepper = make_stepper(runner)
    graph, _, replayed = step_logits(stepper, [start(runner, name, row) for row in range(3)], [3, 4, 5])
    graph.compute()
    eager = graph.logits_BV[:3].float()
    torch.testing.assert_close(replayed, eager, atol=0.02, rtol=0.02)
    alone = [step_logits(stepper, [start(runner, name, row)], [3 + row])[2][0] for row in range(3)]
    difference = (torch.stack(alone) - replayed).abs().amax() / replayed.std()
    assert float(difference) < 0.1


def test_sessions_that_share_a_context_equal_the_general_path(runner: ModelRunner) -> None:
    """One graph serves all groupings: sessions leave and come back between its replays."""
    stepper, method = make_stepper(runner), get_method("full")
    contexts = [
        made_up_context(runner.identity, runner.kv_dtype, method, length, device="cuda", seed=length)
        for length in LENGTHS
    ]
    places = [0] * 20 + [1] * 7 + [2]

    def begin(number: int) -> Session:
        context = contexts[places[number]]
        session = runner.start(context, method.on(context.manifest))
        runner.forward([session], [[5 + number] * (1 + number % 4)])
        return session

    sessions, twins = ([begin(number) for number in range(len(places))] for _ in range(2))
    everyone = range(len(places))
    for rows in (everyone, [n for n in everyone if n % 5], everyone, [n for n in everyone if n % 3]):
        tokens = [3 + row for row in rows]
        graph, *_ = step_logits(stepper, [sessions[row] for row in rows], tokens)
        seats = [graph.batch.sessions.index(sessions[row]) for row in rows]
        got = graph.logits_BV[seats].float()
        found = runner.forward([twins[row] for row in rows], [[token] for token in tokens])
        expected = torch.stack([logits[-1] for logits in found])
        assert float((got - expected).abs().amax() / expected.std()) < 0.1


def test_sampling_in_the_graph_draws_what_the_cpu_draws(runner: ModelRunner) -> None:
    stepper = make_stepper(runner)
    for parameters in (SamplingParameters(0.9, seed=4), SamplingParameters(0.8, 0.7, 11, seed=5)):
        session, sampler, twin = start(runner, "full", 0), Sampler(parameters), Sampler(parameters)
        token = 3
        for _ in range(5):
            (result,) = stepper.step([session], [token], [sampler])
            assert isinstance(result, int)
            token = result
            graph = stepper._graphs.graphs()[
                -1
            ]  # the last that was used: of many rows, since there is a seed
            (row,) = [row for row, seated in enumerate(graph.batch.sessions) if seated is session]
            assert token == twin.sample(graph.logits_BV[row].float().cpu())


def test_steps_are_captured_while_other_threads_load(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    captured = threading.Event()
    errors: list[Exception] = []

    def load() -> None:
        blocks: list[torch.Tensor] = []
        try:
            while not captured.is_set() and len(blocks) < 2048:
                blocks.append(torch.empty(2**20, dtype=torch.uint8, pin_memory=True))
                blocks[-1].cuda(non_blocking=True)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    step_logits(make_stepper(runner), [start(runner, "full", 0)], [3])
    captured.set()
    thread.join()
    assert not errors
    assert not any("without a graph" in record.message for record in caplog.records)


def test_graphs_hold_what_is_counted_and_give_it_back(runner: ModelRunner) -> None:
    """Kinds in turns, with memory for the graphs of few: tokens are those of graphs that are never dropped.

    What captures take stays in their pool for those that follow, of which the first one counts it. So the bound is of
    what every graph holds by itself, and is the same however large a card's pieces of memory are.
    """
    model = step_model(runner.model)
    device = torch.device("cuda", torch.cuda.current_device())

    def tokens(stepper: Stepper) -> list[int | Exception]:
        sessions = [start(runner, name, 0) for name in METHODS[:5]]
        found = []
        for step in range(3):
            for session in sessions:
                found += stepper.step([session], [7 + step], [Sampler(GREEDY)])
        return found

    # The first capture of a process leaves scratch memory of matrix products in its pool, for all that follow.
    step_logits(make_stepper(runner), [start(runner, METHODS[0], 0)], [3])
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved(device)
    free = Stepper(model, runner.identity, torch.bfloat16, device)
    expected = tokens(free)
    counted = free._graphs.nbytes
    assert 0 < counted <= torch.cuda.memory_reserved(device) - before + 2**28
    own = counted - free._captures.nbytes
    assert own > 0
    bounded = Stepper(model, runner.identity, torch.bfloat16, device, graph_bytes=own // 2)
    assert tokens(bounded) == expected
    assert len(bounded._graphs) < len(free._graphs)


def test_a_graph_that_finds_no_memory_gets_that_of_idle_ones(runner: ModelRunner) -> None:
    """The process may have no more of the device's memory than it has, but for what a graph or two need.

    It takes none of it: other tests run on the device as well.
    """
    model = step_model(runner.model)
    device = torch.device("cuda", torch.cuda.current_device())
    stepper = Stepper(model, runner.identity, torch.bfloat16, device)
    sessions = [start(runner, name, 0) for name in METHODS]
    for session in sessions[:4]:
        assert all(isinstance(token, int) for token in stepper.step([session], [7], [Sampler(GREEDY)]))
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + 2**22) / total, device)
    try:
        for session in sessions[4:]:
            (token,) = stepper.step([session], [7], [Sampler(GREEDY)])
            assert isinstance(token, int)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def test_no_other_thread_has_a_stream_that_is_captured() -> None:
    """What loads a context waits for its own streams, which would spoil a capture."""
    own = Captures(torch.device("cuda"), Lock())
    others = {torch.cuda.Stream().cuda_stream for _ in range(64)}
    assert not others & {own.stream.cuda_stream, own.capturing.cuda_stream}
