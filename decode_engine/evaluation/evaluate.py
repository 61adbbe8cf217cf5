"""Measures methods on a model: contexts are made, prefilled by the prefill worker's command, asked and compared.

Every question is scored under full attention first; the other methods are compared with it on the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_engine.evaluation.machine import arena_for, describe_machine, return_free_memory
from decode_engine.evaluation.prefill_command import PrefillCommand
from decode_engine.evaluation.results import Results, write_results
from decode_engine.evaluation.scoring import Segment, reference_log_probs, score_segment, seconds_per_token
from decode_engine.evaluation.settings import TIMED_STEPS, WARM_UP_STEPS, EvaluationConfig, Variant
from decode_engine.evaluation.summary import ALL_TASKS, MassMap, Score, StoredBytes, Tally
from decode_engine.evaluation.tasks.documents import (
    Document,
    Question,
    chat_question,
    make_documents,
    source_text,
)
from decode_engine.model.runner import ModelRunner
from decode_engine.settings.command_options import Prompts
from index_store.cli.console import Advance, StartStage
from index_store.errors import InvalidArgumentError
from index_store.memory.context_loading import placed_bytes
from index_store.memory.devices import context_device, describe_device, pick_device
from index_store.memory.placement import Placement
from index_store.memory.resident import ResidentContext
from index_store.methods.method import misfits
from index_store.models.conversation.messages import Message, Role
from index_store.models.loading import Tokenizer, resolve_model
from index_store.store.catalog import Store
from index_store.store.description.dtypes import AS_DTYPE, INT8
from index_store.store.description.manifest import HIGH_PLANE, Manifest

OBSERVED_QUESTIONS = 4
"""Questions per context at which searching layers are compared with exact attention, besides the plain text."""


def evaluate(config: EvaluationConfig, start_stage: StartStage) -> Results:
    """Runs the evaluation; writes the results so far after every context; returns what was written last."""
    folder = resolve_model(config.model)
    config.out.mkdir(parents=True, exist_ok=True)
    prompts = Prompts.EACH if config.prompts is Prompts.AUTO else config.prompts
    runner = ModelRunner(folder, device=pick_device(config.device), prompts=prompts, weights=config.weights)
    try:
        if config.chat:
            runner.tokenizer.format_question("?")  # raises before any long work when there is no template
        text = source_text(config.text)
        evaluation = _Evaluation(config, runner, text, _setting(config, runner, text))
        for length in config.context_lengths:
            evaluation.run(length, start_stage)
        return evaluation.write(complete=True)
    finally:
        runner.close()


def _setting(config: EvaluationConfig, runner: ModelRunner, text: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in asdict(config).items():
        many = isinstance(value, tuple)
        plain = [_plain(v) for v in (value if many else (value,))]
        settings[name] = plain if many else plain[0]
    # What is judged, whatever it was chosen by.
    settings["prompts"] = runner.prompts.value
    return {
        "settings": settings,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "machine": {**describe_machine(), "computed_on": describe_device(runner.device)},
        "model": asdict(runner.identity),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Prompts):
        return value.value
    return str(value) if isinstance(value, Path) else value


@dataclass
class _Evaluation:
    """A running evaluation: what it works with, and the results so far."""

    config: EvaluationConfig
    runner: ModelRunner
    text: str
    setting: dict[str, Any]
    scores: dict[int, list[Score]] = field(default_factory=dict)
    maps: dict[int, list[MassMap]] = field(default_factory=dict)

    def run(self, length: int, start_stage: StartStage) -> None:
        """Evaluates all methods at one context length; writes the results after every context."""
        config, tokenizer = self.config, self.runner.tokenizer
        documents = make_documents(
            tokenizer,
            self.text,
            length - len(tokenizer.prefix_ids),
            config.document_sets(length),
            seed=config.seed,
            spare=16 * config.text_tokens,
        )
        device = self.runner.device
        store, contexts = _prefill_all(config, documents, length, device, start_stage)
        variants, approximated = config.variants(), config.approximated()
        self.setting["misfits"] = misfits(contexts[0])
        twins: list[Manifest] = []
        if approximated:
            _, twins = _prefill_all(
                config, documents, length, device, start_stage, config.attention, config.rows
            )
        segments = [self._segments(*each) for each in share_questions(config, documents)]
        tallies, later = [Tally() for _ in variants], [Tally() for _ in approximated]
        arena = arena_for([*contexts, *twins], device, config.placement)
        # A piece is a text scored with every method, so that pieces cost about the same and the time left is known
        # also when methods differ; timing the steps of a context costs about as much as one.
        pieces = (sum(map(len, segments)) + len(contexts)) * (2 if approximated else 1)
        advance = start_stage(f"asking after {length:,} tokens", pieces)
        for number, (manifest, texts) in enumerate(zip(contexts, segments, strict=True)):
            draw = documents[number].stretch
            with arena.acquire(store, manifest.id) as context:
                references = self._score_context(draw, context, variants, texts, tallies, advance)
                placement = context.placement
            if approximated:
                with arena.acquire(store, twins[number].id) as context:
                    self._score_context(draw, context, approximated, texts, later, advance, references)
            every, found = [*variants, *approximated], [*tallies, *later]
            stored = partial(_stored_bytes, contexts, twins, device, placement)
            self._summarise(length, every, found, stored)
            self.write(complete=False)

    def _segments(self, document: Document, questions: Sequence[Question]) -> list[Segment]:
        """The questions of a context, some of them observed, and the plain text that follows it."""
        tokenizer = self.runner.tokenizer
        observed = set(_spread(len(questions), OBSERVED_QUESTIONS))
        segments = []
        for number, question in enumerate(questions):
            segments.append(
                question_segment(tokenizer, question, chat=self.config.chat, observed=number in observed)
            )
        return [*segments, _text_segment(tokenizer, document, self.config.text_tokens)]

    def _score_context(
        self,
        draw: int,
        context: ResidentContext,
        variants: Sequence[Variant],
        segments: Sequence[Segment],
        tallies: Sequence[Tally],
        advance: Advance,
        references: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Adds to the tallies; returns what full attention predicted, unless another context's are the references.

        draw: which one of those that are independent the context belongs to.
        """
        runner = self.runner
        found = list(references)
        for place, segment in enumerate(segments):
            if not references:
                found.append(reference_log_probs(runner, context, variants[0].method, segment))
            for variant, tally in zip(variants, tallies, strict=True):
                tally.add(score_segment(runner, context, variant.method, segment, found[place]), draw)
            return_free_memory()
            advance()
        steps = segments[-1].token_ids[: TIMED_STEPS + WARM_UP_STEPS]
        for variant, tally in zip(variants, tallies, strict=True):
            tally.seconds.append(seconds_per_token(runner, context, variant.method, steps))
        advance()
        return found

    def _summarise(
        self,
        length: int,
        variants: Sequence[Variant],
        tallies: Sequence[Tally],
        stored: Callable[[Variant], StoredBytes],
    ) -> None:
        tasks = tallies[0].tasks
        self.scores[length] = [
            tally.summarise(length, variant, tallies[0], stored(variant), task)
            for task in (ALL_TASKS, *(tasks if len(self.config.tasks) > 1 else ()))
            for variant, tally in zip(variants, tallies, strict=True)
        ]
        maps = [tally.mass_map(length, variant) for variant, tally in zip(variants, tallies, strict=True)]
        self.maps[length] = [found for found in maps if found is not None]

    def write(self, *, complete: bool) -> Results:
        results = Results(
            {**self.setting, "complete": complete},
            [score for scores in self.scores.values() for score in scores],
            [found for maps in self.maps.values() for found in maps],
        )
        write_results(self.config.out, results)
        return results


