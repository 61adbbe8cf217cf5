"""Steps of any sessions: which graphs they take, how batches are divided, and what happens when one fails."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

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
from index_store.errors import InvalidArgumentError
from index_store.memory.placement import Placement
from index_store.methods.presets import METHODS, get_method
from index_store.models.resolve import resolve_model
from tests.decode_engine.steps.sessions import (
    GREEDY,
    OnlyEven,
    by_forward,
    by_steps,
    seeded,
    start,
    stepper_of,
    successor,
)
from tests.support.models import write_model_folder


def test_sessions_on_contexts_of_other_lengths_decode_as_one_by_one(
    runner: ModelRunner, stepper: Stepper
) -> None:
    prompts, lengths = [[5, 9, 2], [7], [1, 2, 3, 4]], [512, 301, 17]
    samplings = [GREEDY, SamplingParameters(temperature=0.9, seed=4), SamplingParameters(0.8, 0.7, 11, 5)]
    expected = [
        by_forward(runner, start(runner, prompt, length), 3, Sampler(sampling), 4)
        for prompt, length, sampling in zip(prompts, lengths, samplings, strict=True)
    ]
    sessions = [start(runner, prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    samplers = [Sampler(sampling) for sampling in samplings]
    assert by_steps(stepper, sessions, [3] * 3, samplers, 4) == expected


def test_sessions_with_rules_grammars_and_log_probabilities_step_with_the_others(
    runner: ModelRunner, stepper: Stepper
) -> None:
    prompts, rules = [[5, 9, 2], [4, 4]], {"frequency_penalty": 2.0, "logit_bias": {9: 3.0}}
    grammars = [OnlyEven(), OnlyEven()]

    def samplers(grammar: OnlyEven) -> list[Sampler]:
        by_hand = SamplingParameters(**rules, grammar=grammar, top_logprobs=2)  # type: ignore[arg-type]
        return [Sampler(GREEDY), Sampler(by_hand, prompts[1])]

    alone, together = (samplers(grammar) for grammar in grammars)
    expected = [
        by_forward(runner, start(runner, prompt, 17), 3, sampler, 2)
        for prompt, sampler in zip(prompts, alone, strict=True)
    ]
    sessions = [start(runner, prompt, 17) for prompt in prompts]
    assert by_steps(stepper, sessions, [3] * 2, together, 2) == expected
    assert grammars[0].taken == grammars[1].taken == expected[1]
    assert all(token % 2 == 0 for token in expected[1])
    told = [sampler.logprob for sampler in (alone[1], together[1])]
    assert told[0].token_id == told[1].token_id == expected[1][-1]
    assert told[0].logprob == pytest.approx(told[1].logprob, abs=1e-3)


@pytest.mark.parametrize("name", ["full", "csattention", "multipole", "quest", "csattention-paper"])
def test_a_fork_decodes_as_the_session_it_was_made_of(runner: ModelRunner, name: str) -> None:
    prompt = list(range(40)) * 4
    whole, other = start(runner, prompt, name=name), start(runner, prompt, name=name)
    fork = whole.fork()
    assert fork.figures == whole.figures
    assert fork.nbytes > 0
    expected = by_forward(runner, other, 3, Sampler(GREEDY), 6)
    by_forward(runner, whole, 8, Sampler(SamplingParameters(2.0, seed=2)), 6)
    whole.close()
    assert by_forward(runner, fork, 3, Sampler(GREEDY), 6) == expected
    assert fork.nbytes == other.nbytes
    times = {"search_ns", "gather_ns", "attend_ns", "append_ns"}
    assert {field: value for field, value in asdict(fork.figures).items() if field not in times} == {
        field: value for field, value in asdict(other.figures).items() if field not in times
    }


def test_sessions_join_leave_and_take_other_rows(runner: ModelRunner, stepper: Stepper) -> None:
    prompts = [[5, 9, 2], [7], [1, 2, 3, 4]]
    expected = [by_forward(runner, start(runner, prompt), 3, Sampler(GREEDY), 4) for prompt in prompts]
    a, b, c = (start(runner, prompt) for prompt in prompts)
    got: dict[int, list[int]] = {id(session): [] for session in (a, b, c)}
    for batch in ([a], [a, b], [b, a, c], [c, b], [c], [a, b, c]):
        tokens = [(got[id(session)] or [3])[-1] for session in batch]
        for session, token in zip(
            batch, stepper.step(batch, tokens, [Sampler(GREEDY)] * len(batch)), strict=True
        ):
            assert isinstance(token, int)
            got[id(session)].append(token)
    for session, whole in zip((a, b, c), expected, strict=True):
        assert got[id(session)] == whole[: len(got[id(session)])]
        assert len(got[id(session)]) >= 3


@pytest.mark.parametrize("expression", ["squeezed", "csattention@period=4", "quest"])
def test_a_context_of_flat_layers_is_attended_to_as_by_full_attention(
    runner: ModelRunner, expression: str
) -> None:
    """Without any index; on the general path, and in the captured steps of full attention."""
    context = made_up_context(runner.identity, runner.kv_dtype, METHODS["full"], 90)
    context.manifest = replace(context.manifest, dense_layers=tuple(range(runner.identity.layers)))

    def begun(name: str) -> Session:
        session = runner.start(context, get_method(name).on(context.manifest))
        runner.forward([session], [[5, 9]])
        return session

    expected = by_forward(runner, begun("full"), 3, Sampler(GREEDY), 3)
    assert by_forward(runner, begun(expression), 3, Sampler(GREEDY), 3) == expected
    stepper = stepper_of(runner)
    session, full = begun(expression), begun("full")
    assert stepper.graph([session]) is stepper.graph([full])
    assert step_counts(session) == step_counts(full)


def test_a_step_without_anything_to_search_counts_no_search(runner: ModelRunner) -> None:
    stepper = stepper_of(runner)
    one, other = (start(runner, [5], 100, name="multipole") for _ in range(2))
    by_forward(runner, one, 3, Sampler(GREEDY), 2)
    by_steps(stepper, [other], [3], [Sampler(GREEDY)], 2)
    assert other.figures.searches == one.figures.searches == 0
    assert other.figures.attended == one.figures.attended


def test_counts_and_tails_are_right_at_every_step(runner: ModelRunner) -> None:
    """Whoever joins or leaves, while search ends move, and between steps on the general path."""
    stepper = stepper_of(runner)
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

    stepper = stepper_of(runner, counted)
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
    stepper = stepper_of(runner)
    sessions = [start(runner, [5]) for _ in range(4)]
    tokens: list[int] = [1, 2, 3, 4]
    for _ in range(3):
        results = stepper.step(sessions, tokens, [Sampler(GREEDY)] * 4)
        assert results == [token + 1 for token in tokens]
        tokens = [token + 1 for token in tokens]
    assert placed == sessions


def test_a_tail_that_comes_back_to_its_address_is_followed(runner: ModelRunner) -> None:
    """Memory that a tail gave back when it grew may become its own again: then its heads lie farther apart."""
    stepper = stepper_of(runner)
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
    stepper = stepper_of(runner)
    sessions = [start(runner, [5]) for _ in range(3)]
    stepper.prepare(sessions[0].fitted, 5)
    ready = stepper._graphs.graphs()
    assert [graph.batch.plan.size for graph in ready] == [1, 2, 4, 8]
    assert stepper.graph(sessions) is ready[2]


def test_what_another_thread_prepared_is_what_runs(runner: ModelRunner) -> None:
    stepper = stepper_of(runner)
    session = start(runner, [5])
    for _ in range(2):  # the second time everything is there, though no step has taken it yet
        beside = threading.Thread(target=stepper.prepare_beside, args=(session.fitted, 3, Placement.DEVICE))
        beside.start()
        beside.join()
    assert (stepper._made.qsize(), len(stepper._graphs)) == (3, 0)
    assert stepper.step([session], [6], [Sampler(GREEDY)]) == [7]
    assert sorted(graph.batch.plan.size for graph in stepper._graphs.graphs()) == [1, 2, 4]


def test_placements_are_batches_of_their_own(runner: ModelRunner) -> None:
    stepper = stepper_of(runner)
    one, other = start(runner, [5]), start(runner, [5], placement=Placement.HYBRID)
    assert stepper.step([one, other], [1, 2], [Sampler(GREEDY)] * 2) == [2, 3]
    assert stepper.graph([one]) is not stepper.graph([other])
    stepper.prepare(other.fitted, 1, Placement.HYBRID)
    assert len(stepper._graphs) == 2


def test_sessions_that_attend_to_all_of_a_context_in_host_memory_read_it_together(
    runner: ModelRunner,
) -> None:
    """One batch has them all, and one task each part of the context for both."""
    stepper = stepper_of(runner)
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
    stepper = stepper_of(runner)
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

    stepper = stepper_of(runner, product)
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
    stepper = stepper_of(runner)
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


def test_a_grammar_that_fails_ends_its_own_session(runner: ModelRunner, stepper: Stepper) -> None:
    class Failing(OnlyEven):
        def allowed(self) -> NDArray[np.int32]:
            raise InvalidArgumentError("the constraint cannot be obeyed any more")

    grammar = Failing()
    samplers = [Sampler(GREEDY), Sampler(SamplingParameters(grammar=grammar))]  # type: ignore[arg-type]
    expected = by_forward(runner, start(runner, [5, 9, 2], 17), 3, Sampler(GREEDY), 1)
    sessions = [start(runner, [5, 9, 2], 17), start(runner, [7], 17)]
    positions = [session.position for session in sessions]
    token, failed = stepper.step(sessions, [3, 3], samplers)
    assert [token] == expected
    assert isinstance(failed, InvalidArgumentError)
    assert [session.position for session in sessions] == [positions[0] + 1, positions[1]]


def test_logits_that_are_not_finite_fail_their_session_only(runner: ModelRunner) -> None:
    def broken(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(tokens[:, 0] + 1, runner.identity.vocab_size).float()
        return torch.where(tokens == 7, torch.nan, logits)

    stepper = stepper_of(runner, broken)
    well, ill = start(runner, [5]), start(runner, [5])
    results = stepper.step([ill, well], [7, 8], [Sampler(GREEDY)] * 2)
    assert isinstance(results[0], Exception)
    assert results[1] == 9
    assert (ill.position, well.position) == (513, 514)


def test_a_batch_that_fails_is_not_the_fault_of_others(runner: ModelRunner) -> None:
    def broken(tokens: torch.Tensor, positions: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        if bool((tokens == 7).any()):
            raise RuntimeError("out of something")
        return successor(tokens, positions, batch)

    stepper = stepper_of(runner, broken)
    well, ill = start(runner, [5]), start(runner, [5], name="multipole")  # a batch of its own
    results = stepper.step([ill, well], [7, 8], [Sampler(GREEDY)] * 2)
    assert str(results[0]) == "out of something"
    assert results[1] == 9
    assert (ill.position, well.position) == (513, 514)


def test_a_session_without_a_place_is_not_the_fault_of_its_batch(runner: ModelRunner) -> None:
    stepper = stepper_of(runner)
    well, ill = start(runner, [5]), start(runner, [5])
    ill.context._kv.pop(runner.identity.layers - 1)  # its last layer cannot be read any more
    for step in range(2):
        results = stepper.step([ill, well], [7, 8 + step], [Sampler(GREEDY)] * 2)
        assert isinstance(results[0], InvalidArgumentError)
        assert results[1] == 9 + step
    assert (ill.position, well.position) == (513, 515)
    batch = stepper.graph([ill, well]).batch
    row = 1 - batch.sessions.index(well)
    assert not batch._host_LBF[:, row].any()


def test_a_session_whose_counts_no_record_holds_fails_alone(runner: ModelRunner) -> None:
    """One that nothing refused before, among sixteen in a batch: the others step as without it."""
    stepper = stepper_of(runner)
    method = replace(METHODS["multipole"], recent=8, append_block=4)
    context = made_up_context(runner.identity, runner.kv_dtype, method, 60)
    fitted = method.on(context.manifest)
    sessions = [runner.start(context, fitted) for _ in range(16)]
    absurd = runner.start(context, replace(fitted, method=replace(method, recent=10**24)))
    tokens: list[int | Exception] = [*range(16)]
    for step in range(6):
        results = stepper.step([absurd, *sessions], [0, *tokens], [Sampler(GREEDY)] * 17)  # type: ignore[list-item]
        assert isinstance(results[0], OverflowError)
        tokens = results[1:]
        assert tokens == [number + step + 1 for number in range(16)]
    assert absurd.position == context.manifest.token_count
    graph = stepper.graph([absurd, *sessions])
    for session in sessions:
        session.position -= 1  # as before the last step
        counts = step_counts(session)
        row = graph._inputs[graph.batch.sessions.index(session)]
        assert row[2:].tolist() == [counts[field] for field in range(*records.STEP_FIELDS)]


def test_models_that_kernels_are_not_made_for_take_the_general_path(
    runner: ModelRunner, tmp_path: Path
) -> None:
    folder = write_model_folder(tmp_path, head_dim=48, max_positions=8192)
    other = ModelRunner(resolve_model(str(folder)))
    stepper = stepper_of(other)
    assert not stepper.takes(start(other, [5]))


def test_a_method_without_kernels_is_refused_with_a_reason(
    runner: ModelRunner, stepper: Stepper, caplog: pytest.LogCaptureFixture
) -> None:
    method = METHODS["quest"]
    context = made_up_context(runner.identity, runner.kv_dtype, method)
    session = runner.start(context, method.on(context.manifest))
    with caplog.at_level("INFO"):
        assert not stepper.takes(session)
        assert not stepper.takes(session)
    assert sum("quest" in record.message for record in caplog.records) == 1
