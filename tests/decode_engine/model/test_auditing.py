"""Audited steps say what they would say anyway, and what they find is what evaluations find."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from decode_engine.core.seeing import Seeing
from decode_engine.engine.sampler import Sampler, SamplingParameters
from decode_engine.evaluation.scoring import Segment, reference_log_probs, score_segment
from decode_engine.layers.session import Session
from decode_engine.model.runner import audited
from decode_engine.orders.fields import Sampling
from decode_engine.orders.order import Order
from index_store.methods.method import FittedMethod
from index_store.methods.presets import METHODS, get_method
from tests.support.serving.served import Served, serve

METHOD = get_method("csattention", 0.05)
PROMPT, STEPS, TEXTS = 6, 8, 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("audited"), "llama")


def sampler() -> Sampler:
    return Sampler(SamplingParameters(), (), frozenset())


def texts(served: Served) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    size = (TEXTS, PROMPT + STEPS + 1)
    return [
        tuple(row)
        for row in torch.randint(0, served.runner.identity.vocab_size, size, generator=generator).tolist()
    ]


def fed(served: Served, text: Sequence[int], audit: bool) -> tuple[Session, list[object]]:
    """A session that has read a prompt and was fed the rest step by step, and what the steps chose."""
    runner, session = served.runner, served.start(METHOD)
    if audit:
        session.begin_audit(served.start(METHODS["full"]), text[:PROMPT])
    runner.read([session], [text[:PROMPT]])
    found = [runner.launch([session], [token], [sampler()]).tokens()[0] for token in text[PROMPT:-1]]
    return session, found


def test_an_audited_step_says_what_it_would_say_anyway(served: Served) -> None:
    text = texts(served)[0]
    plain, expected = fed(served, text, audit=False)
    session, found = fed(served, text, audit=True)
    assert found == expected
    assert (session.position, session.figures.audited, plain.figures.audited) == (plain.position, STEPS, 0)
    for mine, others in zip(session.tail_rows(), plain.tail_rows(), strict=True):
        assert torch.equal(mine, others)
    for name in ("attended", "available", "kept", "searches", "sparse_available"):
        assert getattr(session.figures, name) == getattr(plain.figures, name)


def test_audits_agree_with_evaluations_within_their_standard_error(served: Served) -> None:
    audits, scores = [], []
    for text in texts(served):
        session, _ = fed(served, text, audit=True)
        audits.append(session.figures.audited_kl_nanonats / 1e9 / session.figures.audited)
        session.close()
        segment = Segment(text)
        reference = reference_log_probs(served.runner, served.context, METHODS["full"], segment)
        score = score_segment(served.runner, served.context, METHOD, segment, reference)
        scores.append(float(score.kl_T[PROMPT:].mean()))
    error = statistics.stdev(scores) / len(scores) ** 0.5
    assert statistics.mean(scores) > 0.01  # something to be measured
    assert abs(statistics.mean(audits) - statistics.mean(scores)) < 0.01 * error  # they feed the same tokens


def test_a_shadow_makes_up_for_a_long_prompt_step_by_step(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_engine.model.runner._AT_ONCE", 3)
    session, _ = fed(served, texts(served)[0], audit=True)
    assert session.shadow.position == session.position
    # 6 tokens of the prompt and one more for each step, of which three are fed at a time.
    assert session.figures.audited == STEPS - 2


def test_an_audit_that_fails_is_given_up(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    text = texts(served)[1]
    session, shadow = served.start(METHOD), served.start(METHODS["full"])
    session.begin_audit(shadow, text[:PROMPT])
    served.runner.read([session], [text[:PROMPT]])

    def full(sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        raise RuntimeError("no memory")

    (logits,) = audited(served.runner.forward, full, [session], [[text[PROMPT]]])
    assert "an audit failed, and is given up: no memory" in caplog.text
    assert (session.shadow, session.figures.audited, len(shadow.layers)) == (None, 0, 0)
    plain, _ = fed(served, text[: PROMPT + 1], audit=False)
    assert torch.equal(logits, served.runner.forward([plain], [[text[PROMPT]]])[0])


def test_a_shadow_ends_with_its_session_and_is_that_of_one_answer(served: Served) -> None:
    session, _ = fed(served, texts(served)[2], audit=True)
    other, shadow = session.fork(), session.shadow
    assert (other.shadow, other.watched, session.watched) == (None, False, True)
    session.close()
    assert (session.shadow, len(shadow.layers)) == (None, 0)


def test_what_is_audited_is_drawn() -> None:
    full, sparse = SimpleNamespace(searching=[], drafting=None), SimpleNamespace(searching=[1], drafting=None)
    exact = SimpleNamespace(searching=[1], drafting=sparse)
    seeing, seeded = Seeing(audit_share=1.0), Order(sampling=Sampling(seed=3))
    told = [
        (sparse, Order(), "cuda"),
        (sparse, seeded, "cpu"),
        (sparse, seeded, "cuda"),
        (full, Order(), "cpu"),
    ]
    found = [seeing.audits(cast(FittedMethod, fitted), order, device) for fitted, order, device in told]
    assert found == [True, True, False, False]
    assert not seeing.audits(cast(FittedMethod, exact), Order(), "cpu")
    drawn = [Seeing(audit_share=0.25).audits(cast(FittedMethod, sparse), Order(), "cpu") for _ in range(4000)]
    assert 800 < sum(drawn) < 1200
    assert not Seeing().audits(cast(FittedMethod, sparse), Order(), "cpu")
