"""The command `make-document`, which needs a tokenizer and no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from decode_engine.evaluation.tasks import FAMILIES, make_document, source_text, write_questions
from decode_engine.settings.command_options import DistractorsOption, ModelOption, TextOption
from index_store.cli.console import print_json
from index_store.cli.options import AtLeast, FormatOption, OneOf, OutputFile, OutputFormat, configured
from index_store.errors import InvalidArgumentError
from index_store.models.resolve import resolve_model


@dataclass(frozen=True, slots=True)
class DocumentConfig:
    """`decode-engine make-document`."""

    out: Annotated[Path, Option(help="Where to write the text."), OutputFile()]
    questions: Annotated[
        Path, Option(help="Where to write the questions, one JSON object per line."), OutputFile()
    ]
    tokens: Annotated[
        int, Option(help="Exact length of the text in the model's tokens."), AtLeast(1, 2**31)
    ] = 32768
    facts: Annotated[int, Option(help="Facts to put into the text."), AtLeast(1, 100_000)] = 24
    ask: Annotated[
        int | None, Option(help="Questions to write; one per fact by default."), AtLeast(1, 100_000)
    ] = None
    distractors: DistractorsOption = None
    task: Annotated[str, Option(help="What kind of facts and questions."), OneOf(*FAMILIES)] = "single"
    seed: Annotated[int, Option(help="Decides facts and depths."), AtLeast(0)] = 0
    text: TextOption = ()
    model: ModelOption = "reader"

    def __post_init__(self) -> None:
        if self.out.absolute() == self.questions.absolute() or _same_file(self.out, self.questions):
            raise InvalidArgumentError(
                f"--out and --questions are both {str(self.out)!r}, expected two files; one would replace the other"
            )
        if self.ask is not None and self.ask > self.facts:
            raise InvalidArgumentError(
                f"--ask is {self.ask}, expected at most one for each of --facts {self.facts}"
            )


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other) and one.is_file()


@configured(DocumentConfig)
def make_document_command(config: DocumentConfig, output: FormatOption = OutputFormat.TEXT) -> None:
    """Write a text with facts in it, and questions about them.

    The text is a long real one, the facts are at known depths.
    """
    from index_store.models.tokenizer import load_tokenizer

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
    typer.echo(
        f"{config.out}: {config.tokens:,} tokens with {config.facts} facts; "
        f"{config.questions}: {len(document.questions)} questions"
    )
