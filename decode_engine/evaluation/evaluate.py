"""Measures methods on a model: contexts are made, prefilled by the prefill worker's command, asked and compared.

Every question is scored under full attention first; the other methods are compared with it on the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode_engine.config import check_device
from decode_engine.evaluation.machine import describe_machine
from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.progress import Advance, StartStage
from decode_engine.evaluation.report import write_results
from decode_engine.evaluation.scoring import (
    WARM_UP_STEPS,
    Score,
    Segment,
    Tally,
    reference_log_probs,
    score_segment,
    seconds_per_token,
)
from decode_engine.evaluation.tasks import (
    ANSWER_END,
    Document,
    Part,
    Question,
    held_out_text,
    make_documents,
    read_text,
)
from decode_engine.runner import ModelRunner
from index_store.arena import Arena
from index_store.catalog import Store
from index_store.context import ResidentContext
from index_store.context_loading import resident_bytes
from index_store.errors import InvalidArgumentError
from index_store.manifest import Manifest
from index_store.methods import Method, get_method
from index_store.models.loading import Tokenizer, resolve_model

TIMED_STEPS = 12


@dataclass(frozen=True, slots=True)
class EvaluationConfig:
    """What to evaluate; the same names as the command's flags.

    out: folder of the results, and of the store unless `store` names another. text: source of the contexts; the
    packaged novels when None. text_tokens: length of the plain text scored after every context.
    """

    model: str
    out: Path
    context_lengths: tuple[int, ...] = (8192, 32768)
    questions: int = 216
    facts: int = 24
    distractors: int = 0
    methods: tuple[str, ...] = ("full", "oracle", "csattention", "csattention-paper")
    keep: tuple[float, ...] = (0.01, 0.02, 0.05)
    text: Path | None = None
    text_tokens: int = 96
    dense_layers: str = "auto"
    calibration: Path | None = None
    store: Path | None = None
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_device(self.device)
        for label, value, least in (
            ("questions", self.questions, 1),
            ("facts", self.facts, 1),
            ("distractors", self.distractors, 0),
            ("text_tokens", self.text_tokens, TIMED_STEPS + WARM_UP_STEPS),
        ):
            if value < least:
                raise InvalidArgumentError(f"{label} is {value}, expected at least {least}")
        if not self.context_lengths or min(self.context_lengths) < 1:
            raise InvalidArgumentError("context_lengths is empty or holds a number below 1")
        self.variants()

    def variants(self) -> list[tuple[Method, float | None]]:
        """Methods with their keep ratios, full attention first whether it was asked for or not."""
        names = dict.fromkeys(("full", *self.methods))
        return [
            (get_method(name, keep), keep)
            for name in names
            for keep in (self.keep if get_method(name).sparse else (None,))
        ]

    @property
    def contexts(self) -> int:
        """Contexts per length: enough for the questions, `facts` of them in each."""
        return -(-self.questions // self.facts)


def evaluate(config: EvaluationConfig, start_stage: StartStage) -> dict[str, Any]:
    """Runs the evaluation; writes results.json and results.csv after every length; returns what the JSON holds."""
    folder = resolve_model(config.model)
    config.out.mkdir(parents=True, exist_ok=True)
    runner = ModelRunner(folder, device=config.device)
    text = held_out_text() if config.text is None else read_text(config.text)
    settings = {
        name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()
    }
    setting = {"settings": settings, "machine": describe_machine(), "model": asdict(runner.identity)}
    scores: list[Score] = []
    results: dict[str, Any] = {}
    for length in config.context_lengths:
        scores += _evaluate_length(config, runner, text, length, start_stage)
        results = write_results(config.out, scores, setting)
    return results


def _evaluate_length(
    config: EvaluationConfig, runner: ModelRunner, text: str, length: int, start_stage: StartStage
) -> list[Score]:
    tokenizer = runner.tokenizer
    documents = make_documents(
        tokenizer,
        text,
        length - len(tokenizer.prefix_ids),
        [Part(config.contexts, config.facts, distractors=config.distractors)],
        seed=config.seed,
        spare=16 * config.text_tokens,
    )
    store, contexts = _prefill_all(config, documents, length, start_stage)
    variants = config.variants()
    tallies = [Tally() for _ in variants]
    arena = Arena(max(map(resident_bytes, contexts)))
    left = config.questions
    pieces = (config.questions + config.contexts) * len(variants)
    advance = start_stage(f"asking after {length:,} tokens", pieces)
    for document, manifest in zip(documents, contexts, strict=True):
        segments = [question_segment(tokenizer, question) for question in document.questions[:left]]
        left -= len(segments)
        segments.append(_text_segment(tokenizer, document, config.text_tokens))
        with arena.acquire(store, manifest.id) as context:
            for segment in segments:
                _score_variants(runner, context, variants, segment, tallies, advance)
            for (method, _), tally in zip(variants, tallies, strict=True):
                steps = segments[-1].token_ids[: TIMED_STEPS + WARM_UP_STEPS]
                tally.seconds.append(seconds_per_token(runner, context, method, steps))
    return [
        tally.summarise(length, method, keep, tallies[0], _index_bytes_per_token(contexts, method))
        for (method, keep), tally in zip(variants, tallies, strict=True)
    ]


def _prefill_all(
    config: EvaluationConfig, documents: Sequence[Document], length: int, start_stage: StartStage
) -> tuple[Store, list[Manifest]]:
    """Contexts of all documents, in order; those that the store has already are only looked up."""
    store_path = config.out / "store" if config.store is None else config.store
    texts = config.out / "contexts"
    texts.mkdir(exist_ok=True)
    indexed = [
        method.name for method, _ in config.variants() if method.index is not None and method.index.stored
    ]
    command = PrefillCommand(
        config.model, store_path, list(dict.fromkeys(indexed)), config.dense_layers, config.calibration
    )
    advance = start_stage(f"prefilling {length:,} tokens", len(documents))
    ids = []
    for number, document in enumerate(documents):
        digest = hashlib.sha256(document.text.encode()).hexdigest()[:12]
        file = texts / f"{length}-{digest}.txt"
        file.write_text(document.text, encoding="utf-8")
        report = command.run(file, f"evaluate-{length}-{number}")
        if report["tokens"] != length:
            raise InvalidArgumentError(
                f"the prefill worker made {report['tokens']} tokens of {file}, expected {length}: the tokenizer does "
                "not give the same ids for a text that is read from a file"
            )
        ids.append(report["id"])
        advance()
    store = Store(store_path)
    return store, [store.manifest(context_id) for context_id in ids]


def question_segment(tokenizer: Tokenizer, question: Question) -> Segment:
    """Prompt and answer as token ids; the answer includes the full stop and line break that end it."""
    prompt = tokenizer.encode(question.prompt)
    whole = tokenizer.encode(f"{question.prompt} {question.answer}{ANSWER_END}")
    if whole[: len(prompt)] != prompt:
        whole = prompt + tokenizer.encode(f" {question.answer}{ANSWER_END}")
    return Segment(tuple(whole), len(prompt))


def _text_segment(tokenizer: Tokenizer, document: Document, tokens: int) -> Segment:
    ids = tokenizer.encode(document.continuation[: 16 * tokens])[:tokens]
    return Segment(tuple(ids))


def _score_variants(
    runner: ModelRunner,
    context: ResidentContext,
    variants: Sequence[tuple[Method, float | None]],
    segment: Segment,
    tallies: Sequence[Tally],
    advance: Advance,
) -> None:
    reference_TV = reference_log_probs(runner, context, variants[0][0], segment)
    for (method, _), tally in zip(variants, tallies, strict=True):
        tally.scores.append(score_segment(runner, context, method, segment, reference_TV))
        advance()


def _index_bytes_per_token(contexts: Sequence[Manifest], method: Method) -> float:
    if method.index is None or not method.index.stored:
        return 0.0
    sizes = [
        sum(array.nbytes for array in entry.arrays) / manifest.token_count
        for manifest in contexts
        for entry in manifest.indexes
        if entry.name == method.index.name
    ]
    return sum(sizes) / len(sizes)
