"""The command `decode-engine make-document`, which needs a tokenizer and no model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decode_engine.evaluation.tasks import FAMILIES, make_document, source_text, write_questions
from index_store.cli.console import FormatOption, OutputFormat, print_json
from index_store.models.folder import resolve_model
from index_store.models.tokenizer import load_tokenizer

ModelOption = Annotated[
    str, typer.Option("--model", help="Packaged model (reader) or path of a Hugging Face folder.")
]

DistractorsOption = Annotated[
    int | None,
    typer.Option(
        "--distractors", help="Further statements that resemble an asked one; by task if not given."
    ),
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option("--text", help="Text to make contexts of, may be repeated; packaged novels by default."),
]


def make_document_command(
    out: Annotated[Path, typer.Option(help="Where to write the text.")],
    questions: Annotated[Path, typer.Option(help="Where to write the questions, one JSON object per line.")],
    tokens: Annotated[int, typer.Option(help="Exact length of the text in the model's tokens.")] = 32768,
    facts: Annotated[int, typer.Option(help="Facts to put into the text.")] = 24,
    ask: Annotated[int | None, typer.Option(help="Questions to write; one per fact by default.")] = None,
    distractors: DistractorsOption = None,
    task: Annotated[str, typer.Option(help=f"One of {', '.join(FAMILIES)}.")] = "single",
    seed: Annotated[int, typer.Option(help="Decides facts and depths.")] = 0,
    text: TextOption = None,
    model: ModelOption = "reader",
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Writes a long real text with facts at known depths, and questions about them."""
    tokenizer = load_tokenizer(resolve_model(model))
    document = make_document(
        tokenizer,
        source_text(text or ()),
        tokens - len(tokenizer.prefix_ids),
        facts=facts,
        seed=seed,
        questions=ask,
        distractors=distractors,
        family=task,
    )
    out.write_text(document.text, encoding="utf-8")
    write_questions(questions, document.questions)
    if output_format is OutputFormat.JSON:
        report = {
            "out": str(out),
            "questions": str(questions),
            "tokens": tokens,
            "task": task,
            "facts": facts,
            "seed": seed,
        }
        print_json(report)
        return
    Console().print(
        f"{out}: {tokens:,} tokens with {facts} facts; {questions}: {len(document.questions)} questions"
    )