def share_questions(
    config: EvaluationConfig, documents: Sequence[Document]
) -> list[tuple[Document, list[Question]]]:
    """Which questions each document is asked: all of them until a task's share is used up, then some of every depth."""
    left = config.questions_by_task()
    shared = []
    for document in documents:
        chosen = [document.questions[i] for i in _spread(len(document.questions), left[document.family])]
        left[document.family] -= len(chosen)
        shared.append((document, chosen))
    return shared


def _spread(available: int, wanted: int) -> list[int]:
    """Up to `wanted` of the numbers below `available`, evenly."""
    if wanted >= available:
        return list(range(available))
    return [(2 * i + 1) * available // (2 * wanted) for i in range(wanted)]


def _prefill_all(
    config: EvaluationConfig,
    documents: Sequence[Document],
    length: int,
    device: torch.device,
    start_stage: StartStage,
    attention: str = "exact",
    rows: str = AS_DTYPE,
) -> tuple[Store, list[Manifest]]:
    """Contexts of all documents, in order; those that the store has already are only looked up."""
    store_path = config.out / "store" if config.store is None else config.store
    texts = config.out / "contexts"
    texts.mkdir(exist_ok=True)
    command = PrefillCommand(
        config.model,
        store_path,
        config.indexed(),
        config.dense_layers,
        config.calibration,
        device.type,
        config.index,
        attention,
        rows,
    )
    how = "" if attention == "exact" else f"-{attention}"
    how += "" if rows == AS_DTYPE else f"-{rows}"
    advance = start_stage(f"prefilling {length:,} tokens{how}", len(documents))
    ids = []
    for number, document in enumerate(documents):
        digest = hashlib.sha256(document.text.encode()).hexdigest()[:12]
        file = texts / f"{length}-{digest}.txt"
        file.write_text(document.text, encoding="utf-8")
        report = command.run(file, f"evaluate-{length}-{number}{how}")
        if report["tokens"] != length:
            raise InvalidArgumentError(
                f"the prefill worker made {report['tokens']} tokens of {file}, expected {length}: the tokenizer does "
                "not give the same ids for a text that is read from a file"
            )
        ids.append(report["id"])
        advance()
    store = Store(store_path)
    return store, [store.manifest(context_id) for context_id in ids]


def question_segment(
    tokenizer: Tokenizer, question: Question, *, chat: bool = False, observed: bool = False
) -> Segment:
    """Prompt and answer as token ids; the answer includes what ends it (`Question.ending`).

    chat: the question is a turn of the model's chat template. What comes behind it is tokenised by itself then, as the
    model's own words are.
    """
    turn: list[int] = []
    if chat:
        turn = tokenizer.encode_turns((Message(Role.USER, question.question),))
        question = chat_question(question, tokenizer.format_question(question.question))
    prompt = tokenizer.encode_behind(question.prompt)
    whole = tokenizer.encode_behind(f"{question.prompt} {question.answer}{question.ending}")
    if whole[: len(prompt)] != prompt:
        whole = prompt + tokenizer.encode_behind(f" {question.answer}{question.ending}")
    return Segment((*turn, *whole), len(turn) + len(prompt), question.family, observed)


def _text_segment(tokenizer: Tokenizer, document: Document, tokens: int) -> Segment:
    ids = tokenizer.encode_behind(document.continuation[: 16 * tokens])[:tokens]
    return Segment(tuple(ids), None, document.family, observed=True)


def _stored_bytes(
    contexts: Sequence[Manifest],
    twins: Sequence[Manifest],
    device: torch.device,
    placement: Placement,
    variant: Variant,
) -> StoredBytes:
    """What contexts, or their twins, take with the method's indexes and no others, per token on average.

    They are placed as they are.
    """
    names = {spec.name for spec in variant.method.index_specs()}
    meant = twins if variant.after else contexts
    tokens = sum(manifest.token_count for manifest in meant)
    alone = []
    for manifest in meant:
        needed = names | ({HIGH_PLANE} if manifest.rows == INT8 else set())
        kept = tuple(entry for entry in manifest.indexes if entry.name in needed)
        alone.append(replace(manifest, indexes=kept))
    placed = [placed_bytes(manifest, context_device(device), placement) for manifest in alone]
    return StoredBytes(
        sum(manifest.index_bytes for manifest in alone) / tokens,
        sum(each.device for each in placed) / tokens,
        sum(each.host for each in placed) / tokens,
    )
