"""Method `exact` says what `full` says: the same tokens, from the same bits, whatever is drafted and whoever is beside.

Models that cap their logits or have experts, and rows in 8 bits, round otherwise in other company: of them tokens are
compared, and bits nearly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from decode_engine.engine.engine import Engine
from decode_engine.engine.job import Reply
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.evaluation.tasks.documents import source_text
from decode_engine.layers.session import Session
from decode_engine.model.continuing import SessionWork
from decode_engine.model.runner import ModelRunner
from decode_engine.orders.events import Ends, Event, Fails, Says, TokenLogprob
from decode_engine.orders.fields import Sampling
from decode_engine.orders.order import Constraint, Order
from index_store.methods.presets import get_method
from prefill_worker.config import AUTO
from tests.support.devices import nightly
from tests.support.serving.served import PROMPT, Served, serve, serve_text
from tests.support.store import raising

METHODS = ("refined",)
TOKENS = 40


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("llama"), "llama", METHODS, dense_layers=AUTO, head_dim=16)


KINDS: dict[str, Any] = {
    "plain": {"kind": "llama", "head_dim": 16},
    "rows in 8 bits": {"kind": "llama", "head_dim": 16, "rows": "int8"},
    **{kind: {"kind": kind} for kind in ("windows", "sinks", "experts", "caps")},
}


@pytest.fixture(
    scope="module", params=["plain", "rows in 8 bits", "windows", *nightly("sinks", "experts", "caps")]
)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("kind")
    yield from serve(path, methods=METHODS, dense_layers=AUTO, **KINDS[request.param])


def decode(
    kept: Served, method: str, sampler: Sampler, drafts: Sequence[int] | None = None
) -> tuple[list[int], Session]:
    """Tokens behind the prompt; drafts: of how many tokens, in turn."""
    session, said = kept.start(method), []
    [logits] = kept.runner.read([session], [kept.runner.tokenizer.encode(PROMPT)])
    said.append(sampler.sample(logits[-1]))
    while len(said) < TOKENS:
        drafted: list[list[int]] = []
        if drafts is not None:
            drafted = kept.runner.draft([session], said[-1:], [sampler], [drafts[len(said) % len(drafts)]])
        (found,) = kept.runner.launch([session], said[-1:], [sampler], drafted).tokens()
        assert not isinstance(found, Exception)
        said += [found] if isinstance(found, int) else found
    return said, session


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_keys_and_values_are_those_of_full_bit_by_bit(
    kept: Served, request: pytest.FixtureRequest, temperature: float
) -> None:
    samplers = [Sampler(SamplingParameters(temperature=temperature, seed=4)) for _ in range(2)]
    expected, full = decode(kept, "full", samplers[0])
    said, exact = decode(kept, "exact", samplers[1], [4, 1, 7, 15])
    assert len(set(expected)) > 3
    assert said[:TOKENS] == expected
    rounds = any(kind in request.node.name for kind in ("8 bits", "sinks", "experts", "caps"))
    for one, other in zip(full.layers, exact.layers, strict=True):
        own, others = one.tail.rows, other.tail.rows[:, : full.tail_keys]
        if rounds:
            torch.testing.assert_close(others, own, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(others, own)


def ask(kept: Served, orders: Sequence[Order]) -> list[dict[int, tuple[list[int], list[TokenLogprob], Ends]]]:
    """Tokens, log probabilities and end of every answer to orders that are asked at once."""
    engine: Engine[Session] = Engine(kept.runner, max_sessions=16)
    told: list[list[Event]] = [[] for _ in orders]
    replies = []
    for order, events in zip(orders, told, strict=True):
        fitted = get_method(order.method).on(kept.context.manifest)
        work = SessionWork(
            order=order,
            prompt=order.prompt or kept.runner.tokenizer.encode(PROMPT),
            max_tokens=order.max_tokens or TOKENS,
            end_ids=frozenset(kept.runner.tokenizer.eos_ids),
            cost=kept.runner.prompt_cost(fitted),
            grammar=None if order.constraint is None else kept.runner.grammars.compile(order.constraint),
            runner=kept.runner,
            fitted=fitted,
            resident=kept.context,
            own=None,
            again=0,
            waiting=lambda: None,
            watch=None,
            keeper=None,
            release=lambda: None,
        )
        replies.append(Reply(events.append))
        engine.submit(engine.reserve(), work, replies[-1])
    ends = [0] * len(orders)
    while ends != [order.answers for order in orders]:
        assert not any(isinstance(event, Fails) for events in told for event in events), told
        with torch.inference_mode():
            engine.step()
        ends = [sum(isinstance(event, Ends) for event in events) for events in told]
    found: list[dict[int, tuple[list[int], list[TokenLogprob], Ends]]] = [{} for _ in orders]
    for answers, events in zip(found, told, strict=True):
        for end in events:
            if isinstance(end, Ends):
                says = [event for event in events if isinstance(event, Says) and event.answer == end.answer]
                answers[end.answer] = (
                    [token for event in says for token in event.token_ids],
                    [logprob for event in says for logprob in event.logprobs],
                    end,
                )
    return found


WISHES = {
    "greedy": Order(),
    "log probabilities": Order(sampling=Sampling(top_logprobs=2)),
    "drawn": Order(sampling=Sampling(temperature=0.6, seed=11)),
    "nucleus": Order(sampling=Sampling(temperature=0.9, top_p=0.6, seed=12)),
    "penalties": Order(sampling=Sampling(presence_penalty=0.4, repetition_penalty=1.1)),
    "no early end": Order(sampling=Sampling(min_tokens=30), stop_token_ids=frozenset(range(0, 250, 3))),
    "ends that are ignored": Order(
        ignore_eos=True, sampling=Sampling(frequency_penalty=1.5, logit_bias={0: 6.0})
    ),
    "stop tokens": Order(stop_token_ids=frozenset(range(0, 250, 50))),
    "expression": Order(constraint=Constraint("regex", "(harbour|lamp| ){5,30}")),
    "schema": Order(constraint=Constraint("json_schema", '{"enum": ["harbour", "keeper"]}')),
    "several": Order(answers=3, sampling=Sampling(temperature=0.6, seed=13)),
    "one token": Order(max_tokens=1),
    "two tokens": Order(max_tokens=2),
}


@pytest.mark.parametrize("wish", WISHES)
def test_requests_get_what_they_get_by_full(llama: Served, wish: str) -> None:
    order = WISHES[wish]
    [[full], [exact]] = ([ask(llama, [replace(order, method=name)])[0]] for name in ("full", "exact"))
    assert full.keys() == exact.keys()
    for number, (tokens, logprobs, end) in full.items():
        said, told, own_end = exact[number]
        assert said == tokens
        assert told == logprobs
        assert (own_end.reason, own_end.completion_tokens) == (end.reason, end.completion_tokens)
        if order.ignore_eos:
            assert (len(tokens), end.reason) == (TOKENS, "length")
            assert tokens.count(0) > 2 < len(set(tokens))
        assert end.figures["drafted"] == 0
        assert own_end.figures["drafted"] >= own_end.figures["accepted"]  # as many as times say
        if len(tokens) > 1:
            assert own_end.times.decode_steps == len(tokens) - 1 - own_end.figures["accepted"]


def test_sessions_with_drafts_step_beside_others(llama: Served) -> None:
    names = ["exact", "full", "exact", "refined", "exact"]
    orders = [Order(method=name, max_tokens=40 + number) for number, name in enumerate(names)]
    alone = [ask(llama, [order])[0][0][0] for order in orders]
    together = [answers[0] for answers in ask(llama, orders)]
    assert [tokens for tokens, _, _ in together] == alone
    assert alone[0] == alone[1][:40]
    assert not any(
        end.figures["drafted"] for (_, _, end), name in zip(together, names, strict=True) if name != "exact"
    )


def test_a_failing_draft_costs_no_answer(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    [[expected]] = [list(ask(llama, [Order(method="full")])[0].values())]

    monkeypatch.setattr(ModelRunner, "draft", raising(torch.OutOfMemoryError("no room")))
    [[found]] = [list(ask(llama, [Order(method="exact")])[0].values())]
    assert found[0] == expected[0]


def test_a_prompt_on_no_context_is_drafted_for_from_its_own_text(llama: Served) -> None:
    nothing = llama.runner.no_context
    fitted = get_method("exact").on(nothing.manifest)
    assert fitted.drafting is None
    assert llama.runner.suffixes(nothing) is None
    session = llama.runner.start(nothing, fitted)
    assert not session.drafts


@pytest.mark.parametrize("answers", [16, *nightly(1000)])
def test_the_reader_says_what_it_says_by_full(tmp_path: Path, answers: int) -> None:
    """Greedy answers behind passages of the text that it has read, and of text that it has not."""
    text = source_text(())
    for reader in serve_text(tmp_path, "reader", METHODS, text[:8000], dense_layers=AUTO):
        ids = reader.runner.tokenizer.encode(text[:400_000])
        step = (len(ids) - 200) // answers
        prompts = [ids[number * step : number * step + 20 + number % 40] for number in range(answers)]
        accepted = 0
        for first in range(0, answers, 16):
            orders = [Order(prompt=prompt, max_tokens=24) for prompt in prompts[first : first + 16]]
            full, exact = (
                ask(reader, [replace(each, method=name) for each in orders]) for name in ("full", "exact")
            )
            for own, other in zip(full, exact, strict=True):
                assert other[0][0] == own[0][0]
                accepted += other[0][2].figures["accepted"]
        assert accepted > answers
