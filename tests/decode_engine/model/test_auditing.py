"""Audited steps say what they would say anyway, and what they find is what evaluations find."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from decode_engine.engine.sampler import Sampler
from decode_engine.engine.sampling.parameters import SamplingParameters
from decode_engine.evaluation.scoring import Segment, reference_log_probs, score_segment
from decode_engine.layers.audits import Audits
from decode_engine.layers.session import Session
from decode_engine.model.auditing import audited
from index_store.methods.presets import METHODS, get_method
from tests.support.serving.served import Served, serve

METHOD = get_method("csattention", 0.05)
PROMPT, STEPS, TEXTS = 6, 8, 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("audited"), "llama")


@pytest.fixture(autouse=True)
def _auditing(served: Served) -> Iterator[None]:
    served.runner.audit_share = 1.0
    yield
    served.runner.audit_share = 0.0


def sampler() -> Sampler:
    return Sampler(SamplingParameters(), (), frozenset())


def texts(served: Served) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(1)
    size = (TEXTS, PROMPT + STEPS + 1)
    return [
        tuple(row)
        for row in torch.randint(0, served.runner.identity.vocab_size, size, generator=generator).tolist()
    ]


def fed(served: Served, text: Sequence[int], share: float) -> tuple[Session, list[object]]:
    """A session that has read a prompt and was fed the rest step by step, and what the steps chose."""
    runner, session = served.runner, served.start(METHOD)
    session.audits = Audits(share) if share else None
    runner.read([session], [text[:PROMPT]])
    found = [runner.launch([session], [token], [sampler()]).tokens()[0] for token in text[PROMPT:-1]]
    return session, found


def test_an_audited_step_says_what_it_would_say_anyway(served: Served) -> None:
    text = texts(served)[0]
    plain, expected = fed(served, text, 0.0)
    session, found = fed(served, text, 1.0)
    assert found == expected
    assert (session.position, session.figures.audited, plain.figures.audited) == (plain.position, STEPS, 0)
    for mine, others in zip(session.tail_rows(), plain.tail_rows(), strict=True):
        assert torch.equal(mine, others)
    for name in ("attended", "available", "kept", "searches", "sparse_available"):
        assert getattr(session.figures, name) == getattr(plain.figures, name)
    assert session.just_audited


def test_audits_agree_with_evaluations_within_their_standard_error(served: Served) -> None:
    """Evaluations read keys of earlier tokens as full attention has left them, audits as the method has."""
    audits, scores = [], []
    for text in texts(served):
        session, _ = fed(served, text, 1.0)
        audits.append(session.figures.audited_kl_nanonats / 1e9 / session.figures.audited)
        session.close()
        segment = Segment(text)
        reference = reference_log_probs(served.runner, served.context, METHODS["full"], segment)
        score = score_segment(served.runner, served.context, METHOD, segment, reference)
        scores.append(float(score.kl_T[PROMPT:].mean()))
    error = statistics.stdev(scores) / len(scores) ** 0.5
    assert statistics.mean(scores) > 0.01  # something to be measured
    assert abs(statistics.mean(audits) - statistics.mean(scores)) < error


def test_only_a_share_of_the_steps_is_audited() -> None:
    audits = Audits(0.25)
    due = [audits.due(position) for position in range(4000)]
    assert due[-1] == audits.due(3999) == audits.due(3999)
    assert 800 < sum(due) < 1200


def test_an_audit_that_fails_leaves_the_step_as_it_is(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    text = texts(served)[1]
    session = served.start(METHOD)
    session.audits = Audits(1.0)
    served.runner.read([session], [text[:PROMPT]])

    def full(sessions: Sequence[Session], token_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        served.runner.forward(sessions, token_ids, exact=True)
        raise RuntimeError("no memory")

    before = replace(session.figures)
    (logits,) = audited(served.runner.forward, full, [session], [[text[PROMPT]]])
    assert "an audit of 1 sessions failed: no memory" in caplog.text
    assert session.position == served.context.manifest.token_count + PROMPT + 1
    assert session.figures.audited == 0
    assert session.figures.searches > before.searches
    plain, _ = fed(served, text[: PROMPT + 1], 0.0)
    assert torch.equal(logits, served.runner.forward([plain], [[text[PROMPT]]])[0])


def test_a_fork_is_audited_too(served: Served) -> None:
    session, _ = fed(served, texts(served)[2], 1.0)
    other = session.fork()
    assert other.audits is not session.audits
    assert other.audit_due()
