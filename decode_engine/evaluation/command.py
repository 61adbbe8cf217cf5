"""The commands `decode-engine evaluate` and `decode-engine make-document`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decode_engine.evaluation.evaluate import EvaluationConfig, evaluate
from decode_engine.evaluation.progress import show_progress
from decode_engine.evaluation.report import check_pictures, draw_picture, results_table
from decode_engine.evaluation.scoring import Score
from decode_engine.evaluation.tasks import (
    held_out_text,
    make_document,
    parse_length,
    read_text,
    write_questions,
)
from index_store.console import FormatOption, OutputFormat, on_terminal, print_json
from index_store.errors import InvalidArgumentError
from index_store.models.loading import load_tokenizer, resolve_model

ModelOption = Annotated[
    str, typer.Option("--model", help="Packaged model (reader) or path of a Hugging Face folder.")
]

LengthsOption = Annotated[
    str, typer.Option("--context-length", help="Context lengths in tokens, comma-separated.")
]
DistractorsOption = Annotated[
    int, typer.Option("--distractors", help="Further facts per context that resemble an asked one.")
]
KeepOption = Annotated[str, typer.Option("--keep", help="Fractions of the keys to keep, comma-separated.")]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="Text to make contexts of; packaged novels by default.")
]


def evaluate_command(
    out: Annotated[Path, typer.Option(help="Folder for results.json, .csv, .md, quality.png and the store.")],
    model: ModelOption = "reader",
    context_length: LengthsOption = "8k,32k",
    questions: Annotated[int, typer.Option(help="Questions per context length.")] = 216,
    facts: Annotated[int, typer.Option(help="Facts, and questions, per context.")] = 24,
    distractors: DistractorsOption = 0,
    methods: Annotated[str, typer.Option(help="Methods, comma-separated.")] = (
        "full,oracle,csattention,csattention-paper"
    ),
    keep: KeepOption = "0.01,0.02,0.05",
    text: TextOption = None,
    text_tokens: Annotated[int, typer.Option(help="Plain-text tokens scored after each context.")] = 96,
    dense_layers: Annotated[str, typer.Option(help="As for prefill-worker run.")] = "auto",
    calibration: Annotated[Path | None, typer.Option(help="As for prefill-worker run.")] = None,
    store: Annotated[Path | None, typer.Option(help="Store for the contexts; OUT/store by default.")] = None,
    seed: Annotated[int, typer.Option(help="Decides facts, depths and parts of the text.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the model: cpu, the only one so far.")] = "cpu",
    picture: Annotated[bool, typer.Option(help="Draw quality against budget (needs matplotlib).")] = True,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Compares methods with full attention: exact match and KL on questions about long contexts.

    Contexts are made from held-out text and prefilled through prefill-worker; those that the store has already are
    reused.
    """
    config = EvaluationConfig(
        model=model,
        out=out,
        context_lengths=tuple(parse_length(part) for part in context_length.split(",")),
        questions=questions,
        facts=facts,
        distractors=distractors,
        methods=tuple(part.strip() for part in methods.split(",")),
        keep=tuple(_parse_ratio(part) for part in keep.split(",")),
        text=text,
        text_tokens=text_tokens,
        dense_layers=dense_layers,
        calibration=calibration,
        store=store,
        seed=seed,
        device=device,
    )
    if picture:
        check_pictures()
    with show_progress(sys.stderr) as start_stage:
        results = evaluate(config, start_stage)
    scores = [Score(**score) for score in results["scores"]]
    if picture:
        draw_picture(out / "quality.png", scores)
    if output_format is OutputFormat.JSON:
        print_json(results)
        return
    terminal = Console() if on_terminal() else Console(width=170)
    terminal.print(results_table(scores, f"{config.model}, {config.questions} questions per context length"))
    terminal.print(
        f"Written to {out}: results.json, results.csv, results.md{', quality.png' if picture else ''}"
    )


def make_document_command(
    out: Annotated[Path, typer.Option(help="Where to write the text.")],
    questions: Annotated[Path, typer.Option(help="Where to write the questions, one JSON object per line.")],
    tokens: Annotated[int, typer.Option(help="Exact length of the text in the model's tokens.")] = 32768,
    facts: Annotated[int, typer.Option(help="Facts to put into the text.")] = 24,
    ask: Annotated[int | None, typer.Option(help="Questions to write; one per fact by default.")] = None,
    distractors: Annotated[int, typer.Option(help="Further facts that resemble an asked one.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides facts and depths.")] = 0,
    text: Annotated[Path | None, typer.Option(help="Source text; packaged novels by default.")] = None,
    model: ModelOption = "reader",
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Writes a long real text with facts at known depths, and questions about them."""
    tokenizer = load_tokenizer(resolve_model(model))
    source = held_out_text() if text is None else read_text(text)
    document = make_document(
        tokenizer,
        source,
        tokens - len(tokenizer.prefix_ids),
        facts=facts,
        seed=seed,
        questions=ask,
        distractors=distractors,
    )
    out.write_text(document.text, encoding="utf-8")
    write_questions(questions, document.questions)
    if output_format is OutputFormat.JSON:
        report = {
            "out": str(out),
            "questions": str(questions),
            "tokens": tokens,
            "facts": facts,
            "seed": seed,
        }
        print_json(report)
        return
    Console().print(
        f"{out}: {tokens:,} tokens with {facts} facts; {questions}: {len(document.questions)} questions"
    )


def _parse_ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f"keep is {text!r}, expected a number such as 0.02") from None
