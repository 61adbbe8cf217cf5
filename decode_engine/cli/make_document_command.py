"""The command `make-document`, which needs a tokenizer and no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from decode_engine.config import DistractorsOption, ModelOption, TextOption
from decode_engine.evaluation.tasks import FAMILIES, make_document, source_text, write_questions
from index_store.cli.console import print_json
from index_store.cli.options import FormatOption, OutputFormat, configured
from index_store.models.folder import resolve_model
from index_store.models.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True)
class DocumentConfig:
    """`decode-engine make-document`."""

    out: Annotated[Path, Option(help="Where to write the text.")]
    questions: Annotated[Path, Option(help="Where to write the questions, one JSON object per line.")]
    tokens: Annotated[int, Option(help="Exact length of the text in the model's tokens.")] = 32768
    facts: Annotated[int, Option(help="Facts to put into the text.")] = 24
    ask: Annotated[int | None, Option(help="Questions to write; one per fact by default.")] = None
    distractors: DistractorsOption = None
    task: Annotated[str, Option(help=f"One of {', '.join(FAMILIES)}.")] = "single"
    seed: Annotated[int, Option(help="Decides facts and depths.")] = 0
    text: TextOption = ()
    model: ModelOption = "reader"


@configured(DocumentConfig)
def make_document_command(config: DocumentConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Writes a long real text with facts at known depths, and questions about them."""
    tokenizer = load_tokenizer(resolve_model(config.model))
    document = make_document(
        tokenizer,
        source_text(config.text),
        config.tokens - len(tokenizer.prefix_ids),
        facts=config.facts,
        seed=config.seed,
        questions=config.ask,
        distractors=config.distractors,
        family=config.task,
    )
    config.out.write_text(document.text, encoding="utf-8")
    write_questions(config.questions, document.questions)
    if output is OutputFormat.JSON:
        told = {name: getattr(config, name) for name in ("tokens", "task", "facts", "seed")}
        print_json({"out": str(config.out), "questions": str(config.questions), **told})
        return
    Console().print(
        f"{config.out}: {config.tokens:,} tokens with {config.facts} facts; "
        f"{config.questions}: {len(document.questions)} questions"
    )
