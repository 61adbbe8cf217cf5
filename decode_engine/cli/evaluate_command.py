"""The commands `evaluate` and `evaluate-merge`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from decode_engine.cli.logs import say_device
from decode_engine.evaluation.comparison.evaluate import evaluate
from decode_engine.evaluation.comparison.pictures import check_pictures, draw_pictures
from decode_engine.evaluation.comparison.results import FILES, Results, merge_results, write_results
from decode_engine.evaluation.comparison.tables import results_table, tasks_table
from decode_engine.evaluation.settings import EvaluationConfig
from index_store.cli.console import on_terminal, print_json
from index_store.cli.options import FormatOption, OutputFormat, configured
from index_store.cli.progress import show_stages

PictureOption = Annotated[bool, typer.Option(help="Draw quality and captured mass (needs matplotlib).")]


@configured(EvaluationConfig)
def evaluate_command(
    config: EvaluationConfig, picture: PictureOption = True, output: FormatOption = OutputFormat.TEXT
) -> None:
    """Compares methods with full attention: exact match and KL on questions about long contexts, errors inside layers.

    Contexts are made from held-out text and prefilled through prefill-worker; those that the store has already are
    reused.
    """
    if picture:
        check_pictures()
    say_device(config.device)
    with show_stages(sys.stderr) as start_stage:
        results = evaluate(config, start_stage)
    show_results(results, config.out, picture=picture, output=output)


def show_results(results: Results, out: Path, *, picture: bool, output: OutputFormat) -> None:
    """Draws the pictures and prints the tables, or the JSON."""
    files = [*FILES, *(draw_pictures(out, results.scores, results.maps) if picture else ())]
    if output is OutputFormat.JSON:
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


def evaluate_merge_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs (their --out).")],
    out: Annotated[Path, typer.Option(help="Folder for the combined tables and pictures.")],
    picture: PictureOption = True,
    output: FormatOption = OutputFormat.TEXT,
) -> None:
    """Combines runs that differ in methods and budgets only: one model, the same lengths, questions and seed."""
    if picture:
        check_pictures()
    results = merge_results(runs)
    out.mkdir(parents=True, exist_ok=True)
    write_results(out, results)
    show_results(results, out, picture=picture, output=output)
