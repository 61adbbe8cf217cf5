"""The command `decode-engine evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decode_engine.cli.device_option import DeviceOption, PlacementOption, PromptsOption, say_device
from decode_engine.cli.document_command import DistractorsOption, ModelOption, TextOption
from decode_engine.config import AUTO, Prompts
from decode_engine.evaluation.comparison.evaluate import evaluate
from decode_engine.evaluation.comparison.pictures import check_pictures, draw_pictures
from decode_engine.evaluation.comparison.results import FILES, Results, merge_results, write_results
from decode_engine.evaluation.comparison.tables import results_table, tasks_table
from decode_engine.evaluation.settings import EvaluationConfig
from decode_engine.evaluation.tasks import FAMILIES, parse_length
from index_store.cli.console import FormatOption, OutputFormat, on_terminal, print_json
from index_store.cli.progress import show_stages
from index_store.errors import InvalidArgumentError
from index_store.methods.expressions import EXPRESSION_HELP
from index_store.methods.method import METHODS

LengthsOption = Annotated[
    str, typer.Option("--context-length", help="Context lengths in tokens, comma-separated.")
]
AttentionOption = Annotated[
    str,
    typer.Option(
        help="muse, or muse:block=1024,clusters=64,monopole: prefill every context with approximate attention as well, "
        "and compare what it answers with full attention to the exact one."
    ),
]
PictureOption = Annotated[bool, typer.Option(help="Draw quality and captured mass (needs matplotlib).")]


def evaluate_command(
    out: Annotated[Path, typer.Option(help="Folder for the results, the pictures and the store.")],
    model: ModelOption = "reader",
    context_length: LengthsOption = "8k,32k",
    tasks: Annotated[str, typer.Option(help=f"Tasks, comma-separated: {', '.join(FAMILIES)}.")] = "single",
    questions: Annotated[int, typer.Option(help="Questions per context length, over all tasks.")] = 216,
    facts: Annotated[int, typer.Option(help="Questions per context at most.")] = 24,
    distractors: DistractorsOption = None,
    methods: Annotated[
        str, typer.Option(help=f"Methods, comma-separated, each {EXPRESSION_HELP}.")
    ] = ",".join(METHODS),
    keep: Annotated[
        str, typer.Option(help="Fractions of the keys to keep, comma-separated.")
    ] = "0.01,0.02,0.05,0.1",
    mass: Annotated[
        str, typer.Option(help="Attention masses to keep, for methods that follow mass.")
    ] = "0.5,0.7,0.9,0.95",
    text: TextOption = None,
    text_tokens: Annotated[int, typer.Option(help="Plain-text tokens scored after each context.")] = 96,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's own chat template.")] = False,
    dense_layers: Annotated[str, typer.Option(help="As for prefill-worker run.")] = "auto",
    calibration: Annotated[Path | None, typer.Option(help="As for prefill-worker run.")] = None,
    index: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="As for prefill-worker run.")
    ] = None,
    index_for: Annotated[
        str, typer.Option(help="Further methods to build indexes for, so that several runs share contexts.")
    ] = "",
    store: Annotated[Path | None, typer.Option(help="Store for the contexts; OUT/store by default.")] = None,
    seed: Annotated[int, typer.Option(help="Decides facts, depths and parts of the text.")] = 0,
    device: DeviceOption = AUTO,
    placement: PlacementOption = AUTO,
    prompts: PromptsOption = Prompts.AUTO,
    attention: AttentionOption = "exact",
    picture: PictureOption = True,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Compares methods with full attention: exact match and KL on questions about long contexts, errors inside layers.

    Contexts are made from held-out text and prefilled through prefill-worker; those that the store has already are
    reused.
    """
    config = EvaluationConfig(
        model=model,
        out=out,
        context_lengths=tuple(map(parse_length, _split(context_length))),
        tasks=_split(tasks),
        questions=questions,
        facts=facts,
        distractors=distractors,
        methods=_split(methods),
        keep=tuple(_parse_number("keep", part) for part in _split(keep)),
        mass=tuple(_parse_number("mass", part) for part in _split(mass)),
        text=tuple(text or ()),
        text_tokens=text_tokens,
        chat=chat,
        dense_layers=dense_layers,
        calibration=calibration,
        index=tuple(index or ()),
        index_for=_split(index_for),
        store=store,
        seed=seed,
        device=device,
        placement=placement,
        prompts=prompts,
        attention=attention,
    )
    if picture:
        check_pictures()
    say_device(device)
    with show_stages(sys.stderr) as start_stage:
        results = evaluate(config, start_stage)
    show_results(results, out, picture=picture, output_format=output_format)


def show_results(results: Results, out: Path, *, picture: bool, output_format: OutputFormat) -> None:
    """Draws the pictures and prints the tables, or the JSON."""
    files = [*FILES, *(draw_pictures(out, results.scores, results.maps) if picture else ())]
    if output_format is OutputFormat.JSON:
        print_json(results.as_json())
        return
    settings = results.setting["settings"]
    terminal = Console() if on_terminal() else Console(width=200)
    title = f"{settings['model']}, {settings['questions']} questions per context length"
    terminal.print(results_table(results.scores, title))
    by_task = tasks_table(results.scores)
    if by_task is not None:
        terminal.print(by_task)
    terminal.print(f"Written to {out}: {', '.join(files)}")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _parse_number(label: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgumentError(f"{label} is {text!r}, expected a number such as 0.02") from None


def evaluate_merge_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs (their --out).")],
    out: Annotated[Path, typer.Option(help="Folder for the combined tables and pictures.")],
    picture: PictureOption = True,
    output_format: FormatOption = OutputFormat.TEXT,
) -> None:
    """Combines runs that differ in methods and budgets only: one model, the same lengths, questions and seed."""
    if picture:
        check_pictures()
    results = merge_results(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, results)
    show_results(results, out, picture=picture, output_format=output_format)
