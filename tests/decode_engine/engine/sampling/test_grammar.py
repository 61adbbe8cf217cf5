"""Constraints over the packaged reader's vocabulary: which tokens may come, and what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from llguidance import LLMatcher

from decode_engine.engine.sampling import constraints
from decode_engine.engine.sampling.constraints import Trial, Vocabulary, VocabularySource, allowed_tokens
from decode_engine.engine.sampling.edits import Edits, edit_logits_reference
from decode_engine.engine.sampling.grammar import Grammar, Grammars
from decode_engine.orders.order import Constraint, ConstraintKind
from index_store.errors import InvalidArgumentError
from index_store.models.loading import Tokenizer, load_tokenizer, resolve_model

SIZE = 8192  # the model has more than its tokenizer's 4,096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("reader"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Iterator[Tried]:
    made = Tried(Vocabulary(lambda: VocabularySource(tokenizer.definition(), SIZE, tokenizer.eos_ids)))
    yield made
    made.close()


class Tried:
    """A vocabulary, and grammars over it of constraints that were tried, as a door and an engine have them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.grammars = Grammars(vocabulary)
        self.token_bytes = vocabulary.token_bytes

    def compile(self, constraint: Constraint) -> Grammar:
        self.vocabulary.check(constraint)
        return self.grammars.compile(constraint)

    def close(self) -> None:
        self.grammars.close()
        self.vocabulary.close()


@pytest.fixture
def trials(tokenizer: Tokenizer) -> Iterator[Trial]:
    made = Trial(lambda: VocabularySource(tokenizer.definition(), SIZE, tokenizer.eos_ids))
    yield made
    made.close()


def answer(vocabulary: Tried, constraint: Constraint, seed: int) -> tuple[bytes, bool]:
    """The answer of a model that says anything that it may, and whether it ended with an end token."""
    generator = torch.Generator().manual_seed(seed)
    obeyed = vocabulary.compile(constraint).start()
    said = b""
    while not obeyed.ended:
        edits = [Edits(allowed_W=obeyed.allowed())]
        logits = edit_logits_reference(torch.randn(1, SIZE, generator=generator), edits)
        token = int(logits.argmax())
        obeyed.take(token)
        if token == 0:
            return said, True
        said += vocabulary.token_bytes[token]
    return said, False


@pytest.mark.parametrize(
    ("kind", "text", "ends"),
    [
        ("choices", json.dumps(["yes", "yesterday", "nö"]), {b"yes", b"yesterday", "nö".encode()}),
        ("regex", "[01]{2}", {b"00", b"01", b"10", b"11"}),
        ("json_schema", '{"type": "boolean"}', {b"true", b"false"}),
    ],
)
def test_answers_are_those_that_are_allowed_and_end_by_themselves(
    vocabulary: Tried, kind: ConstraintKind, text: str, ends: set[bytes]
) -> None:
    found = {answer(vocabulary, Constraint(kind, text), seed)[0] for seed in range(24)}
    assert found <= ends
    assert len(found) > 1


def test_where_more_might_follow_an_end_token_is_allowed(vocabulary: Tried) -> None:
    constraint = Constraint("regex", "a+")
    assert any(answer(vocabulary, constraint, seed)[1] for seed in range(8))


def test_answers_to_one_grammar_go_on_apart_also_at_once(vocabulary: Tried) -> None:
    grammar = vocabulary.compile(Constraint("regex", "[0-9]{40}"))
    assert vocabulary.compile(Constraint("regex", "[0-9]{40}")) is grammar
    lengths: list[int] = []

    def run(seed: int) -> None:
        said, _ = answer(vocabulary, Constraint("regex", "[0-9]{40}"), seed)
        lengths.append(len(said))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [40] * 6


def test_tokens_that_may_not_come_are_refused(vocabulary: Tried, tokenizer: Tokenizer) -> None:
    obeyed = vocabulary.compile(Constraint("regex", "[0-9]{3}")).start()
    [letter] = tokenizer.encode("a")
    [logits_V] = edit_logits_reference(torch.zeros(1, SIZE), [Edits(allowed_W=obeyed.allowed())])
    assert logits_V[letter] == -torch.inf
    assert logits_V[0] == -torch.inf, "no end before it is whole"
    with pytest.raises(InvalidArgumentError, match="cannot be obeyed any more"):
        obeyed.take(letter)


def test_what_dies_in_its_trial_is_refused_and_the_next_one_is_tried(
    vocabulary: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = Constraint("json_schema", '{"type": "integer", "multipleOf": 99999989}')
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "_TRIAL_S", 2.0)
        with pytest.raises(InvalidArgumentError, match="json_schema cannot be obeyed: it is too complex"):
            vocabulary.compile(hostile)
    assert answer(vocabulary, Constraint("regex", "after"), 0)[0] == b"after"


def test_a_trial_reads_answers_also_where_many_files_are_open(trials: Trial) -> None:
    trials.check(Constraint("regex", "a"))
    process = trials._process
    assert process is not None
    assert process.stdout is not None
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, 2048), most))
    try:
        with process.stdout as low:
            process.stdout = os.fdopen(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024), "rb")
        trials.check(Constraint("regex", "b"))
    finally:
        trials.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_an_answer_that_was_not_read_is_not_taken_for_the_next_one(
    trials: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(24, "Too many open files")

    trials.check(Constraint("regex", "a"))
    with monkeypatch.context() as patch:
        patch.setattr(constraints, "DefaultSelector", fail)
        with pytest.raises(OSError, match="Too many open files"):
            trials.check(Constraint("regex", "("))
    trials.check(Constraint("regex", "a"))


def test_who_waits_for_a_core_is_not_too_complex(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which nothing is computed says nothing about a constraint."""

    def wait_first(matcher: LLMatcher) -> Sequence[int]:
        time.sleep(1.5 * constraints._SLOWEST_MASK_S)
        return allowed_tokens(matcher)

    monkeypatch.setattr(constraints, "allowed_tokens", wait_first)
    source = VocabularySource(tokenizer.definition(), SIZE, tokenizer.eos_ids)
    assert constraints._try(source.make(), Constraint("regex", "[ab]")) == ""


def test_bytes_of_tokens_are_those_of_the_text(vocabulary: Tried, tokenizer: Tokenizer) -> None:
    text = "Ein Hafen: „hören“, 灯, and the end.\n"
    assert b"".join(vocabulary.token_bytes[token] for token in tokenizer.encode(text)).decode() == text
