"""Which batch a session joins, the row that it keeps there, and the records that follow it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.kernels import records
from decode_engine.kernels.attention.shared_attention import HEADER, MEMBERS, READS_CONTEXT, TASK_FIELDS, WHAT
from decode_engine.layers.session import Session
from decode_engine.model.runner import ModelRunner
from decode_engine.model.warm_up import made_up_context
from decode_engine.steps.attention.listed_steps import DenseSteps
from decode_engine.steps.attention.step_batch import StepBatch, step_counts
from decode_engine.steps.graph_cache import GraphCache
from decode_engine.steps.stepper import FIXED_ROWS, Stepper
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS
from tests.decode_engine.steps.sessions import (
    GREEDY,
    seeded,
    start,
    successor,
)


def test_counts_and_tails_are_right_at_every_step(runner: ModelRunner) -> None:
    """Whoever joins or leaves, while search ends move, and between steps on the general path."""
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    method = replace(METHODS["multipole"], recent=40, append_block=8)
    contexts = [made_up_context(runner.identity, runner.kv_dtype, method, n) for n in (150, 90, 200, 70)]
    sessions = [runner.start(context, method.on(context.manifest)) for context in contexts]
    seen = set()
    for step in range(90):
        batch = sessions[: 3 - (step // 20) % 2] if step < 60 else sessions[1:]
        expected = [(dict(step_counts(session)), session.position) for session in batch]
        results = stepper.step(batch, [step % 50] * len(batch), [Sampler(GREEDY)] * len(batch))
        assert results == [step % 50 + 1] * len(batch)
        graph = stepper.graph(batch)
        for session, (counts, position) in zip(batch, expected, strict=True):
            row = graph.batch.sessions.index(session)
            fields = [counts[field] for field in range(*records.STEP_FIELDS)]
            assert graph._inputs[row].tolist() == [step % 50, position, *fields]
            seen.add(counts[records.END])
            assert session.position == position + 1
        assert not graph._inputs[[row for row, each in enumerate(graph.batch.sessions) if each is None]].any()
        if step % 30 == 29:
            runner.forward([batch[1]], [[3, 4]])
        if step % 7 == 0:
            for layer in batch[0].layers:
                assert layer.tail.count == batch[0].position - batch[0].context.manifest.token_count
    assert len(seen) > 6


def test_one_launch_serves_contexts_of_all_lengths(runner: ModelRunner) -> None:
    calls: list[int] = []

    def counted(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        calls.append(len(tokens))
        return successor(tokens, positions, batch)

    stepper = Stepper(counted, runner.identity, torch.float32, torch.device("cpu"))
    sessions = [start(runner, [5], length) for length in (17, 5000, 512, 4096)]
    samplers = [Sampler(GREEDY)] * 4
    assert stepper.step(sessions, [1, 2, 3, 4], samplers) == [2, 3, 4, 5]
    assert calls == [4]
    assert stepper.graph(sessions).batch.plan.max_keys == 8192


def test_more_sessions_than_a_batch_holds_keep_their_rows(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_engine.steps.stepper.MAX_ROWS", 2)
    placed: list[Session] = []
    place = StepBatch.place

    def counted(self: StepBatch, row: int, session: Session, number: int) -> None:
        placed.append(session)
        place(self, row, session, number)

    monkeypatch.setattr(StepBatch, "place", counted)
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    sessions = [start(runner, [5]) for _ in range(4)]
    tokens: list[int] = [1, 2, 3, 4]
    for _ in range(3):
        results = stepper.step(sessions, tokens, [Sampler(GREEDY)] * 4)
        assert results == [token + 1 for token in tokens]
        tokens = [token + 1 for token in tokens]
    assert placed == sessions


def test_a_tail_that_comes_back_to_its_address_is_followed(runner: ModelRunner) -> None:
    """Memory that a tail gave back when it grew may become its own again: then its heads lie farther apart."""
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    session, samplers = start(runner, [5]), [Sampler(GREEDY)]
    tails = [layer.tail for layer in session.layers]
    rooms = []
    for tail in tails:
        small = tail.buffer
        rooms.append(small.new_empty(small.shape[0], 2 * small.shape[1], *small.shape[2:]))
        tail.buffer = rooms[-1].flatten()[: small.numel()].view(small.shape)
    stepper.step([session], [1], samplers)
    for tail, room in zip(tails, rooms, strict=True):
        assert tail.address == room.data_ptr()
        tail.buffer = room
    stepper.step([session], [2], samplers)
    distances = stepper.graph([session]).batch._host_LBF[:, 0, records.TAIL_HEAD]
    assert distances.tolist() == [tail.head_bytes for tail in tails]


def test_tails_grow_in_all_layers_after_memory_ran_out_between(runner: ModelRunner) -> None:
    session = start(runner, list(range(60)) * 2)
    session.position += 8
    session.layers[0].tail.reserve(129)
    session.reserve_tail()
    assert all(layer.tail.capacity >= 129 for layer in session.layers)


def test_what_is_prepared_is_what_runs(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    sessions = [start(runner, [5]) for _ in range(3)]
    stepper.prepare(sessions[0].fitted, 5)
    ready = stepper._graphs.graphs()
    assert [graph.batch.plan.size for graph in ready] == [1, 2, 4, 8]
    assert stepper.graph(sessions) is ready[2]


def test_what_another_thread_prepared_is_what_runs(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    session = start(runner, [5])
    for _ in range(2):  # the second time everything is there, though no step has taken it yet
        beside = threading.Thread(target=stepper.prepare_beside, args=(session.fitted, 3, Placement.DEVICE))
        beside.start()
        beside.join()
    assert (stepper._made.qsize(), len(stepper._graphs)) == (3, 0)
    assert stepper.step([session], [6], [Sampler(GREEDY)]) == [7]
    assert sorted(graph.batch.plan.size for graph in stepper._graphs.graphs()) == [1, 2, 4]


def test_one_batch_serves_all_ways_to_choose(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    session = start(runner, [5])
    graph = stepper.graph([session])
    for parameters in (GREEDY, SamplingParameters(1.0, seed=1), SamplingParameters(1.0, 0.5, 3, seed=1)):
        assert stepper.step([session], [6], [Sampler(parameters)]) == [7]
        assert stepper.graph([session]) is graph


def test_placements_are_batches_of_their_own(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    one, other = start(runner, [5]), start(runner, [5], placement=Placement.HYBRID)
    assert stepper.step([one, other], [1, 2], [Sampler(GREEDY)] * 2) == [2, 3]
    assert stepper.graph([one]) is not stepper.graph([other])
    stepper.prepare(other.fitted, 1, Placement.HYBRID)
    assert len(stepper._graphs) == 2


def test_sessions_that_attend_to_all_of_a_context_in_host_memory_read_it_together(
    runner: ModelRunner,
) -> None:
    """One batch has them all, and one task each part of the context for both."""
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    one, other = (start(runner, [5], placement=Placement.HYBRID) for _ in range(2))
    again = runner.start(one.context, METHODS["full"].on(one.context.manifest))
    sessions = [one, other, again]
    assert stepper.step(sessions, [1, 2, 3], [Sampler(GREEDY)] * 3) == [2, 3, 4]
    batch = stepper.graph(sessions).batch
    assert batch.sessions[:3] == sessions
    (attention,) = batch.attentions
    assert isinstance(attention, DenseSteps)
    members = {members for members, what in tasks_of(attention) if what & READS_CONTEXT}
    assert members == {1, 2}


def tasks_of(attention: DenseSteps) -> list[tuple[int, int]]:
    """Members of each task, and what they attend to."""
    table, size = attention._groups.table, attention._groups.size
    rows = table[HEADER + 3 * size :].view(-1, TASK_FIELDS)[: int(table[0])]
    return [(int(row[MEMBERS]), int(row[WHAT])) for row in rows]


def test_sessions_with_seeds_step_in_graphs_of_one_shape(runner: ModelRunner) -> None:
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    short = [start(runner, [5]) for _ in range(18)]
    long = start(runner, [5], 5000)

    def shapes(sessions: list[Session], samplers: list[Sampler]) -> list[tuple[int, int, int]]:
        """Rows, most keys and sessions of the graphs that a step ran in."""
        stepper.step(sessions, [1] * len(sessions), samplers)
        plans = [graph.batch.plan for graph in stepper._graphs.graphs()]
        seated = [sum(each is not None for each in g.batch.sessions) for g in stepper._graphs.graphs()]
        stepper._graphs = GraphCache()
        return [(plan.size, plan.max_keys, count) for plan, count in zip(plans, seated, strict=True)]

    greedy = Sampler(GREEDY)
    assert shapes([short[0]], [seeded(1)]) == [(16, 4096, 1)]
    assert shapes([*short[:2], long], [seeded(1), greedy, greedy]) == [(16, 4096, 2), (1, 8192, 1)]
    assert shapes([*short[:2], long], [greedy] * 3) == [(4, 8192, 3)]
    assert shapes(short, [*[greedy] * 17, seeded(1)]) == [(16, 4096, 16), (16, 4096, 2)]
    assert shapes([short[0]], [greedy]) == [(1, 4096, 1)]


def test_a_session_with_a_seed_gets_the_same_bits_alone_and_beside_others(runner: ModelRunner) -> None:
    """By products that round otherwise with other numbers of rows, as those of one row do on most processors."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = torch.randn(2, runner.identity.vocab_size, 256, generator=generator)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def product(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = embedding[tokens[:, 0]] @ head.t()
        seen.append((tokens[:, 0].clone(), logits))
        return logits

    stepper = Stepper(product, runner.identity, torch.float32, torch.device("cpu"))
    sessions = [start(runner, [5]) for _ in range(9)]

    def logits(count: int) -> torch.Tensor:
        """Of the first of so many sessions."""
        seen.clear()
        tokens = range(20, 20 + count)
        stepper.step(sessions[:count], tokens, [seeded(1), *[Sampler(GREEDY)] * (count - 1)])
        return next(
            row for given, found in seen for token, row in zip(given, found, strict=True) if token == 20
        )

    alone = logits(1)
    for count in (2, 5, 9):
        assert torch.equal(logits(count), alone)


def test_a_batch_steps_in_a_larger_graph_that_was_prepared(runner: ModelRunner) -> None:
    """Nothing is captured for it; sessions with seeds alone wait for a graph of their number of rows."""
    stepper = Stepper(successor, runner.identity, torch.float32, torch.device("cpu"))
    sessions = [start(runner, [5]) for _ in range(3)]
    stepper.prepare_beside(sessions[0].fitted, 8, Placement.DEVICE, least=8)
    for count in (1, 3, 2):
        tokens = list(range(count))
        found = stepper.step(sessions[:count], tokens, [Sampler(GREEDY)] * count)
        assert found == [token + 1 for token in tokens]
        assert stepper.graph(sessions[:count]).batch.plan.size == 8
    assert [graph.batch.plan.size for graph in stepper._graphs.graphs()] == [8]
    stepper.prepare_beside(sessions[0].fitted, 8, Placement.DEVICE)
    stepper.step(sessions[:2], [1, 2], [Sampler(GREEDY)] * 2)
    assert stepper.graph(sessions[:2]).batch.plan.size == 2
    assert stepper.step(sessions[:1], [6], [seeded(1)]) is not None
    assert FIXED_ROWS in {graph.batch.plan.size for graph in stepper._graphs.graphs()}
